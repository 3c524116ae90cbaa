"""Fetching from servers on loopback that behave in every bad way, and data URLs."""

import asyncio
import base64
import gzip
import ipaddress
import socket
import ssl
import subprocess
import time
import tracemalloc
import zlib
from shutil import which
from urllib.parse import unquote_to_bytes

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("aiohttp")
pytest.importorskip("av")
pytest.importorskip("PIL")

from aiohttp import web
from gateway_media import small_limits

from examples.m3_serving.gateway.data_url import decode_base64, decode_data_url
from examples.m3_serving.gateway.errors import (
    ForbiddenAddress,
    GatewayError,
    InvalidMedia,
    InvalidUrl,
    MediaTimeout,
    MediaTooLarge,
    MediaUnreachable,
)
from examples.m3_serving.gateway.fetch import HttpFetcher, _Pinned, resolve_host
from examples.m3_serving.gateway.protocols import MediaItem, MediaSource

LOOPBACK = ipaddress.ip_network("127.0.0.1/32")


class Server:
    """An HTTP server whose handler gets the path; counts and keeps the requests."""

    def __init__(self, handler, ssl_context=None):
        self._handler, self._ssl = handler, ssl_context
        self.requests = []

    async def __aenter__(self):
        async def handle(request):
            self.requests.append(request)
            return await self._handler(request)

        self._server = web.Server(handle)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._ssl)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error):
        await self._runner.cleanup()

    def url(self, path="/", host="127.0.0.1", scheme="http"):
        return f"{scheme}://{host}:{self.port}{path}"

    def fetcher(self, **options):
        options = {"allowed_networks": [LOOPBACK], "allowed_ports": [self.port], **options}
        return HttpFetcher(**options)


def fetch(handler, path="/", *, max_bytes=1 << 20, host="127.0.0.1", **options):
    """What a fetcher makes of a server's answer."""

    async def main():
        async with Server(handler) as server:
            return await server.fetcher(**options).fetch(server.url(path, host), max_bytes)

    return asyncio.run(main())


def answer(**arguments):
    async def handler(request):
        return web.Response(**arguments)

    return handler


def test_plain_body():
    assert fetch(answer(body=b"abc")) == b"abc"


def test_loopback_is_refused_unless_allowed():
    async def main():
        async with Server(answer(body=b"abc")) as server:
            for url in (server.url(), server.url(host="localhost")):
                with pytest.raises(ForbiddenAddress):
                    await HttpFetcher(allowed_ports=[server.port]).fetch(url, 100)
            with pytest.raises(InvalidUrl, match="port"):
                await HttpFetcher(allowed_networks=[LOOPBACK]).fetch(server.url(), 100)
            assert server.requests == []

    asyncio.run(main())


def test_environment_opens_nothing(monkeypatch):
    async def main():
        async with Server(answer(body=b"proxied")) as server:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, server.url())
            with pytest.raises(MediaUnreachable):
                await HttpFetcher(
                    connect_s=0.2, allowed_networks=[ipaddress.ip_network("127.0.0.9/32")]
                ).fetch("http://127.0.0.9/", 100)
            assert server.requests == []

    asyncio.run(main())


def test_the_checked_address_is_dialled_and_the_name_is_sent():
    async def resolve(host, port):
        asked.append(host)
        return ["127.0.0.1"]

    asked = []

    async def main():
        async with Server(answer(body=b"abc")) as server:
            fetcher = server.fetcher(resolve=resolve)
            assert await fetcher.fetch(server.url(host="media.test"), 100) == b"abc"
            assert server.requests[0].headers["Host"] == f"media.test:{server.port}"
            assert server.requests[0].headers["Accept-Encoding"] == "identity"

    asyncio.run(main())
    assert asked == ["media.test"]


def test_an_answer_that_changes_is_not_asked_for_again():
    """The first look-up says an allowed address, every later one a forbidden one."""

    async def resolve(host, port):
        answers.append("127.0.0.1" if not answers else "169.254.169.254")
        return [answers[-1]]

    answers = []
    assert fetch(answer(body=b"abc"), host="media.test", resolve=resolve) == b"abc"
    assert answers == ["127.0.0.1"]


@pytest.mark.parametrize("bad", ["169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_one_forbidden_address_of_a_name_stops_the_request(bad):
    async def resolve(host, port):
        return ["127.0.0.1", bad]

    async def main():
        async with Server(answer(body=b"abc")) as server:
            with pytest.raises(ForbiddenAddress):
                await server.fetcher(resolve=resolve).fetch(server.url(host="media.test"), 100)
            assert server.requests == []

    asyncio.run(main())


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), OSError(), UnicodeError()])
def test_names_that_do_not_resolve(error):
    async def resolve(host, port):
        raise error

    with pytest.raises(MediaUnreachable, match="cannot be found"):
        fetch(answer(), host="media.test", resolve=resolve)


def test_the_systems_resolver_gives_every_address():
    assert "127.0.0.1" in asyncio.run(resolve_host("127.0.0.1", 80))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_counted(status):
    async def handler(request):
        left = int(request.path[1:])
        if left == 0:
            return web.Response(body=b"end")
        return web.Response(status=status, headers={"Location": f"/{left - 1}"})

    assert fetch(handler, "/5") == b"end"
    with pytest.raises(MediaUnreachable, match="more than 5 times"):
        fetch(handler, "/6")


@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("http://169.254.169.254/latest/meta-data", (InvalidUrl, ForbiddenAddress)),
        ("http://localhost:{port}/x", ForbiddenAddress),
        ("http://127.0.0.2:{port}/x", ForbiddenAddress),
        ("http://[::1]:{port}/x", ForbiddenAddress),
        ("http://[::ffff:127.0.0.1]:{port}/x", ForbiddenAddress),
        ("http://2130706433:{port}/x", InvalidUrl),
        ("http://127.0.0.1:22/x", InvalidUrl),
        ("http://user@127.0.0.1:{port}/x", InvalidUrl),
        ("file:///etc/passwd", InvalidUrl),
        ("gopher://127.0.0.1:{port}/x", InvalidUrl),
    ],
)
def test_every_hop_is_judged(location, error):
    async def resolve(host, port):
        return ["127.0.0.1", "::1"] if host == "localhost" else [host]

    async def main():
        async def handler(request):
            return web.Response(status=302, headers={"Location": location.format(port=server.port)})

        async with Server(handler) as server:
            with pytest.raises(error):
                await server.fetcher(resolve=resolve).fetch(server.url(), 100)
            assert len(server.requests) == 1

    asyncio.run(main())


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 410, 429, 500, 503])
def test_other_answers_are_unreachable_media(status):
    with pytest.raises(MediaUnreachable, match=str(status)):
        fetch(answer(status=status))


def test_redirect_without_a_target():
    with pytest.raises(MediaUnreachable, match="302"):
        fetch(answer(status=302))


def test_empty_body():
    with pytest.raises(InvalidMedia, match="empty"):
        fetch(answer(body=b""))


def test_a_stated_length_over_the_cap_is_refused_unread():
    async def never_sends(request):
        response = web.StreamResponse()
        response.content_length = 101
        await response.prepare(request)
        await asyncio.sleep(1)
        return response

    with pytest.raises(MediaTooLarge):
        fetch(never_sends, max_bytes=100, total_s=0.5)
    assert fetch(answer(body=b"x" * 100), max_bytes=100) == b"x" * 100


def test_an_endless_body_is_cut_at_the_cap():
    sent = 0

    async def handler(request):
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            sent += 65536

    with pytest.raises(MediaTooLarge):
        fetch(handler, max_bytes=1 << 20)
    assert sent < 32 << 20  # what the sockets had room for


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_slow_host_meets_the_deadline(where):
    async def handler(request):
        if where == "head":
            await asyncio.sleep(1)
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)

    async def main():
        async with Server(handler) as server:
            start = time.monotonic()
            with pytest.raises(MediaTimeout) as caught:
                await server.fetcher(total_s=0.3).fetch(server.url(), 100_000)
            assert caught.value.status == 504
            assert time.monotonic() - start < 0.9

    asyncio.run(main())


def test_the_deadline_counts_over_all_hops():
    async def handler(request):
        await asyncio.sleep(0.25)
        return web.Response(status=302, headers={"Location": "/"})

    with pytest.raises(MediaTimeout):
        fetch(handler, total_s=0.6)


def test_a_lying_length_is_unreachable_media():
    async def main():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        fetcher = HttpFetcher(allowed_networks=[LOOPBACK], allowed_ports=[port])
        async with server:
            with pytest.raises(MediaUnreachable):
                await fetcher.fetch(f"http://127.0.0.1:{port}/", 100)

    asyncio.run(main())


@pytest.mark.parametrize(
    "raw",
    [b"", b"\r\n", b"SSH-2.0-OpenSSH\r\n", b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n",
     b"HTTP/1.1 200 OK\r\n" + b"A: b" * 20000, b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_unreachable_media(raw):
    async def main():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        fetcher = HttpFetcher(allowed_networks=[LOOPBACK], allowed_ports=[port], total_s=5)
        async with server:
            with pytest.raises(MediaUnreachable):
                await fetcher.fetch(f"http://127.0.0.1:{port}/", 100)

    asyncio.run(main())


def test_a_closed_port_is_unreachable_media():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    fetcher = HttpFetcher(allowed_networks=[LOOPBACK], allowed_ports=[port])
    with pytest.raises(MediaUnreachable):
        asyncio.run(fetcher.fetch(f"http://127.0.0.1:{port}/", 100))


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress)],
)
def test_compressed_answers_are_read_and_capped_by_what_they_become(encoding, compress):
    handler = answer(body=compress(b"x" * 300_000), headers={"Content-Encoding": encoding})
    assert fetch(handler) == b"x" * 300_000
    bomb = answer(body=compress(bytes(50 << 20)), headers={"Content-Encoding": encoding})
    with pytest.raises(MediaTooLarge):
        fetch(bomb)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "aws-chunked"])
def test_other_encodings_are_refused(encoding):
    with pytest.raises(MediaUnreachable, match="encoding"):
        fetch(answer(body=b"abc", headers={"Content-Encoding": encoding}))


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b"x" * 1000)[:-9], b"\x1f\x8b"])
def test_broken_compression_is_the_hosts_fault(body):
    with pytest.raises((MediaUnreachable, InvalidMedia)):
        fetch(answer(body=body, headers={"Content-Encoding": "gzip"}))


@pytest.mark.skipif(which("openssl") is None, reason="needs the openssl command")
def test_tls_checks_the_urls_name_on_the_pinned_address(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout",
         str(key), "-out", str(cert), "-subj", "/CN=media.test", "-addext",
         "subjectAltName=DNS:media.test"],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(cert, key)
    names = []
    server_side.sni_callback = lambda connection, name, context: names.append(name)
    trusting = ssl.create_default_context(cafile=str(cert))

    async def resolve(host, port):
        return ["127.0.0.1"]

    async def main():
        async with Server(answer(body=b"abc"), server_side) as server:
            fetcher = server.fetcher(resolve=resolve, ssl_context=trusting)
            url = server.url(host="media.test", scheme="https")
            assert await fetcher.fetch(url, 100) == b"abc"
            with pytest.raises(MediaUnreachable):
                await fetcher.fetch(server.url(host="other.test", scheme="https"), 100)
            with pytest.raises(MediaUnreachable):
                await server.fetcher(resolve=resolve).fetch(url, 100)

    asyncio.run(main())
    assert names[:2] == ["media.test", "other.test"]


def item(url=None, data=None, modality="image"):
    return MediaItem(modality, MediaSource(url=url, data=data))


def test_the_same_url_is_fetched_once_and_every_item_gets_it():
    async def handler(request):
        await asyncio.sleep(0.02)
        return web.Response(body=request.path.encode())

    async def main():
        async with Server(handler) as server:
            items = [item(server.url(f"/{i % 3}")) for i in range(200)]
            fetched = await server.fetcher().fetch_all(items, small_limits())
            assert [medium.data for medium in fetched] == [b"/%d" % (i % 3) for i in range(200)]
            assert len(server.requests) == 3

    asyncio.run(main())


def test_one_failure_stops_the_other_fetches():
    stopped = asyncio.Event()

    async def handler(request):
        if request.path == "/bad":
            return web.Response(status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x")
                await asyncio.sleep(0.02)
        finally:
            stopped.set()

    async def main():
        async with Server(handler) as server:
            items = [item(server.url("/slow")), item(server.url("/bad"))]
            with pytest.raises(MediaUnreachable):
                await asyncio.wait_for(server.fetcher().fetch_all(items, small_limits()), 5)
            await asyncio.wait_for(stopped.wait(), 5)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["url", "data", "data url"])
def test_bytes_are_capped_per_item_and_per_request(kind):
    def make(server, i):
        body = bytes([i]) * 60
        if kind == "data":
            return item(data=body)
        if kind == "url":
            return item(server.url(f"/{i}"))
        return item("data:;base64," + base64.b64encode(body).decode())

    async def handler(request):
        return web.Response(body=bytes([int(request.path[1:])]) * 60)

    async def main():
        async with Server(handler) as server:
            fetcher = server.fetcher()
            two = [make(server, 1), make(server, 2)]
            assert len(await fetcher.fetch_all(two, small_limits(request_bytes=120))) == 2
            with pytest.raises(MediaTooLarge, match="together"):
                await fetcher.fetch_all(two, small_limits(request_bytes=119))
            with pytest.raises(MediaTooLarge, match="a medium"):
                await fetcher.fetch_all(two, small_limits(image_bytes=59))
            # Each source counts once.
            one = [make(server, 1)] * 5
            assert len(await fetcher.fetch_all(one, small_limits(request_bytes=60))) == 5

    asyncio.run(main())


def test_clips_have_another_cap_by_url_than_inline():
    limits = small_limits(video_bytes=1, video_url_bytes=2, image_bytes=3)
    assert limits.byte_cap(item("DATA:,x", modality="video")) == 1
    assert limits.byte_cap(item(data=b"x", modality="video")) == 1
    assert limits.byte_cap(item("http://host/", modality="video")) == 2
    assert limits.byte_cap(item("http://host/")) == 3


def rewrap(text: str, width: int, newline: str) -> str:
    return newline.join(text[i : i + width] for i in range(0, len(text), width))


@settings(deadline=None)
@given(
    data=st.binary(min_size=1, max_size=200),
    width=st.integers(1, 80),
    newline=st.sampled_from(["", "\n", "\r\n", " ", "%0A", "\t"]),
    padded=st.booleans(),
    url_safe=st.booleans(),
    head=st.sampled_from(
        ["image/png;base64", "IMAGE/PNG;BASE64", ";base64", "video/mp4;charset=utf-8;Base64",
         "nonsense;base64", "image/png; base64"]
    ),
    scheme=st.sampled_from(["data:", "DATA:", "Data:"]),
)  # fmt: skip
def test_base64_is_read_as_clients_write_it(data, width, newline, padded, url_safe, head, scheme):
    text = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    text = rewrap(text if padded else text.rstrip("="), width, newline)
    assert decode_data_url(f"{scheme}{head},{text}", 1000) == data


@pytest.mark.parametrize("text", ["!", "AAAAA", "A", "AA=A", "AAA*", "ÄÄÄÄ", "AAAA%00", "A===A"])
def test_corrupt_base64_is_invalid_media(text):
    with pytest.raises(InvalidMedia, match="corrupt"):
        decode_data_url(f"data:image/png;base64,{text}", 1000)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_data_url_is_read_or_refused(text):
    for url in ("data:" + text, "data:;base64," + text, "data:," + text):
        try:
            assert decode_data_url(url, 1000)
        except GatewayError as error:
            assert error.status < 500


@pytest.mark.parametrize(("url", "error"), [("data:", InvalidUrl), ("data:,", InvalidMedia)])
def test_empty_data_urls(url, error):
    with pytest.raises(error):
        decode_data_url(url, 10)


def test_data_urls_without_base64_and_their_cap():
    assert decode_data_url("data:text/plain,a%20b%FF", 10) == b"a b\xff"
    encoded = base64.b64encode(b"x" * 11).decode()
    for url in (f"data:;base64,{encoded}", "data:," + "x" * 11, "data:," + "x" * 10_000):
        with pytest.raises(MediaTooLarge):
            decode_data_url(url, 10)


@pytest.mark.parametrize("bytes_a_time", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_escapes_are_read_wherever_they_stand(bytes_a_time, before):
    """Long texts are read in pieces; an escape is in one of them."""
    text = "y" * before + ("%41%4z%" + "x" * bytes_a_time) * 30_000
    assert decode_data_url("data:," + text, 10**6) == unquote_to_bytes(text)


@pytest.mark.parametrize("piece", ["%41", "AA%0A", "A ", "AAAA\n", "AA %20", "-_-_"])
@pytest.mark.parametrize("head", ["", ";base64"])
def test_no_spelling_of_a_data_url_takes_more_memory_than_a_few_copies(piece, head):
    url = f"data:{head}," + piece * (4_000_000 // len(piece) // 4 * 4)
    tracemalloc.start()
    try:
        decode_data_url(url, len(url))
        assert tracemalloc.get_traced_memory()[1] < 5 * len(url)
    finally:
        tracemalloc.stop()


def test_base64_length_is_the_bytes_length():
    assert decode_base64(base64.b64encode(bytes(range(256)))) == bytes(range(256))


def test_the_connection_resolves_no_host_but_the_one_that_was_checked():
    pinned = _Pinned("media.example", ["192.0.2.7"])
    (found,) = asyncio.run(pinned.resolve("MEDIA.example.", 443))
    assert (found["host"], found["port"]) == ("192.0.2.7", 443)
    with pytest.raises(OSError):
        asyncio.run(pinned.resolve("other.example", 443))
