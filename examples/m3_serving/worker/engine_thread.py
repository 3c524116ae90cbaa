"""The engine in a thread of its own, beside the event loop that talks to the gateway.

The engine belongs to that thread alone. The loop leaves it commands; after each step it leaves the
loop what each request got. A request whose call is gone is aborted between two steps, and only when
that is done is its memory counted as free.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..engine import Engine
from ..media import Medium
from ..sampling import SamplingParams
from ..scheduler import Request, State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What a step gave a request."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    cached_tokens: int


class EngineFailed(Exception):
    """The engine raised."""


@dataclass(eq=False)
class Stream:
    """One request from the loop's side: `Update`s, or the failure that ended it."""

    events: "asyncio.Queue[Update | EngineFailed]"
    on_gone: Callable[[], None]
    """called in the loop when the engine holds nothing of the request any more"""
    gone: bool = False


@dataclass(eq=False)
class _Running:
    """One request from the engine's side."""

    stream: Stream
    request: Request
    sent: int = 0


@dataclass
class _Command:
    """Add a request, or end that of a stream."""

    stream: Stream
    prompt: list[int] = field(default_factory=list)
    options: dict | None = None
    """of `Engine.add_request`; None: abort"""


class EngineThread:
    """Runs an engine. Made and used in one event loop."""

    def __init__(self, engine: Engine, *, stall_s: float = 60.0) -> None:
        """Starts the thread.

        Args:
            engine: nobody else may use it from now on.
            stall_s: a step that takes longer makes the worker not ready.
        """
        self._engine, self._stall_s = engine, stall_s
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._commands: list[_Command] = []
        self._closed = False
        self._running: dict[Stream, _Running] = {}
        self._failure: str | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # What the event loop calls.

    def submit(
        self,
        prompt: list[int],
        media: list[Medium],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        ignore_eos: bool,
        on_gone: Callable[[], None],
    ) -> Stream:
        """Hands a checked request over. Arguments: see `Engine.add_request`.

        `on_gone` is called in the event loop when the engine holds nothing of it any more.
        """
        stream = Stream(asyncio.Queue(), on_gone)
        options = {
            "media": media,
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "ignore_eos": ignore_eos,
        }
        self._command(_Command(stream, prompt, options))
        return stream

    def cancel(self, stream: Stream) -> None:
        """Ends a request, if it is not over."""
        if not stream.gone:
            self._command(_Command(stream))

    @property
    def counts(self) -> tuple[int, int]:
        """(requests in the engine's batch, requests that wait for it)."""
        scheduler = self._engine.scheduler
        added = sum(command.options is not None for command in self._commands)
        return len(scheduler.running), len(scheduler.waiting) + added

    @property
    def trouble(self) -> str:
        """Why no request should come here; empty if all is well."""
        if self._failure is not None:
            return self._failure
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stall_s:
            return f"a step has taken {time.monotonic() - began:.0f} s"
        return ""

    async def close(self) -> None:
        """Ends the thread after its step; requests that are not over fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _command(self, command: _Command) -> None:
        with self._wake:
            if not self._closed and self._failure is None:
                self._commands.append(command)
                self._wake.notify()
                return
        self._deliver([(command.stream, EngineFailed(self._failure or "the worker is closing"))])

    def _deliver(self, events: list[tuple[Stream, Update | EngineFailed]]) -> None:
        for stream, event in events:
            stream.events.put_nowait(event)
            over = isinstance(event, EngineFailed) or event.finish_reason
            if over and not stream.gone:
                stream.gone = True
                stream.on_gone()

    # What the thread does.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        except Exception as error:
            log.exception("the engine failed")
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
        with self._wake:
            self._closed = True
            streams = [*self._running, *(command.stream for command in self._commands)]
            self._running.clear()
            self._commands.clear()
        reason = EngineFailed(self._failure or "the worker is closing")
        self._send([(stream, reason) for stream in dict.fromkeys(streams)])

    def _wait_for_work(self) -> bool:
        """False when it is time to end."""
        with self._wake:
            while not (self._commands or self._closed or self._engine.has_work):
                self._wake.wait()
            return not self._closed

    def _turn(self) -> None:
        """Commands, then a step. Its variables end with it: they hold requests' media."""
        with self._wake:
            commands, self._commands = self._commands, []
        self._send([event for command in commands for event in self._obey(command)])
        self._step_began = time.monotonic()
        given = self._engine.step()
        self._step_began = None
        self._send(self._updates(given))

    def _send(self, events: list[tuple[Stream, Update | EngineFailed]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)

    def _obey(self, command: _Command) -> list[tuple[Stream, Update | EngineFailed]]:
        stream = command.stream
        if command.options is None:
            running = self._running.pop(stream, None)
            if running is None:
                return []
            self._engine.abort(running.request)
            return [(stream, Update((), "abort", 0))]
        try:
            request = self._engine.add_request(command.prompt, **command.options)
        except ValueError as error:  # the checks before should have found it
            return [(stream, EngineFailed(f"the engine refuses the request: {error}"))]
        self._running[stream] = _Running(stream, request)
        return []

    def _updates(self, given: list[Request]) -> list[tuple[Stream, Update]]:
        if not given:
            return []
        by_request = {running.request: running for running in self._running.values()}
        events = []
        for request in given:
            running = by_request[request]
            tokens = tuple(request.generated[running.sent :])
            cached = request.statistics.cached_tokens if running.sent == 0 else 0
            running.sent += len(tokens)
            finished = request.finish_reason if request.state is State.FINISHED else None
            events.append((running.stream, Update(tokens, finished, cached)))
            if finished:
                del self._running[running.stream]
        return events
