"""A checked request's patches, from wherever they come, into memory of this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from ..gateway.wire import shared_memory
from ..gateway.wire import worker_pb2 as pb
from ..gateway.wire.methods import CHUNK_BYTES
from .validate import Refused, RequestSpec


class SharedMemoryLost(Exception):
    """A shared file is not there: the sender should use the wire."""


NextMessage = Callable[[], Awaitable[pb.Message | None]]
"""the next message of a call; None after the last"""


@asynccontextmanager
async def shared_files(start: pb.Start, directory: str | None) -> AsyncIterator[None]:
    """Removes a request's files in the end, also those of a request that is refused."""
    try:
        yield
    finally:
        names = {
            item.shared_memory.name
            for item in start.items
            if item.WhichOneof("payload") == "shared_memory"
        }
        for name in names if directory else ():
            with contextlib.suppress(OSError):
                shared_memory.remove(directory, name)


async def receive_patches(
    start: pb.Start, spec: RequestSpec, next_message: NextMessage, directory: str | None
) -> list[np.ndarray]:
    """Patches of every item in its shape: uint8, or uint16 with the bits of bfloat16.

    Args:
        start: the first message.
        spec: what it said, checked.
        next_message: of the same call; it is read to its end.
        directory: for shared memory, None if there is none.

    Raises:
        Refused: chunks that do not fit what was announced, or numbers that are not finite.
        SharedMemoryLost: a file that is not there.
    """
    buffers = [np.empty(item.num_bytes, np.uint8) for item in spec.items]
    for index, (item, buffer) in enumerate(zip(start.items, buffers, strict=True)):
        kind = item.WhichOneof("payload")
        if kind == "inline":
            buffer[:] = np.frombuffer(item.inline, np.uint8)
        elif kind == "chunked":
            await _receive_chunks(index, buffer, next_message)
        else:
            await asyncio.to_thread(_read_shared, index, item.shared_memory, buffer, directory)
    if await next_message() is not None:
        raise Refused("chunk", "must be announced in the first message, got one more")
    arrays = []
    for index, (item, buffer) in enumerate(zip(spec.items, buffers, strict=True)):
        if item.dtype == pb.DTYPE_BFLOAT16:
            bits = buffer.view("<u2").astype(np.uint16, copy=False)
            if not await asyncio.to_thread(_all_finite, bits):
                raise Refused(f"items[{index}].payload", "must be of finite numbers")
            arrays.append(bits.reshape(item.shape))
        else:
            arrays.append(buffer.reshape(item.shape))
    return arrays


async def _receive_chunks(index: int, buffer: np.ndarray, next_message: NextMessage) -> None:
    offset = 0
    while offset < len(buffer):
        message = await next_message()
        if message is None:
            raise Refused(
                f"items[{index}].chunked",
                f"must be followed by {len(buffer)} bytes, got {offset}",
            )
        if message.WhichOneof("part") != "chunk":
            raise Refused("chunk", "must follow the first message, got something else")
        chunk = message.chunk
        if (chunk.item, chunk.offset) != (index, offset):
            raise Refused(
                "chunk",
                f"must be of item {index} at byte {offset}, got item {chunk.item} at "
                f"{chunk.offset}",
            )
        end = offset + len(chunk.data)
        if not offset < end <= min(len(buffer), offset + CHUNK_BYTES):
            raise Refused(
                "chunk",
                f"must have 1 to {min(len(buffer) - offset, CHUNK_BYTES)} bytes, got "
                f"{len(chunk.data)}",
            )
        buffer[offset:end] = np.frombuffer(chunk.data, np.uint8)
        offset = end


def _read_shared(
    index: int, source: pb.SharedMemory, buffer: np.ndarray, directory: str | None
) -> None:
    if directory is None:
        raise SharedMemoryLost("this worker has no shared memory")
    try:
        shared_memory.read_into(directory, source.name, source.offset, memoryview(buffer))
    except ValueError as error:
        raise Refused(f"items[{index}].shared_memory", str(error)) from error
    except OSError as error:
        raise SharedMemoryLost(f"{source.name}: {error.strerror}") from error


def _all_finite(bits: np.ndarray) -> bool:
    """Whether no bfloat16 is an infinity or no number: their exponents are all ones."""
    step = 1 << 20
    flat = bits.reshape(-1)
    return not any(
        ((flat[i : i + step] & 0x7F80) == 0x7F80).any() for i in range(0, len(flat), step)
    )
