"""What is refused, how it says so, and that nothing a client sends is ever a 500."""

import asyncio
import json
import logging
import random
import socket
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("av")
pytest.importorskip("PIL")

from gateway_media import FAMILY, image_bytes, pattern
from gateway_server import (
    MODEL,
    SMALL_URL,
    FakeWorkers,
    client_of,
    data_url,
    events,
    gateway,
    image_part,
    post,
    socket_of,
    streamed_text,
    text_body,
    video_part,
    with_client,
)

from examples.m3_serving.gateway import errors
from examples.m3_serving.gateway.errors import GatewayError
from examples.m3_serving.gateway.server.chat_request import parse_chat, parse_json, parsed_bytes


def check_error(answer, status, code=None, param=None):
    """The answer is an error in OpenAI's form, and this one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) > 10
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    return error["message"]


# --- the body ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"model": "x",}', "not JSON"),
        (b'{"model": "x"} {}', "not JSON"),
        (b'{"temperature": NaN}', "not JSON"),
        (b'{"temperature": -Infinity}', "not JSON"),
        (b'{"model": "\xff"}', "unicode"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b"[1]", "must be a JSON object, got an array"),
        (b"null", "must be a JSON object, got null"),
        (b'"x"', "must be a JSON object, got a string"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "out of range"),
        (b'{"model": "a\x01b"}', "not JSON"),
    ],
)
def test_what_is_no_json_object(body, message):
    assert message in check_error(post(body), 400, "invalid_body")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 400),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-encoding": "identity"}, 200),
    ],
)
def test_content_types(headers, status):
    answer = post(text_body(), headers=headers)
    if status == 200:
        assert answer.status_code == 200
    else:
        check_error(answer, status)


def test_large_bodies_are_refused_by_their_announced_length_and_by_their_real_one():
    workers = FakeWorkers()
    body = json.dumps(text_body("x" * 5000)).encode()
    check_error(post(body, workers, max_body_bytes=4000), 413, "request_too_large")

    async def pieces():
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async def use(client):  # no length announced
        return await client.post(
            "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
        )

    check_error(with_client(use, workers, max_body_bytes=4000), 413, "request_too_large")
    options = {"max_body_bytes": len(body), "context_tokens": 10_000}
    assert with_client(use, workers, **options).status_code == 200
    assert len(workers.requests) == 1


def test_a_body_that_is_too_large_is_not_kept_and_its_sender_reads_why():
    """Over a socket: the announced length, a body without one, and what the server holds."""

    async def main():
        async with gateway(max_body_bytes=1 << 20) as service, socket_of(service) as port:
            held = []
            for framing in (b"content-length: 8388608", b"transfer-encoding: chunked"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
                writer.write(b"content-type: application/json\r\n" + framing + b"\r\n\r\n")
                piece = b"x" * 65536
                for _ in range(128):
                    chunked = framing.startswith(b"transfer")
                    writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
                    try:
                        await asyncio.wait_for(writer.drain(), 0.5)
                    except (TimeoutError, OSError):
                        break
                    held.append(service.admission.bytes)
                if framing.startswith(b"transfer"):
                    writer.write(b"0\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), 10)
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 413")
                assert json.loads(body)["error"]["code"] == "request_too_large"
                writer.close()
            assert max(held) <= 1 << 20 and service.admission.bytes == 0

    asyncio.run(main())


def test_a_body_that_does_not_arrive_is_a_408():
    async def main():
        async with gateway(body_s=0.3) as service, socket_of(service) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"
            )
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
            assert answer.startswith(b"HTTP/1.1 408")
            writer.close()

    asyncio.run(main())


# --- fields ---

USER = {"role": "user", "content": "x"}
BAD_FIELDS = [
    ({"model": None}, "model"),
    ({"model": 1}, "model"),
    ({"model": ["x"]}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [USER, None]}, "messages[1]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "ai", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{}] * 100}] * 41}, "messages[40].content"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "cache_control": {}}]}, "messages[0].cache_control"),
    ({"messages": [{**USER, "name": 1}]}, "messages[0].name"),
    ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": []}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": False}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_completion_tokens": True}, "max_completion_tokens"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 0}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_k": 5}, "top_k"),
    ({"best_of": 2}, "best_of"),
    ({"user": 5}, "user"),
    ({"ignore_eos": "x"}, "ignore_eos"),
    ({"prompt": "x"}, "prompt"),
    ({"x" * 5000: 1}, None),
]


@pytest.mark.parametrize(("changes", "param"), BAD_FIELDS, ids=range(len(BAD_FIELDS)))
def test_every_bad_field_is_refused_by_its_name(changes, param):
    body = {**text_body(), **changes}
    with pytest.raises(GatewayError) as caught:
        chat = parse_chat(parse_json(json.dumps(body).encode()))
        check_error(post({**body, "model": chat.model}), 400, param=param)  # the later checks
        raise errors.InvalidParameter(f"{param} is wrong", param=param)
    error = caught.value
    assert error.status == 400 and (param is None or error.param == param)
    name = (param or "").rpartition(".")[2]
    assert name in error.message and len(error.message) < 300
    json.dumps(error.to_openai()).encode()


PARTS = [
    ({}, "type"),
    ({"type": "text"}, "text"),
    ({"type": "text", "text": 1}, "text"),
    ({"type": "text", "text": "x", "extra": 1}, "extra"),
    ({"type": "image"}, "type"),
    ({"type": "input_audio", "input_audio": {}}, "type"),
    ({"type": "file", "file": {}}, "type"),
    ({"type": 3}, "type"),
    ({"type": "image_url"}, "image_url"),
    ({"type": "image_url", "image_url": SMALL_URL}, "image_url"),
    ({"type": "image_url", "image_url": {}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": SMALL_URL, "x": 1}}, "image_url.x"),
    ({"type": "image_url", "image_url": {"url": SMALL_URL, "fps": 1}}, "image_url.fps"),
    ({"type": "image_url", "image_url": {"url": SMALL_URL}, "text": "x"}, "text"),
    ({"type": "image_url", "video_url": {"url": SMALL_URL}}, "image_url"),
    ({"type": "video_url", "video_url": {"url": SMALL_URL, "fps": 9}}, "video_url.fps"),
    ({"type": "image_url", "image_url": {"url": ""}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "http://[::1]/"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "http://a@b/"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "http://x:22/"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "data:;base64,@@"}}, "image_url"),
    ({"type": "video_url", "video_url": {"url": SMALL_URL}}, "video_url"),
    (image_part(SMALL_URL, max_long_side_pixel=1), "image_url.max_long_side_pixel"),
    (image_part(SMALL_URL, detail=[1]), "image_url.detail"),
]


def test_every_bad_part_is_refused_by_its_name():
    async def use(client):
        for part, param in PARTS:
            good = {"type": "text", "text": "x"}
            body = {"model": MODEL, "messages": [USER, {"role": "user", "content": [good, part]}]}
            answer = await client.post("/v1/chat/completions", content=json.dumps(body).encode())
            check_error(answer, 400, param=f"messages[1].content[1].{param}")

    with_client(use)


def test_the_item_that_is_wrong_is_named_among_good_ones():
    parts = [image_part(), image_part(data_url(b"GIF89a broken")), image_part()]
    answer = post({"model": MODEL, "messages": [{"role": "user", "content": parts}]})
    check_error(answer, 400, "invalid_media", "messages[0].content[1].image_url")


# --- limits ---


def test_media_over_the_limits_of_bytes_and_pixels():
    bomb = image_bytes(pattern(8, 8)).replace(
        (8).to_bytes(4, "big") + (8).to_bytes(4, "big"),
        (60000).to_bytes(4, "big") + (60000).to_bytes(4, "big"),
    )
    big = data_url(b"\x89PNG" + bytes(FAMILY.limits.image_bytes))
    for url in (data_url(bomb), big):
        answer = post(
            {"model": MODEL, "messages": [{"role": "user", "content": [image_part(url)]}]}
        )
        assert answer.status_code in (400, 413)
        assert answer.json()["error"]["code"] in ("media_too_large", "invalid_media")
    assert answer.status_code == 413


def test_prompts_over_the_context_are_refused_before_a_worker_is_asked():
    workers = FakeWorkers()
    for body in (
        text_body("x" * 200),
        text_body("x" * 900),
        text_body("x", max_tokens=90),
        {"model": MODEL, "messages": [{"role": "user", "content": [image_part()] * 20}]},
    ):
        message = check_error(
            post(body, workers, context_tokens=100), 400, "context_length_exceeded"
        )
        assert "100" in message
    assert workers.requests == []
    assert post(text_body("x" * 50, max_tokens=30), workers, context_tokens=100).status_code == 200


def test_half_a_surrogate_pair_is_no_text():
    """Also where a parser of JSON lets it through."""
    for where in ({"content": "a\udc00b"}, {"name": "\ud800"}, {"role": "\udfff"}):
        body = {"model": MODEL, "messages": [{**USER, **where}]}
        check_error(post(json.dumps(body).encode()), 400, "invalid_body")
        with pytest.raises(errors.InvalidParameter, match="surrogate"):
            parse_chat(body)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":1},', b"0,", b'"ab",', b'{"a":{}},'])
def test_bodies_that_grow_when_they_are_parsed_count_as_what_they_become(piece):
    body = bytearray(b'{"model":[' + piece * (1_200_000 // len(piece)) + b"0]}")

    def size(value):
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            return 0 if isinstance(value, int) else sys.getsizeof(value)
        return sys.getsizeof(value) + sum(map(size, inner))

    assert size(parse_json(body)) <= parsed_bytes(body)
    check_error(post(bytes(body), max_request_bytes=len(body) + 1000), 413, "request_too_large")
    check_error(post(bytes(body)), 400, param="model")


def test_what_a_client_is_told_is_short_even_of_a_long_request():
    for part in (image_part(detail="x" * 100_000), image_part("http://" + "y" * 8000)):
        answer = post({"model": MODEL, "messages": [{"role": "user", "content": [part]}]})
        assert len(check_error(answer, 400)) <= 1000


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    async def main():
        async with gateway(context_tokens=100) as service, client_of(service) as client:
            monkeypatch.setattr(
                service._tokenizer, "encode_plain", lambda text: pytest.fail("encoded")
            )
            answer = await client.post("/v1/chat/completions", json=text_body("x" * 801))
            check_error(answer, 400, "context_length_exceeded", "messages")

    asyncio.run(main())


def test_an_unknown_model_is_a_404():
    answer = post({**text_body(), "model": "other"})
    assert "'other'" in check_error(answer, 404, "model_not_found", "model")
    check_error(post({**text_body(), "model": ""}), 404, "model_not_found", "model")


def test_unknown_paths_and_methods():
    async def use(client):
        check_error(await client.get("/"), 404, "not_found")
        check_error(await client.post("/v1/completions", json={}), 404, "not_found")
        check_error(await client.get("/v1/chat/completions"), 405, "method_not_allowed")
        check_error(await client.post("/v1/models", json={}), 405, "method_not_allowed")
        check_error(await client.get("/docs"), 404, "not_found")
        check_error(await client.get("/openapi.json"), 404, "not_found")
        for path in ("/health/", "/v1/models//", "/v1/chat/completions/"):  # nor led elsewhere
            answer = await client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"]

    with_client(use)


# --- what workers do ---

WORKER_ERRORS = [
    (errors.WorkerBusy("all workers are full"), 429, True),
    (errors.WorkerUnavailable("no worker is healthy"), 503, True),
    (errors.WorkerLost("the worker died"), 502, False),
    (errors.WorkerRejected("temperature is too warm for me"), 400, False),
    (errors.WorkerRejected("a tensor has a wrong shape", internal=True), 500, False),
    (RuntimeError("secret"), 500, False),
]


@pytest.mark.parametrize(("error", "status", "retry"), WORKER_ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_fails_before_its_first_token_is_a_status(error, status, retry, stream):
    answer = post(text_body(stream=stream), FakeWorkers(error=error))
    message = check_error(answer, status, getattr(error, "code", "internal_error"))
    assert "secret" not in message
    assert ("retry-after" in answer.headers) == retry


@pytest.mark.parametrize(("error", "status", "retry"), WORKER_ERRORS)
def test_a_worker_that_fails_later_is_an_event_of_the_stream(error, status, retry):
    workers = FakeWorkers(error=error, error_after=3)
    answer = post(text_body(stream=True), workers)
    assert answer.status_code == 200
    *chunks, last = events(answer.text)
    assert streamed_text(chunks) == "Hel"
    assert set(last) == {"error"} and last["error"]["code"] == getattr(
        error, "code", "internal_error"
    )
    assert "secret" not in answer.text and "[DONE]" not in answer.text
    check_error(post(text_body(), FakeWorkers(error=error, error_after=3)), status)


def test_a_worker_that_stalls_is_given_up():
    for stall_after, stream in ((0, False), (0, True), (2, False)):
        workers = FakeWorkers(stall_after=stall_after)
        answer = post(text_body(stream=stream), workers, stall_s=0.1)
        check_error(answer, 504, "worker_timeout")
        assert workers.cancelled == 1
    workers = FakeWorkers(stall_after=2)
    *chunks, last = events(post(text_body(stream=True), workers, stall_s=0.1).text)
    assert streamed_text(chunks) == "He" and last["error"]["code"] == "worker_timeout"
    assert workers.cancelled == 1


def test_an_answer_that_just_ends_is_a_lost_worker():
    class Forgetful(FakeWorkers):
        async def generate(self, request):
            async for message in super().generate(request):
                if message.finish_reason:
                    return
                yield message

    check_error(post(text_body(), Forgetful()), 502, "worker_lost")


def test_a_fault_of_the_gateway_is_a_500_that_tells_nothing(monkeypatch, caplog):
    async def main():
        async with gateway() as service, client_of(service) as client:
            monkeypatch.setattr(service._template, "render", lambda *a: 1 / 0)
            with caplog.at_level(logging.ERROR):
                answer = await client.post("/v1/chat/completions", json=text_body())
            message = check_error(answer, 500, "internal_error")
            assert "division" not in message and "division" in caplog.text

    asyncio.run(main())


def test_every_kind_of_error_has_its_place_in_openais_form():
    for kind in GatewayError.__subclasses__():
        body = kind("something is wrong", param="x").to_openai()
        assert body["error"]["type"] in (
            "invalid_request_error",
            "rate_limit_error",
            "server_error",
            "upstream_error",
        )
        assert body["error"]["code"] == kind.code


# --- fuzz ---

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["user", "text", "image_url", MODEL, SMALL_URL, "auto", "data:,", "http://x"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "stream", "stream_options", "temperature", "top_p", "seed", "stop"),
        *("max_tokens", "max_completion_tokens", "n", "user", "tools", "logprobs", "x"),
    ]
)
MEDIUM = st.fixed_dictionaries(
    {"url": st.sampled_from([SMALL_URL, "data:,x", "ftp://x", ""]) | JSON_VALUES},
    optional={
        "detail": st.sampled_from(["low", "auto"]) | JSON_VALUES,
        "fps": st.floats() | JSON_VALUES,
        "max_long_side_pixel": st.integers(-1, 5000) | JSON_VALUES,
    },
)
PART = (
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text() | JSON_VALUES})
    | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": MEDIUM | JSON_VALUES})
    | st.fixed_dictionaries({"type": st.just("video_url"), "video_url": MEDIUM | JSON_VALUES})
    | JSON_VALUES
)
MESSAGE = (
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "developer"]) | JSON_VALUES,
            "content": st.text() | st.lists(PART, max_size=3) | JSON_VALUES,
        },
        optional={"name": JSON_VALUES, "tool_calls": JSON_VALUES},
    )
    | JSON_VALUES
)
BODY = (
    st.fixed_dictionaries(
        {"model": st.just(MODEL) | JSON_VALUES, "messages": st.lists(MESSAGE, max_size=3)},
        optional={"stream": st.booleans(), "max_tokens": st.integers(-1, 5), "stop": JSON_VALUES},
    )
    | st.dictionaries(NAMES, JSON_VALUES, max_size=4)
    | JSON_VALUES
)


@pytest.fixture(scope="module")
def one_gateway():
    """A gateway for many requests: (loop, client)."""
    loop = asyncio.new_event_loop()
    around = gateway(FakeWorkers(text="ok"))
    service = loop.run_until_complete(around.__aenter__())
    client = client_of(service)
    yield loop, loop.run_until_complete(client.__aenter__())
    loop.run_until_complete(client.__aexit__(None, None, None))
    loop.run_until_complete(around.__aexit__(None, None, None))
    loop.close()


def ask(one_gateway, content: bytes):
    loop, client = one_gateway
    headers = {"content-type": "application/json"}
    answer = loop.run_until_complete(
        client.post("/v1/chat/completions", content=content, headers=headers)
    )
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code)
    return answer


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(body=BODY)
def test_no_json_is_ever_a_fault_of_the_server(one_gateway, body):
    ask(one_gateway, json.dumps(body, allow_nan=True).encode())


@settings(deadline=None, max_examples=100)
@given(content=st.binary(max_size=200))
def test_no_bytes_are_ever_a_fault_of_the_server(one_gateway, content):
    assert ask(one_gateway, content).status_code == 400


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_no_damage_to_a_good_body_is_ever_a_fault_of_the_server(one_gateway, seed):
    draw = random.Random(seed)
    good = {
        **text_body(temperature=0.5, stop=["x"], stream=draw.random() < 0.5),
        "messages": [{"role": "user", "content": [image_part(), video_part(SMALL_URL)][:1]}],
    }
    content = bytearray(json.dumps(good).encode())
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(content))
        match draw.randrange(3):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                del content[at : at + draw.randrange(1, 20)]
            case 2:
                content[at:at] = bytes(draw.choices(b'{}[]",:0eE-\\u', k=draw.randrange(1, 6)))
    ask(one_gateway, bytes(content))


def test_no_bytes_on_a_socket_stop_the_server():
    """HTTP that is none, too, and a good request after it."""

    async def main():
        async with gateway() as service, socket_of(service) as port:
            draw = random.Random(5)
            path = b"POST /v1/chat/completions HTTP/1.1\r\n"
            starts = [
                b"",
                path,
                path + b"content-length: x\r\n\r\n",
                path + b"host: x\r\ncontent-length: 99\r\n\r\n{}",
                path + b"host: x\r\ntransfer-encoding: chunked\r\n\r\nzz",
                b"POST /%ff/%00 HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET " + b"/" * 100_000,
            ]
            for start in starts:
                for _ in range(3):
                    with socket.create_connection(("127.0.0.1", port)) as sock:
                        sock.sendall(start + draw.randbytes(draw.randrange(100)))
                    await asyncio.sleep(0.01)
            async with client_of(service) as client:
                assert (
                    await client.post("/v1/chat/completions", json=text_body())
                ).status_code == 200
            await asyncio.sleep(0.05)
            assert service.admission.requests == 0 and service.admission.bytes == 0

    asyncio.run(main())
