"""The HTTP side: OpenAI's chat API in front of the media pipeline and the workers.

Reading order: `app.py` (routes), `exchange.py` (one request from its first byte to its last),
`chat.py` (what is done for it), `chat_request.py` (what it may say), `template.py` and `text.py`
(text to tokens and back), `answer.py` (the worker's stream as text), `admission.py` (how much at a
time), `openai_objects.py`, `metrics.py`, `command.py` (the process).

Needs fastapi, uvicorn, jinja2, prometheus-client and tokenizers beside what the package needs.
"""
