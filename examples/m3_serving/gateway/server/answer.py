"""A worker's stream of tokens as text."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import WorkerLost, WorkerTimeout
from ..protocols import GeneratedTokens, GenerateRequest, WorkerClient
from .text import StopFilter, TextStream


@dataclass(frozen=True)
class AnswerPiece:
    """What is new in an answer."""

    text: str
    completion_tokens: int
    """generated so far"""
    cached_tokens: int
    """of the prompt"""
    finish_reason: Literal["stop", "length"] | None = None
    """set in the last piece only"""


async def stream_answer(
    client: WorkerClient,
    request: GenerateRequest,
    decode: Callable[[Sequence[int]], str],
    stops: Sequence[str],
    stall_s: float,
) -> AsyncIterator[AnswerPiece]:
    """The answer piece by piece, one a message of the worker.

    Closing it cancels the request at the worker; a stop string does the same.

    Args:
        client: the way to the workers.
        request: what is asked.
        decode: from ids to text.
        stops: strings before which the answer ends.
        stall_s: seconds that the worker may be silent, before its first message too.

    Raises:
        GatewayError: as `WorkerClient.generate`; WorkerTimeout; WorkerLost for a stream that ends
            without saying so.
    """
    text, stop = TextStream(decode), StopFilter(stops)
    completion = cached = 0
    messages = client.generate(request)
    del request  # its media are the client's to keep, as long as it needs them
    try:
        while True:
            message = await _next(messages, stall_s)
            completion += len(message.token_ids)
            cached = max(cached, message.cached_tokens)
            new = text.push(message.token_ids)
            if message.finish_reason:
                new += text.finish()
            shown = stop.push(new)
            if stop.stopped:
                yield AnswerPiece(shown, completion, cached, "stop")
                return
            if message.finish_reason:
                shown += stop.finish()
                yield AnswerPiece(shown, completion, cached, message.finish_reason)
                return
            yield AnswerPiece(shown, completion, cached)
    finally:
        close = getattr(messages, "aclose", None)
        if close is not None:
            await close()


async def _next(messages: AsyncIterator[GeneratedTokens], stall_s: float) -> GeneratedTokens:
    try:
        async with asyncio.timeout(stall_s):
            return await anext(messages)
    except StopAsyncIteration:
        error: Exception = WorkerLost("the worker ended its answer without saying why")
    except TimeoutError:
        error = WorkerTimeout(f"the worker has said nothing for {stall_s:g} s")
    try:
        # Not from inside the handlers: it would carry all that the cancelled call knew.
        raise error
    finally:
        del error
