"""A whole gateway without a worker: a byte tokenizer, a client that answers as it is told, and ways
to talk to the application, in the test's process or over a socket.
"""

import asyncio
import base64
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx
import uvicorn
from gateway_media import FAMILY, image_bytes, pattern
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.m3_serving.gateway.fetch import HttpFetcher
from examples.m3_serving.gateway.pool import DecodePool
from examples.m3_serving.gateway.protocols import (
    GeneratedTokens,
    GenerateRequest,
    ModelFamily,
    WorkerHealth,
)
from examples.m3_serving.gateway.server.app import create_app
from examples.m3_serving.gateway.server.chat import ChatService, Settings
from examples.m3_serving.gateway.server.template import ChatTemplate
from examples.m3_serving.gateway.server.text import TextTokenizer

MODEL = "tiny-m3"
CHAT_TOKENS = ("]~!b[", "]~b]", "[e~[", "<|im_start|>", "<|im_end|>")


def tokenizer_json(family: ModelFamily = FAMILY, words: Sequence[str] = ()) -> str:
    """A tokenizer.json of bytes, `words` and the special tokens of a family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for word in words:
        (piece, _), *_ = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word)
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocabulary:
                vocabulary[piece[:end]] = len(vocabulary)
                merges.append((piece[: end - 1], piece[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [*CHAT_TOKENS, *family.placeholder_tokens, *family.bracket_tokens]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens]
    )
    return tokenizer.to_str()


TOKENIZER = TextTokenizer(tokenizer_json())


@dataclass
class FakeWorkers:
    """A WorkerClient that answers every request with `text`, a token a message.

    What it was asked is in `requests`; how many answers were closed before their end, in
    `cancelled`.
    """

    text: str = "Hello, wörld 😀!"
    per_message: int = 1
    delay_s: float = 0.0
    finish: str = "stop"
    cached: int = 0
    error: Exception | None = None
    """raised after `error_after` messages"""
    error_after: int = 0
    stall_after: int | None = None
    """messages, after which nothing comes any more"""
    health_is: list[WorkerHealth] = field(
        default_factory=lambda: [WorkerHealth("w0", True, 1, 2), WorkerHealth("w1", False, 0, 0)]
    )
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    closed: bool = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedTokens]:
        self.requests.append(request)
        ids = TOKENIZER.encode_plain(self.text)[: request.max_new_tokens]
        reason = "length" if len(ids) == request.max_new_tokens else self.finish
        self.running += 1
        whole = False
        try:
            for number, at in enumerate(range(0, len(ids), self.per_message)):
                if self.error is not None and number == self.error_after:
                    raise copy.copy(self.error)  # one that was raised keeps what it went through
                if number == self.stall_after:
                    await asyncio.Event().wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                last = at + self.per_message >= len(ids)
                whole = last
                cached = self.cached if number == 0 else 0
                yield GeneratedTokens(
                    tuple(ids[at : at + self.per_message]), reason if last else None, cached
                )
            if self.error is not None and not whole:
                raise copy.copy(self.error)  # one that was raised keeps what it went through
        finally:
            self.running -= 1
            self.cancelled += not whole

    async def health(self) -> list[WorkerHealth]:
        return self.health_is

    async def close(self) -> None:
        self.closed = True


@contextlib.asynccontextmanager
async def gateway(
    workers: FakeWorkers | None = None,
    *,
    family: ModelFamily = FAMILY,
    template: str | None = None,
    tokenizer: TextTokenizer | None = None,
    fetcher=None,
    pool=None,
    **settings,
):
    """A started service."""
    settings = {"context_tokens": 4096, "health_s": 0.2, "stall_s": 20.0, **settings}
    service = ChatService(
        Settings(MODEL, **settings),
        family=family,
        tokenizer=tokenizer or TextTokenizer(tokenizer_json(family)),
        template=ChatTemplate(template or family.chat_template, family),
        fetcher=fetcher or HttpFetcher(),
        pool=pool or DecodePool(2),
        client=workers or FakeWorkers(),
    )
    await service.start()
    try:
        yield service
    finally:
        await service.close()


@contextlib.asynccontextmanager
async def client_of(service: ChatService):
    """An HTTP client of the application, without a socket between; answers come as a whole."""
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@contextlib.asynccontextmanager
async def socket_of(service: ChatService):
    """The port of a real server of the application; the service is the caller's to start."""
    config = uvicorn.Config(
        create_app(service), port=0, lifespan="off", log_level="error", access_log=False, ws="none"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # the test's are the test's
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


def with_client(use, workers: FakeWorkers | None = None, **options):
    """What `await use(client)` gives with a gateway of these options."""

    async def main():
        async with gateway(workers, **options) as service, client_of(service) as client:
            return await use(client)

    return asyncio.run(main())


def text_body(text: str = "Hi", **changes) -> dict:
    """A request of one user message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **changes}


def post(body, workers: FakeWorkers | None = None, *, headers=None, **options) -> httpx.Response:
    """One request's answer; the body as bytes, or as what is to be JSON."""

    async def use(client):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(
            "/v1/chat/completions",
            content=content,
            headers={"content-type": "application/json", **(headers or {})},
        )

    return with_client(use, workers, **options)


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


SMALL_IMAGE = image_bytes(pattern(56, 56))
SMALL_URL = data_url(SMALL_IMAGE)


def image_part(url: str = SMALL_URL, **options) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def video_part(url: str, **options) -> dict:
    return {"type": "video_url", "video_url": {"url": url, **options}}


def events(text: str) -> list[dict | str]:
    """The data of server-sent events, parsed where they are JSON."""
    assert text.endswith("\n\n") or not text
    found = []
    for block in text.split("\n\n")[:-1]:
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def streamed_text(found: Sequence[dict | str]) -> str:
    """The answer of a stream's events."""
    return "".join(
        choice["delta"].get("content", "")
        for event in found
        if isinstance(event, dict)
        for choice in event.get("choices", [])
    )


def ready(*states: bool) -> list[WorkerHealth]:
    return [WorkerHealth(f"w{i}", state, 0, 0) for i, state in enumerate(states)]
