"""Several workers behind one interface: the one with the least to do gets the request.

A request that a worker has not accepted may go to the next one: no engine has seen it. One that it
has accepted may not: if the worker died of it, the next would die too. So each request ends in an
answer or in one of the four errors, and never twice.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ..errors import WorkerBusy, WorkerLost, WorkerRejected, WorkerUnavailable
from ..protocols import GeneratedTokens, GenerateRequest, WorkerHealth
from . import shared_memory
from . import worker_pb2 as pb
from .messages import Payload, start_message
from .methods import CHANNEL_OPTIONS, FIELD_KEY, GENERATE, HEALTH, PROTOCOL
from .transport import ChunkedTransport, SharedFileTransport, TensorTransport

log = logging.getLogger(__name__)

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_STATUS_LOST = "Internal error from Core"
"""What gRPC for asyncio says where a call has ended under a write and it has not seen why."""
_MOST_REPETITIONS = 4
"""of a request at a worker that would take it sent in another way, or did not say why it did not"""
_CLIENT_FIELDS = ("prompt", "max_new_tokens", "sampling")
"""of a request: what its author chose, not the gateway"""


@dataclass(frozen=True)
class ClientOptions:
    """How the gateway treats its workers; times in seconds."""

    health_interval: float = 1.0
    health_timeout: float = 2.0
    accept_timeout: float = 60.0
    """until a worker has taken the whole request"""
    sweep_interval: float = 60.0
    shared_directory: str | None = shared_memory.DEFAULT_DIRECTORY
    """for payloads to workers that see the same directory; None: the wire for all"""


@dataclass(eq=False)
class _Worker:
    """One worker as seen from here."""

    index: int
    name: str
    channel: grpc.aio.Channel
    in_flight: int = 0
    """requests sent from here that are not over"""
    bytes_in_flight: int = 0
    others: int = 0
    """requests from elsewhere, by the last report"""
    shared: str = ""
    """what the worker said of its directory for shared memory"""
    may_share: bool = True
    """whether it has found what was put there"""
    health: WorkerHealth = field(init=False)

    def __post_init__(self) -> None:
        self.health = WorkerHealth(self.name, False, 0, 0, "not asked yet")

    @property
    def load(self) -> tuple[int, int, int]:
        return self.in_flight + self.others, self.bytes_in_flight, self.index

    def went_wrong(self, reason: str) -> None:
        self.health = WorkerHealth(self.name, False, 0, 0, reason)

    async def ask(self, timeout: float) -> None:
        """Brings `health` up to date."""
        own = self.in_flight
        call = self.channel.unary_unary(
            HEALTH, pb.HealthRequest.SerializeToString, pb.HealthReply.FromString
        )
        try:
            reply = await call(pb.HealthRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            # No room for this call either, in a flood of requests: full, but not broken.
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.went_wrong(f"{error.code().name.lower()}: {error.details()}")
            return
        ready, reason = reply.ready, reply.reason
        if reply.protocol != PROTOCOL:
            ready, reason = False, f"it speaks protocol {reply.protocol}, this gateway {PROTOCOL}"
        self.health = WorkerHealth(self.name, ready, reply.running, reply.waiting, reason)
        own = max(own, self.in_flight)  # what was sent or ended meanwhile may be counted in it
        self.others = max(0, reply.running + reply.waiting - own)
        self.shared = reply.shared_memory


class _NotAccepted(Exception):
    """This worker did not take the request; another may."""

    def __init__(self, reason: str, *, busy: bool = False, again: bool = False) -> None:
        """Why; whether it has no room, or would take it sent in another way."""
        super().__init__(reason)
        self.reason, self.busy, self.again = reason, busy, again


class GrpcWorkerClient:
    """Implements `WorkerClient`. Belongs to the event loop that uses it first."""

    def __init__(self, addresses: Sequence[str], options: ClientOptions | None = None) -> None:
        """Connects to nothing yet.

        Args:
            addresses: of the workers, in gRPC's notation (`127.0.0.1:5000`, `unix:/run/w.sock`).
            options: see there.
        """
        if not addresses or len(set(addresses)) != len(addresses):
            raise ValueError(f"addresses must be given, each once, got {list(addresses)}")
        self._addresses, self._options = tuple(addresses), options or ClientOptions()
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedTokens]:
        """See `WorkerClient.generate`."""
        await self._start()
        attempt = await self._accepted(request, Payload(request.prompt.items))
        del request  # its media are the worker's now
        try:
            finished = False
            async for tokens in attempt.answer():
                finished = tokens.finish_reason is not None
                yield tokens
            if not finished:
                raise WorkerLost(f"the worker {attempt.worker.name} ended the answer too early")
        finally:
            attempt.close()

    async def health(self) -> list[WorkerHealth]:
        """See `WorkerClient.health`: as of the last time they were asked."""
        await self._start()
        return [worker.health for worker in self._workers]

    async def close(self) -> None:
        """See `WorkerClient.close`."""
        self._closed = True
        tasks = [*self._tasks, *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            await worker.channel.close()

    async def _start(self) -> None:
        """Channels, and one report of each worker, before the first request is given out."""
        if self._closed:
            raise WorkerUnavailable("the gateway is shutting down")
        if self._starting is None:
            options = [*CHANNEL_OPTIONS, *_RECONNECT_OPTIONS]
            self._workers = [
                _Worker(index, address, grpc.aio.insecure_channel(address, options))
                for index, address in enumerate(self._addresses)
            ]
            self._starting = asyncio.create_task(self._first_reports())
        await asyncio.shield(self._starting)

    async def _first_reports(self) -> None:
        options = self._options
        await asyncio.gather(*(worker.ask(options.health_timeout) for worker in self._workers))
        self._tasks = [asyncio.create_task(self._watch(worker)) for worker in self._workers]
        if options.shared_directory:
            self._tasks.append(asyncio.create_task(self._sweep(options.shared_directory)))

    async def _watch(self, worker: _Worker) -> None:
        while True:
            await asyncio.sleep(self._options.health_interval)
            try:
                await worker.ask(self._options.health_timeout)
            except Exception as error:  # the next look may be better; none would be worse
                log.exception("the health of %s cannot be told", worker.name)
                worker.went_wrong(repr(error))

    async def _sweep(self, directory: str) -> None:
        while True:
            await asyncio.to_thread(shared_memory.sweep, directory)
            await asyncio.sleep(self._options.sweep_interval)

    async def _accepted(self, request: GenerateRequest, payload: Payload) -> "_Attempt":
        """The request at the first worker that takes it, least loaded first."""
        tried: set[_Worker] = set()
        busy, reasons = False, []
        again = _MOST_REPETITIONS
        while True:
            ready = [w for w in self._workers if w.health.ready and w not in tried]
            if not ready:
                break
            worker = min(ready, key=lambda worker: worker.load)
            tried.add(worker)
            attempt = _Attempt(worker, request, payload, self._options)
            try:
                await attempt.send()
            except _NotAccepted as refusal:
                attempt.close()
                if refusal.again and again:
                    again -= 1
                    tried.discard(worker)
                    continue
                busy |= refusal.busy
                reasons.append(f"{worker.name}: {refusal.reason}")
                if not refusal.busy:
                    worker.went_wrong(refusal.reason)
                continue
            except BaseException:
                attempt.close()
                raise
            return attempt
        if busy:
            raise WorkerBusy(f"no worker has room for the request ({'; '.join(reasons)})")
        reasons += [f"{w.name}: {w.health.reason}" for w in self._workers if w not in tried]
        raise WorkerUnavailable(f"no worker is ready ({'; '.join(reasons)})")


class _Attempt:
    """One request at one worker. `close` is always called."""

    def __init__(
        self, worker: _Worker, request: GenerateRequest, payload: Payload, options: ClientOptions
    ) -> None:
        self.worker = worker
        self._request: GenerateRequest | None = request
        self._payload: Payload | None = payload
        self._options = options
        self._transport: TensorTransport = ChunkedTransport()
        self._call: grpc.aio.StreamStreamCall | None = None
        self._bytes = sum(len(data) for data in payload.bytes_of)
        worker.in_flight += 1
        worker.bytes_in_flight += self._bytes

    async def send(self) -> None:
        """Until the worker has accepted; _NotAccepted, WorkerRejected or WorkerLost if not."""
        try:
            async with asyncio.timeout(self._options.accept_timeout):
                await self._send()
        except TimeoutError:
            raise _NotAccepted("it did not take the request in time") from None

    async def _send(self) -> None:
        await self._put()
        start = start_message(self._request, self._payload, self._transport.name)
        method = self.worker.channel.stream_stream(
            GENERATE, pb.Message.SerializeToString, pb.Reply.FromString
        )
        call = self._call = method()
        try:
            await self._own(call.write(start))
            await self._expect("admitted")
            for message in self._transport.following(self._payload):
                await self._own(call.write(message))
            await self._own(call.done_writing())
            await self._expect("accepted")
        except (
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
        ) as error:  # or ended before a write
            raise await self._refusal(call) from error
        self._transport.close()
        self._request = self._payload = None

    async def _expect(self, part: str) -> None:
        reply = await self._own(self._call.read())
        if reply is grpc.aio.EOF or reply.WhichOneof("part") != part:
            raise _NotAccepted(f"it answered with something else than that it has {part}")

    async def _own(self, step: Awaitable[Any]) -> Any:
        """The result of a step of the call."""
        try:
            return await step
        except asyncio.CancelledError:
            # Of the call, because its channel was closed, or of the task that waits for it; only
            # the latter may look like that to the caller.
            task = asyncio.current_task()
            if self._call.cancelled() and not (task and task.cancelling()):
                raise WorkerLost("the gateway is shutting down") from None
            raise

    async def _put(self) -> None:
        """Puts the payload where the worker can read it, if that is possible."""
        directory = self._options.shared_directory
        if not (self._payload.large and directory and self.worker.may_share):
            return
        identity = shared_memory.identity(directory)
        if not identity or identity != self.worker.shared:
            return
        self._transport = SharedFileTransport(directory)
        try:
            await self._transport.put(self._payload)
        except OSError:  # no room there
            self._transport = ChunkedTransport()

    async def _refusal(self, call: grpc.aio.StreamStreamCall) -> Exception:
        """What the status of a call means that ended before the acceptance."""
        code, details = await call.code(), await call.details() or "no reason given"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _NotAccepted(details, busy=True)
        if code is grpc.StatusCode.NOT_FOUND and self._transport.name is not None:
            self.worker.may_share = False
            return _NotAccepted(details, again=True)
        if code is grpc.StatusCode.INTERNAL and details == _STATUS_LOST:
            return _NotAccepted(details, again=True)
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
            name = dict(await call.trailing_metadata() or ()).get(FIELD_KEY, "")
            own = name.split(".")[0] not in _CLIENT_FIELDS
            return WorkerRejected(details, param=None if own else name, internal=own)
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):  # a fault, not a refusal
            return WorkerLost(f"the worker {self.worker.name} failed: {details}")
        return _NotAccepted(f"{code.name.lower()}: {details}")

    async def answer(self) -> AsyncIterator[GeneratedTokens]:
        """The tokens as they come; WorkerLost if they stop coming."""
        name = self.worker.name
        while True:
            try:
                reply = await self._own(self._call.read())
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self.worker.went_wrong(f"unavailable: {error.details()}")
                raise WorkerLost(
                    f"the worker {name} was lost while it answered "
                    f"({error.code().name.lower()}: {error.details()})"
                ) from error
            if reply is grpc.aio.EOF:
                return
            tokens = reply.tokens
            yield GeneratedTokens(
                tuple(tokens.ids), _FINISH_REASONS.get(tokens.finish_reason), tokens.cached_tokens
            )
            if tokens.finish_reason:
                return

    def close(self) -> None:
        """Ends the call, if it is not over, and what was left for the worker."""
        self._transport.close()
        if self._call is not None:
            self._call.cancel()
        self.worker.in_flight -= 1
        self.worker.bytes_in_flight -= self._bytes
