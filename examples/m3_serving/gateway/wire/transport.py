"""How patches that are too large for a request's first message get to a worker.

In a file in shared memory where both sides see the same directory, else in messages that follow the
first. Another way is another class here, and another kind of payload in worker.proto.
"""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from . import shared_memory
from . import worker_pb2 as pb
from .messages import Payload


class TensorTransport(Protocol):
    """One request's way to one worker. `close` is always called."""

    name: str | None
    """of the file that the first message names; None: the patches follow it"""

    async def put(self, payload: Payload) -> None:
        """Before the first message; OSError if there is no room."""

    def following(self, payload: Payload) -> Iterator[pb.Message]:
        """After the first message."""

    def close(self) -> None:
        """The worker has everything, or will not get it; a second call does nothing."""


class ChunkedTransport:
    """Pieces on the wire."""

    name = None

    async def put(self, payload: Payload) -> None:
        """Nothing to prepare."""

    def following(self, payload: Payload) -> Iterator[pb.Message]:
        """All of it."""
        return payload.chunks()

    def close(self) -> None:
        """Holds nothing."""


class SharedFileTransport:
    """A file that the worker copies out and removes; so does `close`."""

    def __init__(self, directory: str) -> None:
        """Writes nothing yet."""
        self._directory = directory
        self._writing: asyncio.Future[None] | None = None
        self.name = shared_memory.new_name()

    async def put(self, payload: Payload) -> None:
        """Writes the file in a thread."""
        write = asyncio.to_thread(shared_memory.write, self._directory, self.name, payload.parts())
        self._writing = asyncio.ensure_future(write)
        await asyncio.shield(self._writing)

    def following(self, payload: Payload) -> Iterator[pb.Message]:
        """Nothing."""
        return iter(())

    def close(self) -> None:
        """Removes the file, if there is one."""
        name, writing, self._writing = self.name, self._writing, None
        if writing is None:
            return
        if writing.done():
            shared_memory.remove(self._directory, name)
        else:  # cancelled meanwhile, but a thread cannot be
            directory = self._directory
            writing.add_done_callback(lambda _: shared_memory.remove(directory, name))
