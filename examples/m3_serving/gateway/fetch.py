"""Fetches media by URL for strangers, without becoming their way into the network behind it.

For every hop: the URL is parsed and checked, its host resolved once, every address checked, and
the connection made to those addresses and no other, with the URL's host as Host and TLS name. A
second look-up (which could answer differently) does not happen. Redirects are followed here, each
as a new hop. Time counts over all hops; bytes count as they arrive.
"""

import asyncio
import hashlib
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from .addresses import (
    DEFAULT_PORTS,
    IPNetwork,
    check_addresses,
    is_address,
    parse_url,
    redirect_target,
)
from .data_url import decode_data_url, is_data_url
from .errors import InvalidMedia, MediaTimeout, MediaTooLarge, MediaUnreachable
from .protocols import Fetched, Hold, MediaItem, MediaLimits, MediaSource, hold_nothing
from .tasks import gather_or_cancel

Resolve = Callable[[str, int], Awaitable[list[str]]]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 1 << 16
_HEADERS = {"Accept-Encoding": "identity", "Accept": "image/*, video/*, */*;q=0.1"}


# Look-ups cannot be cancelled: in threads of their own, slow name servers stop nothing else.
_LOOKUPS = ThreadPoolExecutor(16, "media-lookup")


async def resolve_host(host: str, port: int) -> list[str]:
    """All addresses of a host, as text, in the system's order of preference."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Pinned(AbstractResolver):
    """Answers for one host with addresses that were checked; knows no other."""

    def __init__(self, host: str, addresses: Sequence[str]) -> None:
        self._host, self._addresses = host, addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host.rstrip(".").lower() != self._host.rstrip(".").lower():
            raise OSError(f"{host!r} was not checked")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Holds nothing."""


class _Budget:
    """Counts a request's bytes over all its sources."""

    def __init__(self, limit: int, hold: Hold) -> None:
        self._limit, self._used, self._hold = limit, 0, hold

    def spend(self, count: int) -> None:
        self._hold(count)
        self._used += count
        if self._used > self._limit:
            raise MediaTooLarge(f"a request's media may have {self._limit} bytes together")


def _decompressor(response: aiohttp.ClientResponse) -> "zlib._Decompress | None":
    """For a server that compresses although asked not to."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32)
    raise MediaUnreachable(f"the host sent an encoding it was not asked for: {encoding!r}")


async def _decoded_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body in pieces; of a compressed one never more than is counted at a time."""
    inflate = _decompressor(response)
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        if inflate is None:
            yield chunk
            continue
        piece = b"-"
        while piece and not inflate.eof:  # it may hold back output without holding back input
            piece = inflate.decompress(chunk, _CHUNK_BYTES)
            yield piece
            chunk = inflate.unconsumed_tail
    if inflate is not None and not inflate.eof:
        raise InvalidMedia("the host's compressed answer is cut short")


class HttpFetcher:
    """The gateway's only way out to the network."""

    def __init__(
        self,
        *,
        total_s: float = 30.0,
        connect_s: float = 5.0,
        max_redirects: int = 5,
        concurrency: int = 8,
        allowed_ports: Collection[int] = DEFAULT_PORTS,
        allowed_networks: Collection[IPNetwork] = (),
        resolve: Resolve = resolve_host,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Settings of all requests.

        Args:
            total_s: seconds for one source, over all its hops.
            connect_s: seconds for one connection.
            max_redirects: hops after the first.
            concurrency: sources of one request fetched at a time.
            allowed_ports: of the URL.
            allowed_networks: reached although not public: one's own media store, or a test server.
            resolve: from (host, port) to all addresses.
            ssl_context: whom to trust, by default the system's authorities.
        """
        self._total_s, self._connect_s = total_s, connect_s
        self._max_redirects, self._concurrency = max_redirects, concurrency
        self._ports, self._networks = frozenset(allowed_ports), tuple(allowed_networks)
        self._resolve, self._ssl = resolve, ssl_context

    async def fetch_all(
        self, items: Sequence[MediaItem], limits: MediaLimits, hold: Hold = hold_nothing
    ) -> list[Fetched]:
        """Bytes of every item, in order; the same URL under the same cap is fetched once.

        Raises:
            GatewayError: of the first item that fails; the others are stopped.
        """
        budget = _Budget(limits.request_bytes, hold)
        gate = asyncio.Semaphore(self._concurrency)
        keys = [(item.source, limits.byte_cap(item)) for item in items]

        async def one(source: MediaSource, cap: int) -> Fetched:
            async with gate:
                if source.data is not None:
                    if len(source.data) > cap:
                        raise MediaTooLarge(f"a medium may have {cap} bytes, got more")
                    data = source.data
                    budget.spend(len(data))
                elif is_data_url(source.url):
                    data = await asyncio.to_thread(decode_data_url, source.url, cap)
                    budget.spend(len(data))
                else:
                    data = await self.fetch(source.url, cap, budget.spend)
            digest = await asyncio.to_thread(hashlib.sha256, data)
            return Fetched(data, digest.hexdigest())

        async def blamed(item: MediaItem, source: MediaSource, cap: int) -> Fetched:
            with item.blamed():
                return await one(source, cap)

        distinct = dict(zip(reversed(keys), reversed(items), strict=True))  # the first of a kind
        results = await gather_or_cancel(blamed(item, *key) for key, item in distinct.items())
        found = dict(zip(distinct, results, strict=True))
        return [found[key] for key in keys]

    async def fetch(
        self, url: str, max_bytes: int, spend: Callable[[int], None] = lambda count: None
    ) -> bytes:
        """The bytes behind an http or https URL.

        Args:
            url: as the client sent it.
            max_bytes: of the body after decompression.
            spend: told the size of every piece as it arrives; may raise.

        Raises:
            InvalidUrl, ForbiddenAddress, MediaUnreachable, MediaTooLarge, InvalidMedia.
            MediaTimeout: not done in `total_s`.
        """
        target = parse_url(url, self._ports)
        try:
            async with asyncio.timeout(self._total_s):
                return await self._follow(target, max_bytes, spend)
        except TimeoutError as error:
            raise MediaTimeout(
                f"the host of the media URL did not deliver within {self._total_s:g} s"
            ) from error

    async def _follow(self, url: URL, max_bytes: int, spend: Callable[[int], None]) -> bytes:
        for _ in range(self._max_redirects + 1):
            answer = await self._hop(url, max_bytes, spend)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise MediaUnreachable(f"the media URL redirects more than {self._max_redirects} times")

    async def _hop(self, url: URL, max_bytes: int, spend: Callable[[int], None]) -> bytes | URL:
        """The body, or where to go next."""
        host, port = str(url.raw_host), int(url.port or 0)
        try:
            literal = is_address(host)  # aiohttp would not ask the resolver below either
            addresses = [host] if literal else await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise MediaUnreachable(f"host {host!r} cannot be found") from error
        addresses = check_addresses(host, addresses, self._networks)
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(host, addresses),
            use_dns_cache=False,
            force_close=True,
            ssl=self._ssl or True,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=timeout,
                    headers=_HEADERS,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    trust_env=False,  # a proxy would resolve the name again
                ) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                return await self._read(url, response, max_bytes, spend)
        except asyncio.TimeoutError as error:
            raise MediaTimeout(f"host {host!r} did not accept a connection in time") from error
        except (aiohttp.ClientError, OSError, zlib.error, ValueError) as error:
            raise MediaUnreachable(
                f"host {host!r} did not deliver the medium: {type(error).__name__}"
            ) from error

    async def _read(
        self,
        url: URL,
        response: aiohttp.ClientResponse,
        max_bytes: int,
        spend: Callable[[int], None],
    ) -> bytes | URL:
        if response.status in _REDIRECTS and "Location" in response.headers:
            return redirect_target(url, response.headers["Location"], self._ports)
        if response.status != 200:
            raise MediaUnreachable(f"the host of the media URL answered {response.status}")
        too_large = MediaTooLarge(f"a medium may have {max_bytes} bytes, this one has more")
        if (response.content_length or 0) > max_bytes:
            raise too_large
        body = bytearray()
        async for piece in _decoded_chunks(response):
            spend(len(piece))
            body += piece
            if len(body) > max_bytes:
                raise too_large
        if not body:
            raise InvalidMedia("the media URL's answer is empty")
        return bytes(body)
