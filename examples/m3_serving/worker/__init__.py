"""The worker: one process that owns an engine and answers the gateway over gRPC.

Reading order: `validate.py` (nothing is believed), `admission.py` (room for it), `receive.py` (its
bytes), `engine_thread.py` (the engine beside the event loop), `server.py` (the service),
`__main__.py` (the process). The messages are in `gateway/wire/`.
"""
