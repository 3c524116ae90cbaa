"""Requests and servers for the tests of wire and worker."""

import asyncio
import contextlib
import hashlib
import sys

import grpc
import numpy as np
import pytest

if sys.version_info < (3, 11):
    pytest.skip("the gateway needs Python 3.11", allow_module_level=True)

from examples.m3_serving.gateway.protocols import (
    ExpandedPrompt,
    GenerateRequest,
    PreparedItem,
    SamplingOptions,
)
from examples.m3_serving.gateway.wire import worker_pb2 as pb
from examples.m3_serving.gateway.wire.client import ClientOptions, GrpcWorkerClient
from examples.m3_serving.gateway.wire.methods import CHANNEL_OPTIONS, GENERATE, HEALTH
from examples.m3_serving.worker.server import WorkerOptions, WorkerServer

IMAGE_ID, VIDEO_ID, START, END = 258, 259, 260, 261
NEW = 6


def make_item(modality, grid, seed, offset):
    """(item whose placeholders begin at `offset`, the ids that stand for it)."""
    rows = grid[0] * grid[1] * grid[2]
    width = 588 if modality == "image" else 1176
    patches = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    token = IMAGE_ID if modality == "image" else VIDEO_ID
    ids, spans = [], []
    for _ in range(grid[0]):
        ids.append(START)
        spans.append((offset + len(ids), grid[1] * grid[2] // 4))
        ids += [token] * spans[-1][1] + [END]
    key = hashlib.sha256(f"{modality}{grid}{seed}".encode()).hexdigest()
    times = tuple(float(t) for t in range(2 * grid[0]))
    return PreparedItem(modality, key, patches, grid, rows // 4, times, tuple(spans)), ids


def make_request(*parts, request_id="r", new=NEW, **options):
    """Text is an int (so many tokens), media are (modality, grid, seed)."""
    ids, items = [], []
    for part in parts:
        if isinstance(part, int):
            ids += np.random.default_rng(part).integers(0, 256, part).tolist()
        else:
            item, its_ids = make_item(*part, len(ids))
            items.append(item)
            ids += its_ids
    prompt = ExpandedPrompt(ids, items)
    options = {"ignore_eos": True, "sampling": SamplingOptions()} | options
    return GenerateRequest(request_id, prompt, new, **options)


TEXT = (20,)
IMAGE = (9, ("image", (1, 12, 10), 1), 11)  # 70,560 bytes: more than what goes inline
CLIP = (5, ("video", (5, 4, 4), 2), 7)  # 94,080 bytes
SMALL = (5, ("image", (1, 4, 4), 3), 5)  # 9,408 bytes: inline
MIXED = (3, SMALL[1], 4, CLIP[1], IMAGE[1], 6)


def fast_options(**changes):
    return ClientOptions(**({"health_interval": 0.05, "accept_timeout": 20.0} | changes))


@contextlib.asynccontextmanager
async def serving(engine, address="127.0.0.1:0", **options):
    """A worker in this event loop; yields (server, address)."""
    server = WorkerServer(engine, WorkerOptions(**options))
    try:
        yield server, await server.start(address)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def client_of(*addresses, **options):
    client = GrpcWorkerClient(addresses, fast_options(**options))
    try:
        yield client
    finally:
        await client.close()


async def collect(client, request):
    """(tokens, messages) of a whole answer."""
    messages = [message async for message in client.generate(request)]
    assert all(message.finish_reason is None for message in messages[:-1])
    assert messages[-1].finish_reason in ("stop", "length")
    return [token for message in messages for token in message.token_ids], messages


async def until(condition, timeout=10.0):
    """Waits until a condition holds; fails the test if it does not come to that."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to that"
        await asyncio.sleep(0.01)


class RawCaller:
    """Messages as they are, without the client's care."""

    def __init__(self, address):
        self.channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self.generate = self.channel.stream_stream(
            GENERATE, pb.Message.SerializeToString, pb.Reply.FromString
        )
        self.health = self.channel.unary_unary(
            HEALTH, pb.HealthRequest.SerializeToString, pb.HealthReply.FromString
        )

    async def send(self, *messages):
        """All replies after the admission; raises the call's error.

        Where the call ends while something is still being written, its status may be lost to gRPC:
        then it is sent anew.
        """
        for _ in range(20):
            try:
                return await self._send_once(*messages)
            except grpc.aio.AioRpcError as error:
                if error.details() != "Internal error from Core":
                    raise
        raise AssertionError("the status was lost each time")

    async def _send_once(self, *messages):
        call = self.generate()
        if messages:
            await call.write(messages[0])
            if messages[0].WhichOneof("part") == "start":
                reply = await call.read()
                assert reply.WhichOneof("part") == "admitted"
        with contextlib.suppress(asyncio.InvalidStateError):  # it has ended, why is read below
            for message in messages[1:]:
                await call.write(message)
                await asyncio.sleep(0.005)
            await call.done_writing()
        replies = []
        while (reply := await call.read()) is not grpc.aio.EOF:
            replies.append(reply)
        return replies

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
