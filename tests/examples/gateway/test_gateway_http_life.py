"""Requests that end early, too many at a time, and the process from start to SIGTERM."""

import asyncio
import gc
import ipaddress
import json
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("av")
pytest.importorskip("PIL")

from aiohttp import web
from gateway_media import clip_bytes, pattern
from gateway_server import (
    MODEL,
    SMALL_IMAGE,
    SMALL_URL,
    FakeWorkers,
    client_of,
    data_url,
    events,
    gateway,
    image_part,
    socket_of,
    streamed_text,
    text_body,
    tokenizer_json,
    video_part,
)

from examples.m3_serving.gateway.errors import BodyTooLarge, Overloaded, WorkerLost
from examples.m3_serving.gateway.fetch import HttpFetcher
from examples.m3_serving.gateway.pool import DecodePool
from examples.m3_serving.gateway.protocols import GeneratedTokens
from examples.m3_serving.gateway.server.admission import Admission

ROOT = Path(__file__).resolve().parents[3]
LOOPBACK = ipaddress.ip_network("127.0.0.1/32")


async def until(condition, seconds=20.0):
    """Waits for what must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def idle(service):
    return service.admission.requests == 0 and service.admission.bytes == 0


@asynccontextmanager
async def posted(port: int, body: dict):
    """A request over its own connection: (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content))
    writer.write(content)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


@asynccontextmanager
async def slow_media(delay_s: float):
    """A media server that takes its time: (URL, who is being served)."""
    served: list[str] = []

    async def handle(request):
        served.append(request.path)
        try:
            await asyncio.sleep(delay_s)
            return web.Response(body=SMALL_IMAGE)
        finally:
            served.remove(request.path)

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield port, served
    finally:
        await runner.cleanup()


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_the_worker_answers_cancels_it(stream):
    async def main():
        workers = FakeWorkers(text="x" * 1000, delay_s=0.02)
        async with gateway(workers) as service, socket_of(service) as port:
            async with posted(port, text_body(stream=stream)) as (reader, _):
                if stream:
                    await reader.readuntil(b"data: ")
                await until(lambda: workers.running == 1)
            await until(lambda: workers.running == 0 and idle(service))
            assert workers.cancelled == 1
            assert "m3_gateway_disconnects_total 1.0" in service.metrics.render().decode()

    asyncio.run(main())


def test_a_client_that_leaves_before_the_first_token_cancels_too():
    async def main():
        workers = FakeWorkers(stall_after=0)
        async with gateway(workers) as service, socket_of(service) as port:
            async with posted(port, text_body(stream=True)):
                await until(lambda: workers.running == 1)
            await until(lambda: workers.running == 0 and idle(service))

    asyncio.run(main())


def test_a_client_that_leaves_during_a_fetch_ends_the_fetch():
    async def main():
        async with slow_media(60) as (media_port, served):
            fetcher = HttpFetcher(allowed_networks=[LOOPBACK], allowed_ports=[media_port])
            workers = FakeWorkers()
            async with gateway(workers, fetcher=fetcher) as service, socket_of(service) as port:
                part = image_part(f"http://127.0.0.1:{media_port}/a")
                body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
                async with posted(port, body):
                    await until(lambda: served)
                await until(lambda: not served and idle(service))
                assert workers.requests == []

    asyncio.run(main())


def test_a_client_that_leaves_during_decoding_ends_the_decoder():
    clip = clip_bytes((pattern(480, 640, t % 7) for t in range(80)), 10, codec="ffv1")

    async def main():
        options = {"pool": DecodePool(1), "context_tokens": 10**6}
        async with gateway(**options) as service, socket_of(service) as port:
            part = video_part(data_url(clip, "video/mp4"), fps=5, max_long_side_pixel=2016)
            body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
            async with posted(port, body):
                await until(lambda: service._pool._running)
            await until(lambda: not service._pool._running and idle(service))
            assert service._pool.child_pids == []

    asyncio.run(main())


def test_a_client_that_leaves_in_its_body_leaves_nothing():
    async def main():
        async with gateway() as service, socket_of(service) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n")
            writer.write(b'\r\n{"model"')
            await until(lambda: service.admission.bytes == 8)
            writer.close()
            await until(lambda: idle(service))

    asyncio.run(main())


class Endless(FakeWorkers):
    """Answers more than any socket's buffers take."""

    async def generate(self, request):
        self.running += 1
        try:
            while True:
                yield GeneratedTokens((64,) * 20_000)
        finally:
            self.running -= 1
            self.cancelled += 1


def test_a_client_that_does_not_read_is_given_up():
    async def main():
        workers = Endless()
        async with (
            gateway(workers, client_stall_s=0.2) as service,
            socket_of(service) as port,
            posted(port, text_body(stream=True)),
        ):
            await until(lambda: workers.cancelled == 1 and idle(service), 60)
            assert workers.running == 0

    asyncio.run(main())


# --- what is left behind ---


class Forgetting(FakeWorkers):
    """Remembers of its requests only whether their media are still somewhere."""

    def __init__(self, **options):
        super().__init__(**options)
        self.media = []

    def generate(self, request):
        self.media += map(weakref.ref, request.prompt.items)
        return super().generate(request)


@pytest.fixture
def no_collector():
    logging.disable()  # what a test's log captures, it keeps
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


ENDINGS = {
    "whole": {},
    "lost at once": {"error": WorkerLost("gone")},
    "lost later": {"error": WorkerLost("gone"), "error_after": 2},
    "broken": {"error": RuntimeError("bug"), "error_after": 2},
    "stalled": {"stall_after": 2},
    "left": {"stall_after": 2},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_media_of_an_ended_request_are_gone_at_once(no_collector, ending, stream):
    """Without waiting for the collector of circles: under load it comes too late."""

    async def main():
        workers = Forgetting(**ENDINGS[ending])
        body = {
            **text_body(stream=stream),
            "messages": [{"role": "user", "content": [image_part()]}],
        }
        stall_s = 0.1 if ending == "stalled" else 20.0
        async with gateway(workers, stall_s=stall_s) as service, socket_of(service) as port:
            for number in (1, 2):
                async with posted(port, body) as (reader, writer):
                    await until(lambda number=number: len(workers.media) == number)
                    if ending != "left":
                        await until(lambda: idle(service))
                        writer.write_eof()
                        assert (await reader.read()).startswith(b"HTTP/1.1 ")
                await until(lambda: idle(service))
                workers.requests.clear()
            await asyncio.sleep(0.05)
            assert len(workers.media) == 2
            assert [medium() for medium in workers.media] == [None, None]

    asyncio.run(main())


@pytest.mark.parametrize("media_s", [60.0, 0.02])
def test_media_of_a_request_that_is_refused_are_gone_at_once(no_collector, media_s):
    """One of several cannot be decoded, or takes too long: those that were fetched go with it."""

    async def main():
        seen = []
        async with gateway(media_s=media_s) as service, socket_of(service) as port:
            fetch_all = service._pipeline._fetcher.fetch_all

            async def remembering(*arguments):
                fetched = await fetch_all(*arguments)
                seen.extend(map(weakref.ref, fetched))
                return fetched

            service._pipeline._fetcher.fetch_all = remembering
            parts = [image_part(), image_part(data_url(b"GIF89a broken"))]
            body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
            async with posted(port, body) as (reader, _):
                status = (await reader.readuntil(b"\r\n")).split()[1]
                assert status == (b"400" if media_s > 1 else b"504")
            await until(lambda: idle(service))
            await asyncio.sleep(0.05)
            assert len(seen) == 2 or media_s < 1
            assert not any(medium() for medium in seen)

    asyncio.run(main())


# --- too many ---


async def chat(service, body=None, **headers):
    """One more request, beside those on the socket."""
    async with client_of(service) as client:
        content = json.dumps(body or text_body()).encode()
        return await client.post("/v1/chat/completions", content=content, headers=headers)


def test_requests_beyond_the_limit_are_refused_at_once_and_the_place_is_free_again():
    async def main():
        workers = FakeWorkers(stall_after=1)
        async with (
            gateway(workers, max_requests=2) as service,
            socket_of(service) as port,
            posted(port, text_body()) as (_, writer),
            posted(port, text_body()),
        ):
            await until(lambda: workers.running == 2)
            refused = await chat(service)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert error["code"] == "overloaded" and error["type"] == "rate_limit_error"
            writer.close()
            await until(lambda: service.admission.requests == 1)
            workers.stall_after = None
            assert (await chat(service)).status_code == 200

    asyncio.run(main())


def test_one_client_cannot_take_all_places():
    async def main():
        workers = FakeWorkers(stall_after=1)
        async with (
            gateway(workers, max_client_requests=1) as service,
            socket_of(service) as port,
            posted(port, text_body()),
        ):
            await until(lambda: workers.running == 1)
            workers.stall_after = None
            mine = await chat(service)
            assert mine.status_code == 429 and "of this client" in mine.text
            assert (await chat(service, authorization="Bearer another")).status_code == 200

    asyncio.run(main())


def test_bytes_beyond_the_limit_are_refused_and_given_back():
    body = text_body("x" * 3000)
    size = len(json.dumps(body).encode())

    async def main():
        workers = FakeWorkers(stall_after=1)
        async with (
            gateway(workers, max_bytes=2 * size - 1) as service,
            socket_of(service) as port,
            posted(port, body) as (_, writer),
        ):
            await until(lambda: workers.running == 1)
            assert service.admission.bytes == size
            refused = await chat(service, body)
            assert refused.status_code == 429 and "bytes" in refused.text
            assert refused.headers["retry-after"] == "1"
            writer.close()
            await until(lambda: idle(service))
            workers.stall_after = None
            assert (await chat(service, body)).status_code == 200
            await until(lambda: idle(service))

    asyncio.run(main())


def test_fetched_bytes_and_patches_count_as_held_and_one_request_has_its_own_limit():
    part = image_part(SMALL_URL, max_long_side_pixel=1008)
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    sent = len(json.dumps(body).encode())
    patches = 112 * 112 * 3  # a frame is sent once; the shortest side grows to 112

    async def held_at_most(**limits):
        workers = FakeWorkers(stall_after=0)
        async with (
            gateway(workers, **limits) as service,
            socket_of(service) as port,
            posted(port, body) as (reader, _),
        ):
            read = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            await until(lambda: workers.running or read.done())
            held = service.admission.bytes
            if not read.done():
                read.cancel()
                return held, None
            return held, read.result()

    expected = sent + len(SMALL_IMAGE) + patches
    assert asyncio.run(held_at_most()) == (expected, None)
    for limits, status in (
        ({"max_request_bytes": expected - 1}, b"413"),
        ({"max_request_bytes": sent + 10}, b"413"),
        ({"max_bytes": sent - 1}, b"413"),  # more than there is at all
        ({"max_request_bytes": expected}, None),
    ):
        _, head = asyncio.run(held_at_most(**limits))
        assert (head and head.split()[1]) == status, limits


def test_admission_counts_to_the_byte():
    admission = Admission(3, 2, 100, 60)
    with admission.request("a") as first, admission.request("a") as second:
        with pytest.raises(Overloaded, match="of this client"), admission.request("a"):
            pass
        more = [admission.request(name) for name in "bc"]
        with more[0], pytest.raises(Overloaded, match="3 requests"), more[1]:
            pass
        first.hold(60)
        with pytest.raises(BodyTooLarge):
            first.hold(1)
        with pytest.raises(Overloaded):
            second.hold(41)
        second.hold(40)
        assert admission.bytes == 100 and admission.requests == 2
    assert admission.bytes == admission.requests == 0 and not admission._clients
    with pytest.raises(ValueError, match="at least 1"):
        Admission(0, 1, 1, 1)


def test_many_at_once_all_get_an_answer():
    async def main():
        workers = FakeWorkers(delay_s=0.002)
        async with gateway(workers, max_requests=8) as service, client_of(service) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=text_body(str(i))) for i in range(60))
            )
            statuses = [answer.status_code for answer in answers]
            assert set(statuses) == {200, 429} and statuses.count(200) >= 8
            assert idle(service) and workers.running == 0

    asyncio.run(main())


# --- the end ---


def test_draining_refuses_what_is_new_and_ends_what_takes_too_long():
    async def main():
        workers = FakeWorkers(stall_after=3)
        async with (
            gateway(workers) as service,
            socket_of(service) as port,
            posted(port, text_body(stream=True)) as (streaming, _),
            posted(port, text_body()) as (waiting, _),
        ):
            await until(lambda: workers.running == 2)
            await streaming.readuntil(b'"content":"l"')
            service.drain()
            refused = await chat(service)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert workers.running == 2
            service.aborting.set()
            rest = await streaming.readuntil(b"shutting_down")
            assert b'data: {"error":' in rest
            assert (await waiting.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")
            await until(lambda: workers.running == 0 and idle(service))

    asyncio.run(main())


COMMAND = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from examples.m3_serving.gateway.server import command
from gateway_server import FakeWorkers
print(sorted({{"torch", "av", "PIL", "msa_kernels"}} & set(sys.modules) - {{"av", "PIL"}}))
command.connect_workers = lambda addresses: FakeWorkers(text="abcdefghij" * 3, delay_s={delay})
sys.exit(command.main(sys.argv[1:]))
"""


@asynccontextmanager
async def process(tmp_path, *options, delay=0.05):
    """The command with a fake worker: (process, client)."""
    folder = tmp_path / "tiny-m3"
    folder.mkdir(exist_ok=True)
    config = {"model_type": "minimax_m3_vl", "text_config": {"max_position_embeddings": 2048}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    script = COMMAND.format(root=str(ROOT), tests=str(Path(__file__).parent), delay=delay)
    arguments = ["--model", str(folder), "--worker", "x:1", "--port", "0", *options]
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert await asyncio.wait_for(running.stdout.readline(), 30) == b"[]\n"  # no torch
        line = (await asyncio.wait_for(running.stdout.readline(), 30)).decode()
        assert line.startswith("gateway: tiny-m3 at http://127.0.0.1:"), line
        async with httpx.AsyncClient(base_url=line.split()[-1], timeout=20) as client:
            yield running, client
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
        running._transport.close()


def test_the_command_serves_and_sigterm_lets_requests_end(tmp_path):
    async def main():
        async with process(tmp_path) as (running, client):
            models = (await client.get("/v1/models")).json()["data"]
            assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny-m3", 2048)]
            body = text_body(stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_raw()
                text = (await anext(lines)).decode()
                running.send_signal(signal.SIGTERM)
                async for piece in lines:
                    text += piece.decode()
            found = events(text)
            assert found[-1] == "[DONE]" and streamed_text(found) == "abcdefghij" * 3
            assert await asyncio.wait_for(running.wait(), 10) == 0
            with pytest.raises(httpx.HTTPError):
                await client.get("/health")

    asyncio.run(main())


def test_requests_that_outlast_the_drain_end_with_an_error(tmp_path):
    async def main():
        async with process(tmp_path, "--drain-s", "0.3", delay=2.0) as (running, client):
            body = text_body(stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_raw()
                text = (await anext(lines)).decode()
                waiting = asyncio.create_task(client.post("/v1/chat/completions", json=text_body()))
                while "requests_in_flight 2.0" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.05)
                running.send_signal(signal.SIGTERM)
                async for piece in lines:
                    text += piece.decode()
            assert events(text)[-1]["error"]["code"] == "shutting_down"
            assert (await waiting).status_code == 503
            assert await asyncio.wait_for(running.wait(), 10) == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "must hold config.json"),
        (lambda folder: (folder / "config.json").write_text("["), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold an object"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "gpt"}'),
            "no family for 'gpt'; registered: minimax_m3_vl, qwen2_vl",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2_vl"}'),
            "max_position_embeddings",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "must hold tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "chat template"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_told_at_the_start(
    tmp_path, capsys, monkeypatch, change, message
):
    from examples.m3_serving.gateway.server import command

    config = {"model_type": "minimax_m3_vl", "text_config": {"max_position_embeddings": 2048}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    monkeypatch.setattr(command, "connect_workers", lambda addresses: FakeWorkers())
    change(tmp_path)
    assert command.main(["--model", str(tmp_path), "--worker", "x:1"]) == 2
    assert message in capsys.readouterr().err


def test_options_of_a_family_reach_it_or_are_refused(tmp_path):
    from examples.m3_serving.gateway.server import command

    options = ["--model", "x", "--worker", "y", "--sizing", "long_side", "--default-fps", "2"]
    parsed = command.parse_arguments(options)
    family = command.choose_family({"model_type": "minimax_m3_vl"}, parsed)
    assert family._default_sizing == "long_side" and family._default_fps == 2.0
    with pytest.raises(ValueError, match="no option for default_sizing, default_fps"):
        command.choose_family({"model_type": "qwen2_vl"}, parsed)
    # Nothing that is not public is reached unless the operator names it.
    assert parsed.allow_media_network == [] and parsed.allow_media_port == []


def test_the_servers_process_loads_no_decoder_no_engine_and_no_torch():
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import examples.m3_serving.gateway.server.command\n"
        "print(sorted({'torch', 'av', 'PIL', 'msa_kernels', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_server_names_no_model():
    folder = ROOT / "examples/m3_serving/gateway/server"
    paths = sorted(folder.glob("*.py"))
    assert len(paths) > 8
    for path in paths:
        text = path.read_text().lower()
        for name in ("minimax", "qwen", "m3_vl", "]<]", "<|"):
            assert name not in text, path
