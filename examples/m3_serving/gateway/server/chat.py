"""What is done for a checked request: media prepared, text encoded, a worker asked."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..errors import MediaTimeout, ModelNotFound, PromptTooLong, WorkerUnavailable
from ..expand import Expander
from ..pipeline import MediaPipeline
from ..pool import DecodePool
from ..protocols import (
    ExpandedPrompt,
    GenerateRequest,
    MediaFetcher,
    ModelFamily,
    PreparedItem,
    PromptPart,
    Tokenizer,
    WorkerClient,
    WorkerHealth,
)
from .admission import Admission, Lease
from .answer import AnswerPiece, stream_answer
from .chat_request import ChatRequest
from .metrics import Metrics
from .openai_objects import PromptCounts
from .template import ChatTemplate

log = logging.getLogger("m3_gateway")

_LONG_CHARS = 1_000_000
"""A tokenizer takes some 200 bytes a token while it works: longer texts are encoded one by one."""


@dataclass(frozen=True)
class Settings:
    """How one gateway serves."""

    model_name: str
    context_tokens: int
    """prompt and answer together"""
    default_max_tokens: int = 1024
    """of an answer whose request does not say, if the context has room"""
    max_chars_per_token: int = 8
    """text with more characters than this times the context is refused before it is encoded"""
    max_body_bytes: int = 64_000_000
    max_requests: int = 256
    max_client_requests: int = 256
    """of one Authorization header, or of one address where there is none"""
    max_bytes: int = 4 << 30
    """of bodies, media and patches of all requests"""
    max_request_bytes: int = 2 << 30
    """the same of one request"""
    body_s: float = 60.0
    """until a body has arrived"""
    media_s: float = 300.0
    """until a request's media are fetched and decoded"""
    stall_s: float = 300.0
    """that a worker may be silent"""
    client_stall_s: float = 60.0
    """that a client may not read"""
    health_s: float = 2.0
    """between two looks at the workers"""
    drain_s: float = 30.0
    """that running requests have after SIGTERM"""
    retry_after_s: int = 1
    """what a 429 or 503 suggests"""


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also go back."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""


class WorkerWatch:
    """What is known of the workers, so that media are not prepared for nobody."""

    _PATIENCE_S = 5.0

    def __init__(self, client: WorkerClient, metrics: Metrics, interval_s: float) -> None:
        """Knows nothing until the first look."""
        self._client, self._metrics, self._interval_s = client, metrics, interval_s
        self.workers: list[WorkerHealth] = []
        self._looked_at = float("-inf")

    @property
    def any_ready(self) -> bool:
        """Whether a request has a chance."""
        return any(worker.ready for worker in self.workers)

    async def look(self) -> None:
        """Asks the client; no answer is a bad answer."""
        try:
            async with asyncio.timeout(self._PATIENCE_S):
                self.workers = await self._client.health()
        except Exception as error:
            log.warning("the workers' health cannot be told: %r", error)
            self.workers = []
        self._looked_at = time.monotonic()
        self._metrics.set_workers(self.workers)

    async def check(self) -> bool:
        """Whether one is ready; looks again where none was and the last look is old."""
        if not self.any_ready and time.monotonic() - self._looked_at > self._interval_s / 4:
            await self.look()
        return self.any_ready

    async def keep_looking(self) -> None:
        """For ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)


class ChatService:
    """Everything behind the routes. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        family: ModelFamily,
        tokenizer: ChatTokenizer,
        template: ChatTemplate,
        fetcher: MediaFetcher,
        pool: DecodePool,
        client: WorkerClient,
        metrics: Metrics | None = None,
    ) -> None:
        """Takes over pool and client: `close` closes them."""
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.admission = Admission(
            settings.max_requests,
            settings.max_client_requests,
            settings.max_bytes,
            settings.max_request_bytes,
        )
        self.watch = WorkerWatch(client, self.metrics, settings.health_s)
        self.created = int(time.time())
        self.draining = False
        self.aborting = asyncio.Event()
        """set when running requests have had their time"""
        self._tokenizer, self._template = tokenizer, template
        self._expander = Expander(family, tokenizer)
        self._pipeline = MediaPipeline(family, fetcher, pool)
        self._pool, self._client = pool, client
        self._long_texts = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.metrics.in_flight.set_function(lambda: self.admission.requests)
        self.metrics.bytes_in_flight.set_function(lambda: self.admission.bytes)
        self.metrics.decoders.set_function(lambda: len(pool.child_pids))

    async def start(self) -> None:
        """Begins to watch the workers."""
        self._looking = asyncio.create_task(self.watch.keep_looking())

    async def close(self) -> None:
        """Ends everything that it started or was given."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self._client.close()
        await self._pool.close()

    def drain(self) -> None:
        """No new requests from now on."""
        self.draining = True

    def check_model(self, name: str) -> None:
        """ModelNotFound unless it is the one served."""
        if name != self.settings.model_name:
            raise ModelNotFound(
                f"model {name[:100]!r} is not served here, {self.settings.model_name!r} is",
                param="model",
            )

    async def prepare(
        self, chat: ChatRequest, request_id: str, lease: Lease
    ) -> tuple[GenerateRequest, PromptCounts]:
        """What a worker is to be asked.

        The cheap refusals come first: nothing is fetched for a request that cannot be served.

        Raises:
            GatewayError: of any kind.
        """
        self.check_model(chat.model)
        chars = self._check_lengths(chat)
        if not await self.watch.check():
            raise WorkerUnavailable("no worker is ready")
        with self._phase("render"):
            modalities = [item.modality for item in chat.media]
            parts = await asyncio.to_thread(self._template.render, chat.messages, modalities)
        items: list[PreparedItem] = []
        if chat.media:
            with self._phase("media"):
                items = await self._media(chat, lease)
        with self._phase("expand"):
            async with self._long_texts if chars > _LONG_CHARS else contextlib.nullcontext():
                prompt = await asyncio.to_thread(self._expand, chat, parts, items)
        room = self.settings.context_tokens - len(prompt.token_ids)
        max_new = chat.max_tokens or min(self.settings.default_max_tokens, room)
        request = GenerateRequest(request_id, prompt, max_new, chat.sampling, chat.ignore_eos)
        counts = PromptCounts.of(prompt.token_ids, prompt.items)
        for kind in ("total", "image", "video"):
            name = "prompt" if kind == "total" else kind
            self.metrics.tokens.labels(name).inc(getattr(counts, kind))
        return request, counts

    def answer(self, request: GenerateRequest, stops: Sequence[str]) -> AsyncIterator[AnswerPiece]:
        """The answer as it comes; close it to cancel. Raises as `stream_answer`."""
        decode: Callable[[Sequence[int]], str] = self._tokenizer.decode
        return stream_answer(self._client, request, decode, stops, self.settings.stall_s)

    def _check_lengths(self, chat: ChatRequest) -> int:
        """The messages' characters, if they can fit. Raises PromptTooLong."""
        context = self.settings.context_tokens
        if chat.max_tokens is not None and chat.max_tokens >= context:
            raise PromptTooLong(
                f"max_tokens must be less than the context's {context} tokens, "
                f"got {chat.max_tokens}",
                param="max_tokens",
            )
        chars = sum(
            sum(len(text) for text in message.extra.values())
            + sum(len(piece) for piece in message.content or () if isinstance(piece, str))
            for message in chat.messages
        )
        if chars > context * self.settings.max_chars_per_token:
            raise PromptTooLong(
                f"the messages have {chars} characters, far more than the context's {context} "
                "tokens can be",
                param="messages",
            )
        return chars

    async def _media(self, chat: ChatRequest, lease: Lease) -> list[PreparedItem]:
        try:
            async with asyncio.timeout(self.settings.media_s):
                items = await self._pipeline.prepare(chat.media, lease.hold)
        except TimeoutError:
            raise MediaTimeout(
                f"the media were not fetched and decoded within {self.settings.media_s:g} s",
                param="messages",
            ) from None
        for item in items:
            self.metrics.media.labels(item.modality).inc()
        return items

    def _expand(
        self, chat: ChatRequest, parts: Sequence[PromptPart], items: Sequence[PreparedItem]
    ) -> ExpandedPrompt:
        context, wanted = self.settings.context_tokens, chat.max_tokens or 1
        try:
            return self._expander.expand(parts, items, context - wanted)
        except PromptTooLong as error:
            raise PromptTooLong(
                f"{error.message}: the context has {context} tokens, the answer takes {wanted}",
                param="messages",
            ) from None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.metrics.phase.labels(name).time():
            yield
