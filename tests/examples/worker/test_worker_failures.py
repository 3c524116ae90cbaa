"""What dies, stalls, leaves or is full: nothing is lost without an error, and nothing leaks."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import grpc
import pytest
from worker_kit import (
    IMAGE,
    MIXED,
    TEXT,
    RawCaller,
    client_of,
    collect,
    make_request,
    serving,
    until,
)

from examples.m3_serving.gateway.errors import (
    GatewayError,
    WorkerBusy,
    WorkerLost,
    WorkerUnavailable,
)
from examples.m3_serving.gateway.wire import shared_memory
from examples.m3_serving.gateway.wire import worker_pb2 as pb
from examples.m3_serving.gateway.wire.messages import Payload, start_message
from examples.m3_serving.gateway.wire.methods import CHANNEL_OPTIONS, PROTOCOL, SERVICE
from examples.m3_serving.media import Medium
from examples.m3_serving.worker import server as server_module
from examples.m3_serving.worker.admission import AdmissionLimits

ROOT = Path(__file__).resolve().parents[3]
LONG = 3000  # tokens: longer than any test lasts


@pytest.fixture
def engine(media_engine):
    return media_engine(cache_tokens=8192, max_step_tokens=256)


async def begun(client, request):
    """An answer whose first tokens have come."""
    stream = client.generate(request)
    assert (await anext(stream)).token_ids
    return stream


def is_clean(server, engine):
    """Whether a worker holds nothing of any request."""
    admission = server.admission
    return (
        (admission.requests, admission.payload_bytes, engine.pool.held) == (0, 0, 0)
        and not engine.has_work
        and server.engine.counts == (0, 0)
    )


# Clients that leave.


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("way", ["close the answer", "cancel the task", "close the client"])
def test_a_client_that_leaves_frees_everything(engine, tmp_path, way, shared):
    directory = str(tmp_path) if shared else None

    async def main():
        async with (
            serving(engine, shared_directory=directory) as (server, address),
            client_of(address, shared_directory=directory) as client,
        ):
            request = make_request(*MIXED, new=LONG)
            if way == "cancel the task":
                task = asyncio.create_task(collect(client, request))
                await until(lambda: engine.pool.held)
                assert server.admission.requests == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = await begun(client, request)
                assert engine.pool.held and server.admission.payload_bytes == 174048
                if way == "close the answer":
                    await stream.aclose()
                else:
                    await client.close()
                    with pytest.raises(WorkerLost):
                        [tokens async for tokens in stream]
            await until(lambda: is_clean(server, engine))
            assert engine.num_steps < LONG / 2  # it was ended and did not end by itself
            assert os.listdir(tmp_path) == []
            assert server.engine.trouble == ""

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 5, 8])
def test_a_client_that_leaves_while_it_sends(engine, tmp_path, turns, milliseconds):
    """Cancelled after so long and so many turns of the event loop, whatever it was doing then."""

    async def main():
        directory = str(tmp_path)
        async with (
            serving(engine, shared_directory=directory) as (server, address),
            client_of(address, shared_directory=directory) as client,
        ):
            await client.health()
            task = asyncio.create_task(collect(client, make_request(*MIXED, new=LONG)))
            await asyncio.sleep(milliseconds / 1000)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: is_clean(server, engine) and not os.listdir(tmp_path))
            assert engine.num_steps < LONG / 2
            (worker,) = client._workers
            assert (worker.in_flight, worker.bytes_in_flight) == (0, 0)

    asyncio.run(main())


def test_a_client_that_is_killed(engine, tmp_path):
    """The connection breaks, the worker notices, and nothing of the request stays."""
    script = f"""
import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from worker_kit import MIXED, make_request
from examples.m3_serving.gateway.wire.client import ClientOptions, GrpcWorkerClient

async def main():
    client = GrpcWorkerClient([sys.argv[1]], ClientOptions(shared_directory={str(tmp_path)!r}))
    async for _ in client.generate(make_request(*MIXED, new={LONG})):
        print("begun", flush=True)

asyncio.run(main())
"""

    async def main():
        async with serving(engine, shared_directory=str(tmp_path)) as (server, address):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, address, stdout=subprocess.PIPE
            )
            assert (await process.stdout.readline()).strip() == b"begun"
            assert engine.pool.held and server.admission.requests == 1
            process.kill()
            await process.wait()
            await until(lambda: is_clean(server, engine))
            assert engine.num_steps < LONG / 2
            assert os.listdir(tmp_path) == []

    asyncio.run(main())


def test_a_client_that_stops_sending_is_given_up(engine):
    async def main():
        start = start_message(request := make_request(*IMAGE), Payload(request.prompt.items), None)
        async with (
            serving(engine, receive_timeout=0.2) as (server, address),
            RawCaller(address) as raw,
        ):
            for first in ([], [start]):
                call = raw.generate()
                for message in first:
                    await call.write(message)
                    assert (await call.read()).WhichOneof("part") == "admitted"
                    assert server.admission.payload_bytes == 70560
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await until(lambda: is_clean(server, engine))

    asyncio.run(main())


def test_files_of_dead_gateways_are_swept_while_the_worker_runs(engine, tmp_path):
    parts = shared_memory.new_name().split("-")

    async def main():
        async with serving(engine, shared_directory=str(tmp_path), sweep_interval=0.05):
            for pid in (4194305, 4194306):
                name = "-".join((*parts[:2], str(pid), "1", parts[4]))
                (tmp_path / name).write_text("x")
                await until(lambda: not os.listdir(tmp_path))

    asyncio.run(main())


def test_requests_that_are_over_leave_no_memory(engine):
    def held():
        gc.collect()
        return sum(type(thing) is Medium for thing in gc.get_objects())

    before = held()  # other tests' own

    async def main():
        async with serving(engine) as (server, address), client_of(address) as client:
            await collect(client, make_request(*MIXED))
            stream = await begun(client, make_request(*MIXED, new=LONG))
            assert held() - before == 3
            await stream.aclose()
            await until(lambda: is_clean(server, engine))
            await asyncio.sleep(0.05)
            assert held() == before

    asyncio.run(main())


@pytest.mark.parametrize("shared", [True, False])
def test_the_gateway_keeps_no_patches_of_what_a_worker_has_taken(engine, tmp_path, shared):
    directory = str(tmp_path) if shared else None

    async def main():
        async with (
            serving(engine, shared_directory=directory) as (_, address),
            client_of(address, shared_directory=directory) as client,
        ):
            await client.health()
            request = make_request(*MIXED, new=LONG)
            patches = [weakref.ref(item.patches) for item in request.prompt.items]
            stream = client.generate(request)
            del request
            await anext(stream)
            gc.collect()
            assert [reference() for reference in patches] == [None] * 3
            await stream.aclose()

    asyncio.run(main())


# Workers that are full.


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (AdmissionLimits(max_requests=1), "has 1 requests, as many as it takes"),
        (AdmissionLimits(max_payload_bytes=100_000), "has 70560 bytes of media and takes 100000"),
    ],
)
def test_a_full_worker_is_busy_until_there_is_room(engine, limits, message):
    async def main():
        async with (
            serving(engine, admission=limits) as (server, address),
            client_of(address) as client,
        ):
            stream = await begun(client, make_request(*IMAGE, new=LONG))
            for _ in range(3):
                with pytest.raises(WorkerBusy, match=message):
                    await collect(client, make_request(*IMAGE))
            assert (await client.health())[0].ready  # full is not broken
            if limits.max_requests > 1:
                await collect(client, make_request(*TEXT))  # has no bytes
            await stream.aclose()
            await until(lambda: is_clean(server, engine))
            await collect(client, make_request(*IMAGE))

    asyncio.run(main())


def test_under_load_every_request_is_answered_or_refused(engine):
    async def main():
        async with (
            serving(engine, admission=AdmissionLimits(max_requests=4)) as (server, address),
            client_of(address) as client,
        ):
            alone, _ = await collect(client, make_request(*IMAGE))
            requests = [make_request(*IMAGE, request_id=str(i)) for i in range(40)]
            results = await asyncio.gather(
                *(collect(client, request) for request in requests), return_exceptions=True
            )
            answers = [r for r in results if not isinstance(r, BaseException)]
            errors = [r for r in results if isinstance(r, BaseException)]
            assert all(tokens == alone for tokens, _ in answers)
            assert {type(error) for error in errors} <= {WorkerBusy}
            assert len(answers) >= 4 and errors
            await until(lambda: is_clean(server, engine))

    asyncio.run(main())


def test_a_busy_worker_passes_the_request_on(engine, media_engine):
    async def main():
        async with (
            serving(engine, admission=AdmissionLimits(max_requests=0)) as (_, full),
            serving(media_engine(cache_tokens=512)) as (_, free),
            client_of(full, free) as client,
        ):
            await collect(client, make_request(*IMAGE))
            async with client_of(full) as other:
                with pytest.raises(WorkerBusy, match="no worker has room"):
                    await collect(other, make_request(*TEXT))

    asyncio.run(main())


def test_a_flood_of_calls_makes_a_worker_busy_and_not_broken(engine, monkeypatch):
    """Above its number of calls gRPC refuses by itself, reports of health too."""
    monkeypatch.setattr(server_module, "_SPARE_CALLS", 0)

    async def main():
        limits = AdmissionLimits(max_requests=1)
        async with serving(engine, admission=limits) as (_, address), client_of(address) as client:
            stream = await begun(client, make_request(*TEXT, new=LONG))
            async with RawCaller(address) as raw:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw.health(pb.HealthRequest())
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await client._workers[0].ask(1.0)
            assert client._workers[0].health.ready
            with pytest.raises(WorkerBusy):
                await collect(client, make_request(*TEXT))
            await stream.aclose()

    asyncio.run(main())


# Which worker.


def test_requests_are_spread_by_load(engine, media_engine):
    second = media_engine(cache_tokens=8192)

    async def main():
        async with (
            serving(engine) as (a, address_a),
            serving(second) as (b, address_b),
            # Reports only where they are asked for: one that comes while requests begin may count
            # some of them as this client's own.
            client_of(address_a, address_b, health_interval=3600.0) as client,
            client_of(address_b) as other,
        ):

            def counts():
                return a.admission.requests, b.admission.requests

            streams = [await begun(client, make_request(*TEXT, new=LONG)) for _ in range(4)]
            assert counts() == (2, 2)
            await streams[0].aclose()
            await streams[2].aclose()
            await until(lambda: counts() == (0, 2))
            streams += [await begun(client, make_request(*TEXT, new=LONG)) for _ in range(2)]
            assert counts() == (2, 2)
            # What another gateway sent counts too, once the worker has told.
            for _ in range(3):
                streams.append(await begun(other, make_request(*TEXT, new=LONG)))
            await client._workers[1].ask(timeout=5.0)
            assert client._workers[1].others == 3
            streams += [await begun(client, make_request(*TEXT, new=LONG)) for _ in range(3)]
            assert counts() == (5, 5)
            # Between equals, the one with fewer bytes on the way.
            streams.append(await begun(client, make_request(*IMAGE, new=LONG)))
            assert counts() == (6, 5)
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def test_a_dead_address_is_passed_over(engine):
    async def main():
        async with (
            serving(engine) as (_, address),
            client_of("unix:/nowhere/w.sock", address) as client,
        ):
            for _ in range(3):
                await collect(client, make_request(*TEXT))
            dead, alive = await client.health()
            assert not dead.ready and dead.reason.startswith("unavailable: ")
            assert alive.ready and alive.name == address

    asyncio.run(main())


def test_a_worker_of_another_protocol_is_not_used(engine, monkeypatch):
    monkeypatch.setattr(server_module, "PROTOCOL", PROTOCOL + 1)

    async def main():
        async with serving(engine) as (_, address), client_of(address) as client:
            said = f"speaks protocol {PROTOCOL + 1}, this gateway {PROTOCOL}"
            with pytest.raises(WorkerUnavailable, match=said):
                await collect(client, make_request(*TEXT))

    asyncio.run(main())


# Workers that go.


def test_a_worker_that_comes_back_is_used_again(engine, media_engine, tmp_path):
    path = f"unix:{tmp_path}/w.sock"

    async def main():
        async with client_of(path) as client:
            for number in range(3):
                with pytest.raises(WorkerUnavailable, match="no worker is ready"):
                    await collect(client, make_request(*TEXT))
                async with serving(media_engine(cache_tokens=8192), path):
                    await until(lambda: client._workers[0].health.ready)
                    stream = await begun(client, make_request(*TEXT, new=LONG))
                    if number == 1:
                        await stream.aclose()
                if number != 1:
                    with pytest.raises(WorkerLost):
                        [tokens async for tokens in stream]

    asyncio.run(main())


def test_closing_lets_running_answers_finish(engine):
    async def main():
        async with serving(engine) as (server, address), client_of(address) as client:
            stream = await begun(client, make_request(*TEXT, new=100))
            closing = asyncio.create_task(server.close(grace=30))
            rest = [tokens async for tokens in stream]
            assert rest[-1].finish_reason == "length"
            assert 1 + sum(len(tokens.token_ids) for tokens in rest) == 100
            await closing
            with pytest.raises(WorkerUnavailable):
                await collect(client, make_request(*TEXT))

    asyncio.run(main())


def test_a_failing_engine_is_an_error_and_makes_the_worker_unready(engine, monkeypatch):
    async def main():
        async with serving(engine) as (server, address), client_of(address) as client:
            streams = [await begun(client, make_request(*IMAGE, new=LONG)) for _ in range(2)]

            def fail():
                raise RuntimeError("out of memory")

            monkeypatch.setattr(engine, "step", fail)
            for stream in streams:
                with pytest.raises(WorkerLost, match="RuntimeError: out of memory"):
                    [tokens async for tokens in stream]
            await until(lambda: not client._workers[0].health.ready)
            with pytest.raises(WorkerUnavailable, match="the engine failed: RuntimeError"):
                await collect(client, make_request(*TEXT))
            async with RawCaller(address) as raw:  # also of one that does not ask first
                start = start_message(make_request(*TEXT), Payload([]), None)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw.send(start)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert server.admission.requests == 0

    asyncio.run(main())


def test_a_stalled_engine_is_noticed_and_its_answer_can_be_given_up(engine, monkeypatch):
    go_on = threading.Event()
    step = engine.step

    def stall():
        go_on.wait(30)
        return step()

    async def main():
        async with (
            serving(engine, stall_timeout=0.2) as (server, address),
            client_of(address) as client,
        ):
            stream = await begun(client, make_request(*TEXT, new=LONG))
            monkeypatch.setattr(engine, "step", stall)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    [tokens async for tokens in stream]
            await until(lambda: not client._workers[0].health.ready)
            (health,) = await client.health()
            assert health.reason.startswith("a step has taken")
            monkeypatch.setattr(engine, "step", step)
            go_on.set()
            await until(lambda: client._workers[0].health.ready and is_clean(server, engine))
            await collect(client, make_request(*TEXT))

    asyncio.run(main())


@contextlib.asynccontextmanager
async def fake_worker(generate):
    """A worker that answers reports of health and else does as `generate(context)` says."""

    async def health(_, context):
        return pb.HealthReply(protocol=PROTOCOL, ready=True)

    async def handler(_, context):
        await generate(context)

    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    handlers = {
        "Generate": grpc.stream_stream_rpc_method_handler(
            handler, pb.Message.FromString, pb.Reply.SerializeToString
        ),
        "Health": grpc.unary_unary_rpc_method_handler(
            health, pb.HealthRequest.FromString, pb.HealthReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


ADMITTED, ACCEPTED = pb.Reply(admitted=pb.Admitted()), pb.Reply(accepted=pb.Accepted())


async def accept(context):
    """Takes a request as a worker does."""
    await context.read()
    await context.write(ADMITTED)
    while await context.read() is not grpc.aio.EOF:
        pass
    await context.write(ACCEPTED)


def test_an_accepted_request_is_never_given_to_a_second_worker(engine):
    """If the first died of it, so might the next; and it might be answered twice."""

    async def main():
        for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):

            async def dies(context, code=code):
                await accept(context)
                await context.abort(code, "gone")

            async with (
                fake_worker(dies) as first,
                serving(engine) as (_, second),
                client_of(first, second) as client,
            ):
                with pytest.raises(WorkerLost, match="lost while it answered"):
                    await collect(client, make_request(*TEXT))
                assert engine.num_steps == 0

    asyncio.run(main())


def test_a_request_that_was_not_accepted_goes_to_the_next(engine):
    async def unavailable(context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    async def is_ending(context):
        await context.read()
        await context.write(ADMITTED)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not any more")

    async def hangs(context):
        await asyncio.sleep(60)

    async def hangs_later(context):
        await context.read()
        await context.write(ADMITTED)
        await asyncio.sleep(60)

    async def says_something_else(context):
        await context.write(pb.Reply(tokens=pb.Tokens(ids=[1])))

    async def main():
        for generate in (unavailable, is_ending, hangs, hangs_later, says_something_else):
            async with (
                fake_worker(generate) as first,
                serving(engine) as (_, second),
                client_of(first, second, accept_timeout=0.3, health_interval=60) as client,
            ):
                await collect(client, make_request(*IMAGE))
                assert not (await client.health())[0].ready
                assert [worker.load[:2] for worker in client._workers] == [(0, 0), (0, 0)]

    asyncio.run(main())


def test_an_engine_never_has_what_was_not_accepted(engine, monkeypatch):
    """The acceptance is written first: a client that has not seen it may ask another worker."""
    seen = []
    write, add = server_module.pb.Reply.SerializeToString, engine.add_request

    def serialize(reply):
        seen.append(reply.WhichOneof("part"))
        return write(reply)

    def add_request(*arguments, **options):
        seen.append("engine")
        return add(*arguments, **options)

    class Replies:
        SerializeToString = staticmethod(serialize)

        def __new__(cls, **parts):
            return pb.Reply(**parts)

    monkeypatch.setattr(engine, "add_request", add_request)
    monkeypatch.setattr(server_module, "pb", types.SimpleNamespace(**vars(pb)))
    monkeypatch.setattr(server_module.pb, "Reply", Replies)

    async def main():
        async with serving(engine) as (_, address), client_of(address) as client:
            await collect(client, make_request(*IMAGE))

    asyncio.run(main())
    assert seen[:3] == ["admitted", "accepted", "engine"] and set(seen[3:]) == {"tokens"}


def test_an_answer_that_ends_without_a_reason_is_an_error():
    async def stops(context):
        await accept(context)
        await context.write(pb.Reply(tokens=pb.Tokens(ids=[1])))

    async def main():
        async with fake_worker(stops) as address, client_of(address) as client:
            with pytest.raises(WorkerLost, match="ended the answer too early"):
                await collect(client, make_request(*TEXT))

    asyncio.run(main())


def test_a_closed_client_says_so(engine):
    async def main():
        async with serving(engine) as (_, address), client_of(address) as client:
            await client.close()
            with pytest.raises(WorkerUnavailable, match="shutting down"):
                await collect(client, make_request(*TEXT))

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_process_that_is_killed_and_one_that_is_ended(media_checkpoint, tmp_path):
    """The real process: killed while it answers, started again at its address, told to end."""
    path = f"unix:{tmp_path}/w.sock"
    command = [sys.executable, "-m", "examples.m3_serving.worker", "--model", media_checkpoint]

    async def start():
        process = await asyncio.create_subprocess_exec(
            *command, "--listen", path, cwd=ROOT, stdout=subprocess.PIPE
        )
        assert (await process.stdout.readline()).decode().strip() == f"listening on {path}"
        return process

    async def main():
        async with client_of(path) as client:
            process = await start()
            stream = await begun(client, make_request(*MIXED, new=LONG))
            process.kill()
            with pytest.raises(WorkerLost):
                [tokens async for tokens in stream]
            await process.wait()
            with pytest.raises(GatewayError) as caught:
                await collect(client, make_request(*TEXT))
            assert isinstance(caught.value, WorkerUnavailable)
            process = await start()
            await until(lambda: client._workers[0].health.ready)
            await collect(client, make_request(*MIXED))
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0

    asyncio.run(main())


def test_the_worker_command_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-m", "examples.m3_serving.worker", "--model", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("a checkpoint folder must hold config.json")


def test_a_full_worker_refuses_before_any_bytes_are_sent(engine):
    """It does not fill up with what it refuses."""

    async def main():
        limits = AdmissionLimits(max_payload_bytes=100_000)
        request = make_request(*IMAGE)
        start = start_message(request, Payload(request.prompt.items), None)
        async with (
            serving(engine, admission=limits) as (server, address),
            RawCaller(address) as raw,
        ):
            first, second = raw.generate(), raw.generate()
            await first.write(start)
            assert (await first.read()).WhichOneof("part") == "admitted"
            assert server.admission.payload_bytes == 70560
            await second.write(start)
            assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (server.admission.requests, engine.num_steps) == (1, 0)
            first.cancel()
            await until(lambda: is_clean(server, engine))

    asyncio.run(main())
