"""One chat request from its first byte to its last, as an ASGI application.

It has receive and send in its own hands: a body is counted while it comes in; a client that leaves
ends everything that is done for it; an answer that fails before its first byte has an HTTP status,
one that fails later ends with an error event.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    InternalError,
    InvalidBody,
    ShuttingDown,
    UnsupportedContentType,
)
from . import openai_objects as objects
from .admission import Lease
from .chat import ChatService, log
from .chat_request import ChatRequest, parse_chat, parse_json, parsed_bytes

T = TypeVar("T")

_DRAIN_S = 5.0
"""for reading, unkept, a body that was refused, so that its sender gets to read why"""


_SMALL_BYTES = 1 << 20
"""of a body that can be parsed without a look at how much it becomes"""


def _forget(error: BaseException | None) -> None:
    """Cuts an error from the frames it came through.

    Some of them know the error, directly or by a task: circles that would keep a failed request's
    media until the collector comes by.
    """
    while error is not None:
        error.__traceback__ = None
        following = error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = None
        error = following


class ClientGone(Exception):
    """Nobody is there to answer."""


class ChatEndpoint:
    """POST /v1/chat/completions."""

    def __init__(self, service: ChatService) -> None:
        """For the requests of one service."""
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        await _Exchange(self._service, scope, receive, send).run()


class _Exchange:
    def __init__(self, service: ChatService, scope: Scope, receive: Receive, send: Send) -> None:
        self._service, self._settings = service, service.settings
        self._scope, self._receive, self._raw_send = scope, receive, send
        self._headers = Headers(scope=scope)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._started = time.monotonic()
        self._status = 0  # once sent
        self._body_read = False

    async def run(self) -> None:
        metrics = self._service.metrics
        try:
            try:
                await self._serve()
            except GatewayError as error:
                _forget(error)
                await self._refuse(error)
            except ClientGone:
                raise
            except Exception as error:
                log.exception("request %s failed", self._id)
                _forget(error)
                await self._refuse(InternalError("the gateway failed; the fault is logged"))
        except ClientGone as gone:
            _forget(gone)
            metrics.disconnects.inc()
        metrics.requests.labels(str(self._status or 499)).inc()
        metrics.duration.observe(time.monotonic() - self._started)

    async def _serve(self) -> None:
        if self._service.draining:
            raise ShuttingDown("this gateway is being stopped")
        with self._service.admission.request(self._client()) as lease:
            body = await self._read_body(lease)
            # No name here for what is parsed: `_answer` lets go of it when it can.
            await self._while_wanted(self._answer(await self._parse(body, lease), lease))

    @staticmethod
    async def _parse(body: bytearray, lease: Lease) -> ChatRequest:
        """Empties the body."""
        size = 0
        if len(body) > _SMALL_BYTES:
            size = await asyncio.to_thread(parsed_bytes, body)
        with lease.holding(size):
            value = parse_json(body)
            body.clear()
            return parse_chat(value)

    def _client(self) -> str:
        """Whose requests are counted together."""
        authorization = self._headers.get("authorization")
        if authorization:
            return hashlib.sha256(authorization.encode()).hexdigest()
        return (self._scope.get("client") or ("unknown",))[0]

    # --- in ---

    async def _read_body(self, lease: Lease) -> bytearray:
        self._check_headers()
        limit = self._settings.max_body_bytes
        too_large = BodyTooLarge(f"a request's body may have {limit} bytes, this one has more")
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            with self._service.metrics.phase.labels("body").time():
                async with asyncio.timeout(self._settings.body_s):
                    while not self._body_read:
                        piece = await self._receive_piece()
                        if len(body) + len(piece) > limit:
                            raise too_large
                        lease.hold(len(piece))
                        body += piece
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not arrive within {self._settings.body_s:g} s"
            ) from None
        return body

    async def _receive_piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_read = not message.get("more_body", False)
        return message.get("body", b"")

    def _check_headers(self) -> None:
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedContentType(f"the body must not be compressed, got {encoding[:40]!r}")
        declared = self._headers.get("content-type")
        if declared is None:
            return
        kind, *parameters = (part.strip().lower() for part in declared.split(";"))
        if kind != "application/json" and not (
            kind.startswith("application/") and kind.endswith("+json")
        ):
            raise UnsupportedContentType(
                f"the body's content type must be application/json, got {kind[:80]!r}"
            )
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
                raise InvalidBody(f"the body's charset must be utf-8, got {value[:40]!r}")

    async def _drain(self) -> None:
        """Reads a refused body to its end, if that comes soon."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while not self._body_read:
                    await self._receive_piece()
        except TimeoutError:
            pass

    # --- between ---

    async def _while_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result, unless the client leaves first, or the server has to."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._gone())
        abort = asyncio.create_task(self._service.aborting.wait())
        tasks = (task, gone, abort)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    if gone.done():
                        raise ClientGone
                    raise ShuttingDown("this gateway is being stopped, the request was too long")
            return task.result()
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del task, gone, abort, tasks, one  # they know errors that know this frame

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- out ---

    async def _answer(self, chat: ChatRequest, lease: Lease) -> None:
        request, prompt = await self._service.prepare(chat, self._id, lease)
        head = objects.Head(self._id, int(time.time()), chat.model)
        stops, stream, include_usage = chat.stops, chat.stream, chat.include_usage
        del chat  # with its media as text, which nobody needs while the answer grows
        async with aclosing(self._service.answer(request, stops)) as pieces:
            del request
            first = await anext(pieces)
            metrics = self._service.metrics
            metrics.first_token.observe(time.monotonic() - self._started)
            metrics.tokens.labels("cached").inc(first.cached_tokens)
            text, piece = [first.text], first
            if stream:
                await self._begin_stream(head, include_usage)
            while True:
                if stream and piece.text:
                    await self._event(head, {"content": piece.text}, None, include_usage)
                if piece.finish_reason:
                    break
                piece = await anext(pieces)
                text.append(piece.text)
        metrics.tokens.labels("completion").inc(piece.completion_tokens)
        counts = objects.usage(prompt, piece.completion_tokens, piece.cached_tokens)
        if not stream:
            answer = objects.completion(head, "".join(text), piece.finish_reason, counts)
            await self._json(200, answer)
            return
        await self._event(head, {}, piece.finish_reason, include_usage)
        if include_usage:
            last = objects.chunk(head, {}) | {"choices": [], "usage": counts}
            await self._send_body(objects.event(last))
        await self._send_body(objects.event("[DONE]"), more=False)

    async def _begin_stream(self, head: objects.Head, include_usage: bool) -> None:
        await self._send_head(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )
        await self._event(head, {"role": "assistant", "content": ""}, None, include_usage)

    async def _event(
        self, head: objects.Head, delta: dict[str, str], reason: str | None, include_usage: bool
    ) -> None:
        chunk = objects.chunk(head, delta, reason)
        if include_usage:
            chunk["usage"] = None
        await self._send_body(objects.event(chunk))

    async def _refuse(self, error: GatewayError) -> None:
        """Tells what went wrong, by status or as the stream's last event."""
        self._service.metrics.errors.labels(error.code).inc()
        if error.status >= 500:
            log.warning("request %s: %s: %s", self._id, error.code, error.message)
        if self._status:
            await self._send_body(objects.event(error.to_openai()), more=False)
            return
        headers = {}
        if error.status in (429, 503):
            headers["retry-after"] = str(self._settings.retry_after_s)
        if not self._body_read:
            if not isinstance(error, BodyTimeout):
                await self._drain()
            headers["connection"] = "close"
        await self._json(error.status, error.to_openai(), headers)

    async def _json(
        self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        body = objects.to_json(value).encode("utf-8", "replace")
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._send_head(status, fixed | (headers or {}))
        await self._send_body(body, more=False)

    async def _send_head(self, status: int, headers: dict[str, str]) -> None:
        raw = [(b"x-request-id", self._id.encode())]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self._status = status

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                await self._raw_send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
