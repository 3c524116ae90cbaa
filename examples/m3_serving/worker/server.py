"""The gRPC service: from messages to the engine and back."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
import torch

from ..cache import PAGE_TOKENS
from ..engine import Engine
from ..gateway.wire import shared_memory
from ..gateway.wire import worker_pb2 as pb
from ..gateway.wire.methods import CHANNEL_OPTIONS, FIELD_KEY, PROTOCOL, SERVICE
from ..media import Medium
from ..sampling import SamplingParams
from .admission import Admission, AdmissionLimits, NoRoom, Place
from .engine_thread import EngineFailed, EngineThread, Stream
from .receive import NextMessage, SharedMemoryLost, receive_patches, shared_files
from .validate import ModelFacts, Refused, RequestLimits, RequestSpec, check_start

log = logging.getLogger(__name__)

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
_SPARE_CALLS = 64
"""calls beyond the admitted requests: reports of health, and requests that are being refused"""


class NotReady(Exception):
    """The worker takes no requests now."""


@dataclass(frozen=True)
class WorkerOptions:
    """How the process serves; times in seconds."""

    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    request: RequestLimits = field(default_factory=RequestLimits)
    receive_timeout: float = 30.0
    """between two messages of a request"""
    stall_timeout: float = 60.0
    """a step that takes longer makes the worker not ready"""
    sweep_interval: float = 60.0
    shared_directory: str | None = shared_memory.DEFAULT_DIRECTORY
    """None: payloads come on the wire only"""


def facts_of(engine: Engine) -> ModelFacts:
    """What the checks need to know of an engine's model."""
    config, tower = engine.config, engine.tower
    vision = tower.config if tower else None
    return ModelFacts(
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        cache_tokens=engine.pool.num_pages * PAGE_TOKENS,
        image_token_id=vision.image_token_id if vision else None,
        video_token_id=vision.video_token_id if vision else None,
        frame_width=vision.frame_width if vision else 0,
        row_width=vision.row_width if vision else 0,
        merge=vision.merge if vision else 1,
    )


def media_of(spec: RequestSpec, arrays: list[np.ndarray]) -> list[Medium]:
    """The engine's form of a request's items."""
    media = []
    for item, array in zip(spec.items, arrays, strict=True):
        if item.dtype == pb.DTYPE_BFLOAT16:
            patches = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            patches = torch.from_numpy(array)
        media.append(Medium(item.key, item.spans, patches, item.grid))
    return media


class WorkerServer:
    """An engine behind an address. Made and used in one event loop."""

    def __init__(self, engine: Engine, options: WorkerOptions | None = None) -> None:
        """Starts the engine's thread; `start` opens the address."""
        self.options = options or WorkerOptions()
        self.model = facts_of(engine)
        self.admission = Admission(self.options.admission)
        # What could never be admitted is refused as too large, not sent away to come again.
        most = self.options.admission.max_payload_bytes
        limits = self.options.request
        self.limits = replace(limits, max_payload_bytes=min(most, limits.max_payload_bytes))
        self.engine = EngineThread(engine, stall_s=self.options.stall_timeout)
        self._shared = self.options.shared_directory
        self._identity = shared_memory.identity(self._shared) if self._shared else ""
        if not self._identity:
            self._shared = None
        self._closing = False
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Opens an address (`127.0.0.1:0`, `unix:/run/w.sock`); returns it with the port it got."""
        # Accepted requests and reports of health must fit; what is above them gRPC refuses itself,
        # before a message of theirs is read.
        calls = self.options.admission.max_requests + _SPARE_CALLS
        server = grpc.aio.server(options=CHANNEL_OPTIONS, maximum_concurrent_rpcs=calls)
        handlers = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, pb.Message.FromString, pb.Reply.SerializeToString
            ),
            "Health": grpc.unary_unary_rpc_method_handler(
                self._health, pb.HealthRequest.FromString, pb.HealthReply.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port(address)
        await server.start()
        self._server = server
        if self._shared:
            self._sweeper = asyncio.create_task(self._sweep(self._shared))
        host, separator, _ = address.rpartition(":")
        return address if address.startswith("unix:") else f"{host}{separator}{port}"

    async def close(self, grace: float | None = None) -> None:
        """Takes no more requests, lets those that run go on for `grace` seconds, ends the rest."""
        self._closing = True
        if self._server is not None:
            await self._server.stop(grace)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self.engine.close()

    async def _sweep(self, directory: str) -> None:
        while True:
            await asyncio.to_thread(shared_memory.sweep, directory)
            await asyncio.sleep(self.options.sweep_interval)

    @property
    def _trouble(self) -> str:
        return "the worker is closing" if self._closing else self.engine.trouble

    async def _health(self, _: pb.HealthRequest, context: grpc.aio.ServicerContext):
        running, waiting = self.engine.counts
        reason = self._trouble
        return pb.HealthReply(
            protocol=PROTOCOL,
            ready=not reason,
            reason=reason,
            running=running,
            waiting=waiting,
            shared_memory=self._identity,
        )

    async def _generate(self, _, context: grpc.aio.ServicerContext) -> None:
        try:
            await self._serve(context)
        except Refused as error:
            field = ((FIELD_KEY, error.field),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error), field)
        except NoRoom as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except NotReady as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except SharedMemoryLost as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except TimeoutError:
            text = f"no message for {self.options.receive_timeout:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except EngineFailed as error:
            code = grpc.StatusCode.UNAVAILABLE if self._closing else grpc.StatusCode.INTERNAL
            await context.abort(code, str(error))

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        stream = await self._take(context)
        try:
            await self._answer(stream, context)
        finally:
            self.engine.cancel(stream)

    async def _take(self, context: grpc.aio.ServicerContext) -> Stream:
        """A request into the engine. Its variables end with it: they hold the media.

        The engine gets it after the acceptance has been written: a client that has seen none may
        give the request to another worker.
        """
        spec, arrays, place = await self._receive(context)
        try:
            await context.write(pb.Reply(accepted=pb.Accepted()))
        except BaseException:
            place.give_back()
            raise
        return self.engine.submit(
            spec.prompt,
            media_of(spec, arrays),
            max_new_tokens=spec.max_new_tokens,
            sampling=SamplingParams(spec.temperature, spec.top_p, spec.seed),
            ignore_eos=spec.ignore_eos,
            on_gone=place.give_back,
        )

    async def _receive(
        self, context: grpc.aio.ServicerContext
    ) -> tuple[RequestSpec, list[np.ndarray], Place]:
        """(what is asked, its patches, the room they take), all of it checked."""

        async def next_message() -> pb.Message | None:
            async with asyncio.timeout(self.options.receive_timeout):
                message = await context.read()
            return None if message is grpc.aio.EOF else message

        first = await next_message()
        if first is None or first.WhichOneof("part") != "start":
            raise Refused("start", "must be the first message, got another or none")
        try:
            return await self._admit(first.start, next_message, context)
        except Refused as error:
            log.warning("refused request %.200r: %s", first.start.request_id, error)
            raise

    async def _admit(
        self, start: pb.Start, next_message: NextMessage, context: grpc.aio.ServicerContext
    ) -> tuple[RequestSpec, list[np.ndarray], Place]:
        """The same once its first message is there."""
        shared = self._shared
        async with shared_files(start, shared):
            if self._trouble:
                raise NotReady(self._trouble)
            spec = check_start(start, self.model, self.limits)
            place = self.admission.take(spec.payload_bytes)
            try:
                await context.write(pb.Reply(admitted=pb.Admitted()))
                return spec, await receive_patches(start, spec, next_message, shared), place
            except BaseException:
                place.give_back()
                raise

    @staticmethod
    async def _answer(stream: Stream, context: grpc.aio.ServicerContext) -> None:
        while True:
            event = await stream.events.get()
            if isinstance(event, Exception):
                raise event
            tokens = pb.Tokens(
                ids=event.token_ids,
                finish_reason=_FINISH_REASONS[event.finish_reason],
                cached_tokens=event.cached_tokens,
            )
            await context.write(pb.Reply(tokens=tokens))
            if event.finish_reason:
                return
