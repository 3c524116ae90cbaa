"""Every way a request can be wrong is refused, with the field's name, before anything is used."""

import asyncio
import os
import random

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from worker_kit import (
    END,
    IMAGE,
    IMAGE_ID,
    MIXED,
    NEW,
    START,
    TEXT,
    VIDEO_ID,
    RawCaller,
    client_of,
    make_request,
    serving,
)

from examples.m3_serving.gateway.errors import WorkerRejected
from examples.m3_serving.gateway.protocols import SamplingOptions
from examples.m3_serving.gateway.wire import shared_memory
from examples.m3_serving.gateway.wire import worker_pb2 as pb
from examples.m3_serving.gateway.wire.messages import Payload, start_message
from examples.m3_serving.gateway.wire.methods import CHUNK_BYTES, FIELD_KEY, GENERATE
from examples.m3_serving.worker.admission import AdmissionLimits
from examples.m3_serving.worker.validate import (
    ModelFacts,
    Refused,
    RequestLimits,
    check_start,
)

MODEL = ModelFacts(262, 4096, 4224, IMAGE_ID, VIDEO_ID, 588, 1176, 2)
LIMITS = RequestLimits(max_items=3, max_payload_bytes=1 << 20)
SHARED = shared_memory.new_name()


def message(parts=MIXED, shared=SHARED, **options):
    request = make_request(*parts, **options)
    return start_message(request, Payload(request.prompt.items), shared)


def change(path, value):
    """A change of a field of the Start: `items.1.grid` and the like."""
    *way, last = path.split(".")

    def apply(start):
        target = start
        for step in way:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        if last.isdigit():
            target[int(last)] = value
        elif isinstance(value, list):
            del getattr(target, last)[:]
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)

    return apply


def swap_items(start):
    first = pb.Item()
    first.CopyFrom(start.items[0])
    start.items[0].CopyFrom(start.items[1])
    start.items[1].CopyFrom(first)


def same_key(start):
    start.items[2].content_key = start.items[0].content_key


def drop(path):
    def apply(start):
        target = start
        *way, last = path.split(".")
        for step in way:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        target.ClearField(last)

    return apply


def span(item, index, offset, length):
    def apply(start):
        place = start.items[item].placeholders[index]
        place.offset, place.length = offset, length

    return apply


def test_the_unchanged_message_is_good():
    spec = check_start(message().start, MODEL, LIMITS)
    request = make_request(*MIXED)
    assert spec.prompt == request.prompt.token_ids and spec.max_new_tokens == NEW
    assert [item.grid for item in spec.items] == [(1, 4, 4), (5, 4, 4), (1, 12, 10)]
    assert [item.spans for item in spec.items] == [i.placeholders for i in request.prompt.items]
    assert [item.num_bytes for item in spec.items] == [9408, 94080, 70560]
    assert spec.payload_bytes == 174048
    assert (spec.temperature, spec.top_p, spec.seed) == (0.0, 1.0, None)
    assert len({item.key for item in spec.items}) == 3


# The prompt: 3 text, [ 4 image ], 4 text, 5 times [ 4 video ], [ 30 image ], 6 text.
CASES = [
    (change("protocol", 1), "protocol", "must be 2, got 1"),  # two frames in a row of an image
    (change("protocol", 3), "protocol", "must be 2, got 3"),
    (drop("protocol"), "protocol", "must be 2, got 0"),
    (change("request_id", ""), "request_id", "visible ASCII"),
    (change("request_id", "a b"), "request_id", "visible ASCII"),
    (change("request_id", "a\n"), "request_id", "visible ASCII"),
    (change("request_id", "x" * 201), "request_id", "1 to 200"),
    (change("prompt", []), "prompt", "at least one token"),
    (change("prompt.0", 262), "prompt", "below 262, got 262"),
    (change("prompt.0", 2**32 - 1), "prompt", "got 4294967295"),
    (change("prompt.0", IMAGE_ID), "prompt", "of 54 placeholder tokens, .* got 55"),
    (change("prompt.80", VIDEO_ID), "prompt", "of 54 placeholder tokens, .* got 55"),
    (change("max_new_tokens", 0), "max_new_tokens", "at least 1, got 0"),
    (change("max_new_tokens", 4096), "prompt", r"at most 4096 tokens .* got 81 \+ 4096"),
    (change("max_new_tokens", 2**32 - 1), "prompt", "at most 4096"),
    (change("sampling.temperature", -0.1), "sampling.temperature", "at least 0"),
    (change("sampling.temperature", float("nan")), "sampling.temperature", "got nan"),
    (change("sampling.temperature", float("inf")), "sampling.temperature", "finite"),
    (change("sampling.top_p", 0.0), "sampling.top_p", "above 0"),
    (change("sampling.top_p", 1.5), "sampling.top_p", "at most 1"),
    (change("sampling.top_p", float("nan")), "sampling.top_p", "got nan"),
    (lambda s: s.items.add(), "items", "at most 3, got 4"),
    (drop("items.0.modality"), "items[0].modality", "image or a video"),
    (change("items.0.modality", 7), "items[0].modality", "image or a video, got 7"),
    (change("items.0.modality", pb.MODALITY_VIDEO), "items[0].shape", r"\[16, 1176\] for a video"),
    (change("items.1.modality", pb.MODALITY_IMAGE), "items[1].grid", "one frame for an image"),
    (change("items.0.content_key", ""), "items[0].content_key", "64 hexadecimal"),
    (change("items.0.content_key", "A" * 64), "items[0].content_key", "lower case"),
    (change("items.0.content_key", "a" * 63), "items[0].content_key", "64"),
    (change("items.0.content_key", "a" * 64 + "\n"), "items[0].content_key", "64"),
    (change("items.0.content_key", "../" + "a" * 61), "items[0].content_key", "64"),
    (same_key, "items[2].content_key", "of one medium"),
    (drop("items.0.dtype"), "items[0].dtype", "uint8 or bfloat16, got 0"),
    (change("items.0.dtype", 9), "items[0].dtype", "uint8 or bfloat16, got 9"),
    (change("items.0.dtype", pb.DTYPE_BFLOAT16), "items[0].inline", "18816 bytes .* got 9408"),
    (change("items.1.grid", []), "items[1].grid", "three numbers"),
    (change("items.1.grid", [5, 4]), "items[1].grid", "three numbers"),
    (change("items.1.grid", [5, 4, 4, 1]), "items[1].grid", "three numbers"),
    (change("items.1.grid", [4, 4, 4, 1, 4, 4]), "items[1].grid", "three numbers"),
    (change("items.1.grid", [0, 4, 4]), "items[1].grid", "from 1"),
    (change("items.1.grid", [2**63, 2, 2]), "items[1].grid", "to 65536"),
    (change("items.1.grid", [2**32, 2**32, 2]), "items[1].grid", "to 65536"),
    (change("items.1.grid", [5, 1, 16]), "items[1].grid", "multiples of 2"),
    (change("items.1.grid", [5, 16, 1]), "items[1].grid", "multiples of 2"),
    (change("items.1.grid", [4, 4, 4]), "items[1].shape", r"\[64, 1176\] .* got \[80, 1176\]"),
    (
        change("items.0.shape", [16, 1176]),  # its frame twice
        "items[0].shape",
        r"\[16, 588\] for an image of the grid \[1, 4, 4\], got \[16, 1176\]",
    ),
    (
        change("items.1.shape", [80, 588]),  # half of its frames
        "items[1].shape",
        r"\[80, 1176\] for a video of the grid \[5, 4, 4\], got \[80, 588\]",
    ),
    (change("items.1.shape", []), "items[1].shape", r"got \[\]"),
    (change("items.1.shape", [80 * 1176]), "items[1].shape", r"got \[94080\]"),
    (change("items.1.shape", [80, 1176, 1]), "items[1].shape", r"got \[80, 1176, 1\]"),
    (change("items.1.shape", [1176, 80]), "items[1].shape", r"got \[1176, 80\]"),
    (change("items.1.shape", [2**61, 2**61]), "items[1].shape", "got"),
    (drop("items.0.inline"), "items[0].payload", "got none"),
    (change("items.0.inline", b"x" * 9407), "items[0].inline", "9408 bytes .* got 9407"),
    (change("items.0.inline", b""), "items[0].inline", "9408 bytes .* got 0"),
    (
        change("items.0.chunked.num_bytes", 9409),
        "items[0].chunked",
        "9408 bytes .* got 9409",
    ),
    (
        change("items.1.shared_memory.num_bytes", 2**64 - 1),
        "items[1].shared_memory",
        "94080 bytes",
    ),
    (
        change("items.1.shared_memory.name", "passwd"),
        "items[1].shared_memory.name",
        "of a file of the gateway's, got 'passwd'",
    ),
    (change("items.1.shared_memory.name", ""), "items[1].shared_memory.name", "got ''"),
    (
        change("items.1.shared_memory.name", f"../shm/{SHARED}"),
        "items[1].shared_memory.name",
        "of a file",
    ),
    (change("items.1.shared_memory.name", SHARED + "/"), "items[1].shared_memory.name", "of a"),
    (change("items.1.shared_memory.name", SHARED + "\0"), "items[1].shared_memory.name", "of a"),
    (
        change("items.1.shared_memory.offset", 2**63),
        "items[1].shared_memory.offset",
        "below",
    ),
    (drop("items.0.placeholders"), "items[0].placeholders", "at least one"),
    (span(0, 0, 4, 0), "items[0].placeholders", "not empty"),
    (span(0, 0, 3, 4), "items[0].placeholders", "at token 258 only"),  # one too early
    (span(0, 0, 5, 4), "items[0].placeholders", "at token 258 only"),  # one too late
    (span(0, 0, 4, 3), "items[0].placeholders", "4 tokens for the grid .* got 3"),
    (span(0, 0, 14, 4), "items[0].placeholders", "at token 258 only"),  # the clip's
    (span(2, 0, 44, 100), "items[2].placeholders", "inside 81 tokens"),
    (span(2, 0, 2**63, 20), "items[2].placeholders", "inside 81 tokens"),
    (span(2, 0, 2**64 - 1, 2**64 - 1), "items[2].placeholders", "inside 81 tokens"),
    (span(1, 1, 14, 4), "items[1].placeholders", "in order, from 18 on"),  # twice the same
    (span(1, 1, 17, 4), "items[1].placeholders", "in order, from 18 on"),  # overlapping
    (span(1, 4, 4, 4), "items[1].placeholders", "in order"),
    (span(2, 0, 4, 4), "items[2].placeholders", "30 tokens for the grid .* got 4"),
    (swap_items, "items[1].placeholders", "after the last item's"),
]


@pytest.mark.parametrize(("apply", "field", "text"), CASES)
def test_what_is_refused(apply, field, text):
    start = message().start
    apply(start)
    with pytest.raises(Refused, match=text) as caught:
        check_start(start, MODEL, LIMITS)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_the_places_that_the_cases_name():
    """Keeps the numbers above honest."""
    prompt = make_request(*MIXED).prompt.token_ids
    assert len(prompt) == 81 and prompt[3:9] == [START, *[IMAGE_ID] * 4, END]
    assert prompt[13:19] == [START, *[VIDEO_ID] * 4, END] and prompt[44] == IMAGE_ID


def test_damaged_messages_are_refused_or_still_good():
    """Whatever a message says, the checks answer with `Refused` and never with another error."""
    good = message().start.SerializeToString()
    draw = random.Random(1)
    outcomes = set()
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            # Most bytes are pixels; what matters lies around them.
            at = draw.choice([draw.randrange(400), len(good) - 1 - draw.randrange(800)])
            damaged[at] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        try:
            start = pb.Start.FromString(bytes(damaged))
        except DecodeError:
            outcomes.add("not a message")
            continue
        try:
            spec = check_start(start, MODEL, LIMITS)
        except Refused as refusal:
            outcomes.add(refusal.field.split(".")[0].split("[")[0])
            continue
        outcomes.add("good")
        assert spec.payload_bytes <= LIMITS.max_payload_bytes
    assert outcomes >= {"not a message", "good", "prompt", "items", "protocol", "request_id"}


def test_what_is_no_message_does_no_harm(media_engine):
    async def main():
        engine = media_engine(cache_tokens=512)
        async with serving(engine) as (server, address), RawCaller(address) as raw:
            bytes_call = raw.channel.stream_stream(GENERATE)
            for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x7f", bytes(1000)):
                call = bytes_call(iter([data]))
                assert await call.code() is not grpc.StatusCode.OK
            replies = await raw.send(message(TEXT))
            assert replies[-1].tokens.finish_reason == pb.FINISH_REASON_LENGTH
            assert server.admission.requests == 0

    asyncio.run(main())


def test_bytes_of_all_items_are_limited():
    with pytest.raises(Refused, match=r"at most 174047 bytes of patches together, got 174048"):
        check_start(message().start, MODEL, RequestLimits(max_payload_bytes=174047))
    check_start(message().start, MODEL, RequestLimits(max_payload_bytes=174048))


def test_a_model_without_a_tower_takes_text_only():
    model = ModelFacts(262, 4096, 4224, None, None, 0, 0, 1)
    check_start(message(TEXT).start, model, LIMITS)
    with pytest.raises(Refused, match=r"items\[0\]: must be absent") as caught:
        check_start(message().start, model, LIMITS)
    assert caught.value.field == "items[0]"


def chunks_of(request):
    return list(Payload(request.prompt.items).chunks())


def edited(chunk, **changes):
    result = pb.Message()
    result.CopyFrom(chunk)
    for name, value in changes.items():
        setattr(result.chunk, name, value)
    return result


def split(chunk, at):
    data = chunk.chunk.data
    return edited(chunk, data=data[:at]), edited(chunk, data=data[at:], offset=at)


BAD_CHUNKS = {
    "none": (lambda a, b: [], "items[1].chunked", "followed by 94080 bytes, got 0"),
    "one missing": (lambda a, b: [a], "items[2].chunked", "followed by 70560 bytes, got 0"),
    "half": (lambda a, b: [split(a, 99)[0]], "items[1].chunked", "got 99"),
    "wrong order": (lambda a, b: [b, a], "chunk", "of item 1 at byte 0, got item 2"),
    "halves swapped": (lambda a, b: [*split(a, 99)[::-1], b], "chunk", "at byte 0, got"),
    "a gap": (
        lambda a, b: [split(a, 99)[0], edited(split(a, 99)[1], offset=100), b],
        "chunk",
        "at byte 99",
    ),
    "twice": (lambda a, b: [a, a, b], "chunk", "of item 2 at byte 0, got item 1"),
    "no such item": (lambda a, b: [edited(a, item=2**31)], "chunk", "got item 2147483648"),
    "too long": (
        lambda a, b: [edited(a, data=a.chunk.data + b"x"), b],
        "chunk",
        "1 to 94080 bytes, got 94081",
    ),
    "empty": (lambda a, b: [edited(a, data=b"")], "chunk", "1 to 94080 bytes, got 0"),
    "one more": (lambda a, b: [a, b, b], "chunk", "announced in the first message"),
    "a start": (lambda a, b: [pb.Message(start=pb.Start())], "chunk", "must follow"),
    "nothing in it": (lambda a, b: [pb.Message()], "chunk", "must follow"),
}


@pytest.fixture(scope="module")
def refusal(media_engine):
    """Sends messages to a worker; (status, field, text) of its refusal."""
    engine = media_engine(cache_tokens=512)

    def ask(*messages, **options):
        async def main():
            async with serving(engine, **options) as (server, address), RawCaller(address) as raw:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw.send(*messages)
                admission = server.admission
                assert (admission.requests, admission.payload_bytes) == (0, 0)
                assert engine.pool.held == 0 and not engine.has_work
            error = caught.value
            return error.code(), dict(error.trailing_metadata()).get(FIELD_KEY), error.details()

        return asyncio.run(main())

    return ask


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunks_that_do_not_fit(refusal, name):
    make, field, text = BAD_CHUNKS[name]
    messages = make(*chunks_of(make_request(*MIXED)))
    code, got_field, got_text = refusal(message(shared=None), *messages)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert got_field == field and text in got_text


def test_a_chunk_may_not_be_larger_than_agreed(refusal):
    start = message((3, ("video", (1, 40, 48), 1), 2), shared=None)
    assert start.start.items[0].chunked.num_bytes > CHUNK_BYTES
    data = bytes(start.start.items[0].chunked.num_bytes)
    code, field, text = refusal(start, pb.Message(chunk=pb.Chunk(data=data)))
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "chunk")
    assert f"1 to {CHUNK_BYTES} bytes" in text


def test_the_first_message_must_be_a_start(refusal):
    for messages in ((), (pb.Message(),), (pb.Message(chunk=pb.Chunk()),)):
        code, field, _ = refusal(*messages)
        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "start")


def test_a_refusal_over_the_wire_names_the_field_and_the_log_the_request(refusal, caplog):
    bad = message(shared=None)
    bad.start.items[1].grid[0] = 4
    code, field, text = refusal(bad)
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "items[1].shape")
    assert text.startswith("items[1].shape: must be [64, 1176]")
    assert f"refused request 'r': {text}" in caplog.messages


def test_what_the_cache_cannot_hold_is_refused(refusal):
    code, field, text = refusal(message((512,), new=2))
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert "at most 512 tokens, the cache's" in text and "got 512 + 2 - 1" in text


def test_what_the_cache_just_holds_is_served(media_engine):
    async def main():
        engine = media_engine(cache_tokens=512)
        async with serving(engine) as (_, address), RawCaller(address) as raw:
            replies = await raw.send(message((511,), new=2))
            assert sum(len(reply.tokens.ids) for reply in replies) == 2

    asyncio.run(main())


def test_what_could_never_be_admitted_is_too_large_and_not_busy(refusal):
    options = {"admission": AdmissionLimits(max_payload_bytes=1000)}
    code, field, _ = refusal(message(IMAGE, shared=None), **options)
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "items")


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
def test_numbers_that_are_not_finite_are_refused(refusal, bits):
    start = message(IMAGE, shared=None)
    item = start.start.items[0]
    item.dtype = pb.DTYPE_BFLOAT16
    values = np.zeros(120 * 588, "<u2")
    values[-1] = bits
    item.inline = values.tobytes()
    code, field, text = refusal(start)
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "items[0].payload")
    assert "finite" in text


def shared_cases(directory):
    """(what to put there, what the worker says); the message wants 164,640 bytes."""

    def put(name, data):
        (directory / name).write_bytes(data)

    def link(name):
        put("secret", bytes(164640))
        (directory / name).symlink_to(directory / "secret")

    return {
        "too short": (lambda name: put(name, bytes(164639)), "must have 164640 bytes"),
        "a folder": (lambda name: (directory / name).mkdir(), "regular file"),
        "a pipe": (lambda name: os.mkfifo(directory / name), "regular file"),
        "a link": (link, None),
        "nothing": (lambda name: None, None),
    }


@pytest.mark.parametrize("case", ["too short", "a folder", "a pipe", "a link", "nothing"])
def test_shared_files_that_are_not_what_they_should_be(refusal, tmp_path, case):
    make, text = shared_cases(tmp_path)[case]
    make(SHARED)
    code, field, got = refusal(message(), shared_directory=str(tmp_path))
    if text is None:
        assert code is grpc.StatusCode.NOT_FOUND
    else:
        assert code is grpc.StatusCode.INVALID_ARGUMENT and text in got
        assert field.endswith("shared_memory")
    # Also what is refused is removed; a link is removed and not what it points to.
    assert set(os.listdir(tmp_path)) <= {"secret", *([SHARED] if case == "a folder" else [])}


def test_the_clients_error_says_whose_fault_it_is(media_engine):
    async def main():
        async with (
            serving(media_engine(cache_tokens=512)) as (_, address),
            client_of(address) as client,
        ):

            async def refused(*parts, item=None, **options):
                request = make_request(*parts, **options)
                for name, value in (item or {}).items():
                    object.__setattr__(request.prompt.items[0], name, value)
                with pytest.raises(WorkerRejected) as caught:
                    await anext(client.generate(request))
                return caught.value.status, caught.value.param

            assert await refused(600) == (400, "prompt")
            assert await refused(20, new=0) == (400, "max_new_tokens")
            hot = SamplingOptions(temperature=-1.0)
            assert await refused(20, sampling=hot) == (400, "sampling.temperature")
            assert await refused(*IMAGE, item={"grid": (1, 10, 10)}) == (500, None)
            assert await refused(*IMAGE, item={"content_key": "x"}) == (500, None)
            assert await refused(20, request_id="") == (500, None)
            assert (await client.health())[0].ready  # no refusal is the worker's fault

    asyncio.run(main())
