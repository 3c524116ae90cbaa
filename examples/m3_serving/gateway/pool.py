"""A pool of processes that decode. What hostile bytes can do ends with the process they are in.

Each child has one job at a time. Time is watched from here (wall) and by the kernel (CPU), memory
by the kernel; pixels and frames are checked inside, before decoding. A child that dies or does not
answer in time costs its own request an error; its place gets a new child with the next job.

Children are started by folder, not by package name, so that they import nothing but the gateway.
Their environment holds only what a Python process needs: no secret of the server is in it.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import channel
from .errors import DecoderCrashed, MediaTooLarge, MediaTooSlow, Overloaded, error_from_code
from .protocols import Decoded, PatchGeometry

_PACKAGE = Path(__file__).resolve().parent
_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    f"from {_PACKAGE.name}.child import run_from_arguments; run_from_arguments()"
)
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
_SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class PoolLimits:
    """What one job may take."""

    wall_s: float = 60.0
    cpu_s: int = 60
    memory_bytes: int = 3 << 30
    """address space beyond the libraries'"""
    input_bytes: int = 256 << 20
    output_bytes: int = 1 << 30
    startup_s: float = 60.0
    """until a new child is ready"""
    jobs_per_child: int = 1000
    """then it is replaced, so that a leak in a decoder cannot grow for ever"""
    queued_jobs: int = 256
    """jobs waiting for a child, above which more are refused"""


class _Child:
    """One process and the pool's end of its socket."""

    def __init__(self, limits: PoolLimits) -> None:
        self.jobs = 0
        self.sock, theirs = socket.socketpair()
        with theirs:
            for end in (self.sock, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            self.sock.setblocking(False)
            path = [entry for entry in sys.path if entry] + [str(_PACKAGE.parent)]
            numbers = (theirs.fileno(), limits.memory_bytes, limits.cpu_s, limits.input_bytes)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, "\n".join(path), *map(str, numbers)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the terminal is the server's to handle
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )

    def kill(self) -> "asyncio.Future[int]":
        """Ends the process; the future has its exit status."""
        self.sock.close()
        self.process.kill()
        return asyncio.get_running_loop().run_in_executor(None, self.process.wait)


class DecodePool:
    """Runs jobs (`job_spec.make_job`) in child processes. Belongs to one event loop."""

    def __init__(self, workers: int, limits: PoolLimits | None = None) -> None:
        """Starts nothing yet: each child starts with the first job that needs it.

        Args:
            workers: children at a time, one a core is right.
            limits: of each job.
        """
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.limits = limits or PoolLimits()
        self._workers, self._closed = workers, False
        self._places = asyncio.Semaphore(workers)
        self._idle: list[_Child] = []
        self._running: set[_Child] = set()
        self._dying: set[asyncio.Future[int]] = set()
        self._queued = 0

    @property
    def child_pids(self) -> list[int]:
        """Process ids of the children, idle ones first."""
        return [child.process.pid for child in [*self._idle, *self._running]]

    async def run(self, job: dict[str, Any], data: bytes) -> Decoded:
        """Decodes one medium.

        Cancelling it kills the child, so that nobody's clip is decoded for a client that has left.

        Args:
            job: as `job_spec.make_job` builds it.
            data: the file.

        Raises:
            GatewayError: refused by a decoder, over a limit, or no room (Overloaded).
        """
        if len(data) > self.limits.input_bytes:
            raise MediaTooLarge(f"a medium may have {self.limits.input_bytes} bytes to be decoded")
        if self._queued >= self.limits.queued_jobs:
            raise Overloaded(f"{self._queued} media are waiting to be decoded already")
        self._queued += 1
        try:
            await self._places.acquire()
        finally:
            self._queued -= 1
        try:
            if self._closed:
                raise Overloaded("the gateway is shutting down")
            return await self._run_in_child(job, data)
        finally:
            self._places.release()

    async def _run_in_child(self, job: dict[str, Any], data: bytes) -> Decoded:
        child = await self._take()
        reusable = False
        try:
            async with asyncio.timeout(self.limits.wall_s):
                header, payload = await self._exchange(child, job, data)
            child.jobs += 1
            reusable = not header.get("retire") and child.jobs < self.limits.jobs_per_child
        except TimeoutError:
            raise MediaTooSlow(
                f"decoding took longer than the {self.limits.wall_s:g} s it may take"
            ) from None
        except channel.ChannelClosed as error:
            raise await self._why(child) from error
        finally:
            self._running.discard(child)
            if reusable:
                self._idle.append(child)
            else:
                self._discard(child)
        if "error" in header:
            raise error_from_code(header["error"], str(header.get("message")))
        return _checked(header, payload, job)

    async def _exchange(
        self, child: _Child, job: dict[str, Any], data: bytes
    ) -> tuple[dict[str, Any], bytearray]:
        await channel.send_async(child.sock, job, memoryview(data))
        return await channel.receive_async(child.sock, self.limits.output_bytes)

    async def _take(self) -> _Child:
        """An idle child that lives, or a new one that is ready."""
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                self._running.add(child)
                return child
            self._discard(child)
        child = _Child(self.limits)
        ready = False
        self._running.add(child)
        try:
            async with asyncio.timeout(self.limits.startup_s):
                await channel.receive_async(child.sock, 0)
            ready = True
            return child
        except (TimeoutError, channel.ChannelClosed) as error:
            # Not the client's fault: a broken installation, or no memory for a process.
            raise RuntimeError("a decoding process does not start") from error
        finally:
            if not ready:
                self._running.discard(child)
                self._discard(child)

    def _discard(self, child: _Child) -> None:
        dying = child.kill()
        self._dying.add(dying)
        dying.add_done_callback(self._dying.discard)

    @staticmethod
    async def _why(child: _Child) -> DecoderCrashed | MediaTooSlow:
        """What to tell the client of a child that closed its socket."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await loop.run_in_executor(None, child.process.wait, 1.0)
        if child.process.returncode == -signal.SIGXCPU:
            return MediaTooSlow("decoding took more CPU time than it may take")
        return DecoderCrashed("the process that decoded the medium died")

    async def close(self) -> None:
        """Ends all children; jobs that still run or wait fail."""
        if self._closed:
            return
        self._closed = True
        for child in self._running:
            child.process.kill()  # its job sees that and cleans up
        for _ in range(self._workers):
            await self._places.acquire()
        for child in self._idle:
            self._discard(child)
        self._idle.clear()
        await asyncio.gather(*self._dying)
        for _ in range(self._workers):
            self._places.release()


def _checked(header: dict[str, Any], payload: bytearray, job: dict[str, Any]) -> Decoded:
    """The child's answer, believed in nothing: hostile bytes may have taken the child over."""
    geometry = PatchGeometry(**job["geometry"])
    try:
        grid = tuple(map(int, header["grid"]))
        indices = tuple(map(int, header["indices"]))
        timestamps = tuple(map(float, header["timestamps"]))
        t, gh, gw = grid
        consistent = (
            min(grid) > 0
            and gh % geometry.merge == 0
            and gw % geometry.merge == 0
            and t == -(-len(indices) // geometry.temporal)
            and len(indices) == len(timestamps)
            and all(map(math.isfinite, timestamps))
            and t * gh * gw * geometry.row_width == len(payload)
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        consistent = False
    if not consistent:
        raise DecoderCrashed("the process that decoded the medium gave a broken answer")
    patches = np.frombuffer(payload, np.uint8).reshape(t * gh * gw, geometry.row_width)
    return Decoded(patches, grid, indices, timestamps, str(header.get("processor")))
