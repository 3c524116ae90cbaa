"""Requests over the wire, by every way a payload can take, equal to the engine alone."""

import asyncio
import os

import numpy as np
import pytest
import torch
from worker_kit import (
    CLIP,
    IMAGE,
    MIXED,
    NEW,
    SMALL,
    TEXT,
    RawCaller,
    client_of,
    collect,
    make_request,
    serving,
)

from examples.m3_serving.gateway.errors import WorkerRejected
from examples.m3_serving.gateway.protocols import SamplingOptions
from examples.m3_serving.gateway.wire import shared_memory
from examples.m3_serving.gateway.wire import worker_pb2 as pb
from examples.m3_serving.gateway.wire.messages import Payload, start_message
from examples.m3_serving.media import Medium

PROMPTS = {"text": TEXT, "image": IMAGE, "clip": CLIP, "small": SMALL, "mixed": MIXED}


def media_of(request):
    return [
        Medium(item.content_key, item.placeholders, torch.from_numpy(item.patches), item.grid)
        for item in request.prompt.items
    ]


@pytest.fixture(scope="module")
def alone(media_engine):
    """Answers of an engine without any wire."""
    answers = {}
    for name, parts in PROMPTS.items():
        request = make_request(*parts)
        engine = media_engine(cache_tokens=1024)
        got = engine.add_request(
            request.prompt.token_ids,
            media=media_of(request),
            max_new_tokens=NEW,
            ignore_eos=True,
        )
        while engine.has_work:
            engine.step()
        answers[name] = got.generated
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


@pytest.mark.parametrize("shared", [True, False])
def test_answers_are_the_engines(media_engine, alone, tmp_path, shared):
    directory = str(tmp_path) if shared else None

    async def main():
        engine = media_engine(cache_tokens=2048, max_step_tokens=64)
        async with (
            serving(engine, shared_directory=directory) as (server, address),
            client_of(address, shared_directory=directory) as client,
        ):
            requests = {name: make_request(*parts) for name, parts in PROMPTS.items()}
            results = await asyncio.gather(*(collect(client, r) for r in requests.values()))
            assert {n: r[0] for n, r in zip(requests, results, strict=True)} == alone
            assert engine.pool.held == 0
            assert (server.admission.requests, server.admission.payload_bytes) == (0, 0)
            assert os.listdir(tmp_path) == []

    asyncio.run(main())


def test_shared_memory_is_really_used_where_both_see_it(media_engine, tmp_path, monkeypatch):
    written = []
    write = shared_memory.write

    def counting(directory, name, parts):
        written.append((directory, sum(len(part) for part in parts)))
        write(directory, name, parts)

    monkeypatch.setattr(shared_memory, "write", counting)
    other = tmp_path / "other"
    other.mkdir()

    async def main(workers, clients, parts):
        written.clear()
        async with (
            serving(media_engine(cache_tokens=1024), shared_directory=workers) as (_, address),
            client_of(address, shared_directory=clients) as client,
        ):
            await collect(client, make_request(*parts))
        return list(written)

    here = str(tmp_path)
    # The small item goes inline, the two others into one file.
    assert asyncio.run(main(here, here, MIXED)) == [(here, 80 * 1176 + 120 * 588)]
    assert asyncio.run(main(here, here, SMALL)) == []
    for workers, clients in [(here, str(other)), (here, None), (None, here)]:
        assert asyncio.run(main(workers, clients, MIXED)) == []


def test_a_full_directory_falls_back_to_the_wire(media_engine, alone, tmp_path, monkeypatch):
    real = os.write

    def no_room(file, data):
        if real is not os.write and os.path.realpath(f"/proc/self/fd/{file}").startswith(
            str(tmp_path)
        ):
            real(file, bytes(data[:100]))
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", no_room)

    async def main():
        async with (
            serving(media_engine(cache_tokens=1024), shared_directory=str(tmp_path)) as (
                _,
                address,
            ),
            client_of(address, shared_directory=str(tmp_path)) as client,
        ):
            assert (await collect(client, make_request(*MIXED)))[0] == alone["mixed"]

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_a_worker_that_cannot_find_the_file_gets_chunks(media_engine, alone, tmp_path, monkeypatch):
    def gone(*_):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(shared_memory, "read_into", gone)

    async def main():
        async with (
            serving(media_engine(cache_tokens=1024), shared_directory=str(tmp_path)) as (
                _,
                address,
            ),
            client_of(address, shared_directory=str(tmp_path)) as client,
        ):
            for _ in range(2):
                assert (await collect(client, make_request(*MIXED)))[0] == alone["mixed"]

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_bfloat16_patches(media_engine):
    """From a gateway that normalises itself: the answer is the engine's for those numbers, of which
    the one has the image's frame once and the other twice."""
    request = make_request(*IMAGE)
    (item,) = request.prompt.items

    async def main():
        engine = media_engine(cache_tokens=1024)
        floats = engine.tower.normalise(torch.from_numpy(item.patches)).bfloat16()
        message = start_message(request, Payload([item]), None)
        message.start.items[0].dtype = pb.DTYPE_BFLOAT16
        frame = floats.view(-1, 3, 2, 196)[:, :, 0].contiguous()
        message.start.items[0].inline = frame.view(torch.int16).numpy().tobytes()
        medium = Medium("k", item.placeholders, floats, item.grid)
        direct = engine.add_request(
            request.prompt.token_ids, media=[medium], max_new_tokens=NEW, ignore_eos=True
        )
        while engine.has_work:
            engine.step()
        async with serving(engine) as (_, address), RawCaller(address) as caller:
            replies = await caller.send(message)
        assert replies[0].WhichOneof("part") == "accepted"
        assert [t for reply in replies[1:] for t in reply.tokens.ids] == direct.generated
        # Pixels and bfloat16 of one content are two entries of the caches.
        assert replies[1].tokens.cached_tokens == 0

    asyncio.run(main())


def test_repeated_requests_find_their_pages(media_engine):
    image = ("image", (1, 20, 26), 5)  # 130 tokens: the first page holds part of it
    other = ("image", (1, 20, 26), 6)

    async def main():
        engine = media_engine(cache_tokens=2048)
        async with serving(engine) as (_, address), client_of(address) as client:
            cached = []
            for medium in (image, image, other, image):
                _, messages = await collect(client, make_request(9, medium, 30))
                cached.append(messages[0].cached_tokens)
                assert all(message.cached_tokens == 0 for message in messages[1:])
            assert cached == [0, 128, 0, 128]
            # The same pixels under another key, as of a clip at another fps: another page.
            request = make_request(9, image, 30)
            object.__setattr__(request.prompt.items[0], "content_key", "0" * 64)
            _, messages = await collect(client, request)
            assert messages[0].cached_tokens == 0

    asyncio.run(main())


def test_sampling_and_stop_tokens_go_through(media_engine):
    async def main():
        engine = media_engine(cache_tokens=2048)
        async with serving(engine) as (_, address), client_of(address) as client:

            def ask(**options):
                return collect(client, make_request(*TEXT, new=12, **options))

            greedy, _ = await ask()
            drawn = SamplingOptions(temperature=2.0, top_p=0.95, seed=-5)
            first, second = (await ask(sampling=drawn))[0], (await ask(sampling=drawn))[0]
            assert first == second != greedy
            assert (await ask(sampling=SamplingOptions(temperature=0.0)))[0] == greedy
            assert (await ask(sampling=SamplingOptions(2.0, 1e-9)))[0] == greedy
            engine.config.__dict__["eos_token_ids"] = frozenset({greedy[3]})
            try:
                tokens, messages = await ask(ignore_eos=False)
                assert tokens == greedy[: greedy.index(greedy[3]) + 1]
                assert messages[-1].finish_reason == "stop"
                assert (await ask())[1][-1].finish_reason == "length"
            finally:
                engine.config.__dict__["eos_token_ids"] = frozenset({257})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingOptions(seed=1 << 70)}, "no worker takes"),
        ({"new": -1}, "no worker takes"),
        ({"request_id": "x" * (9 << 20)}, "at most 8388608 bytes on the wire"),
    ],
)
def test_what_no_message_can_say_is_refused_here(options, message):
    async def main():
        request = make_request(*TEXT, **options)
        with pytest.raises(WorkerRejected, match=message) as caught:
            start_message(request, Payload([]), None)
        assert caught.value.status == 400

    asyncio.run(main())


def test_patches_must_be_bytes():
    request = make_request(*SMALL)
    item = request.prompt.items[0]
    item.patches.dtype = np.int8
    with pytest.raises(ValueError, match="must be uint8"):
        Payload([item])


def test_over_a_unix_socket(media_engine, alone, tmp_path):
    async def main():
        path = f"unix:{tmp_path}/w.sock"
        async with (
            serving(media_engine(cache_tokens=1024), path) as (_, address),
            client_of(address) as client,
        ):
            assert address == path
            assert (await collect(client, make_request(*IMAGE)))[0] == alone["image"]

    asyncio.run(main())
