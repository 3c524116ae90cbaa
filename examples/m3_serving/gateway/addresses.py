"""Which URLs and which addresses the gateway may talk to.

A URL is parsed once, by the library that will also send the request, so that what was checked and
what is asked cannot differ. A host is judged by the addresses it resolves to, all of them, never by
its name.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable

from yarl import URL

from .errors import ForbiddenAddress, InvalidUrl

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

DEFAULT_PORTS = frozenset({80, 443})
MAX_URL_CHARS = 8192

# Spelled out, since `is_global` differs between Python releases.
_SPECIAL_V4 = [
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier NAT, some clouds' metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's host agent on a public address
        "169.254.0.0/16",  # link-local, metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
]
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
# Inside the global range; most of these carry an IPv4 address that a router would unwrap.
_SPECIAL_V6 = [
    ipaddress.ip_network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
]
_LOOKS_NUMERIC = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


def is_public(address: IPAddress) -> bool:
    """Whether an address is one of the public internet's.

    IPv6 forms that embed an IPv4 address (mapped, compatible, translated, tunnelled) are not, even
    around a public one: nobody publishes them, and what they reach depends on the router.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    if address.scope_id is not None or address not in _GLOBAL_V6:
        return False
    return not any(address in network for network in _SPECIAL_V6)


def is_address(host: str) -> bool:
    """Whether a host is an address itself, in the one form per version that is accepted."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_addresses(
    host: str, addresses: Iterable[str], allowed_networks: Collection[IPNetwork] = ()
) -> list[str]:
    """The addresses, if each may be talked to.

    Args:
        host: for the message.
        addresses: as text, all that the host resolves to.
        allowed_networks: permitted although not public.

    Raises:
        ForbiddenAddress: one address may not, or there is none. The address is not named: it would
            tell a stranger how names resolve inside.
    """
    checked = []
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise ForbiddenAddress(f"host {host!r} has no usable address") from None
        if not is_public(address) and not any(address in network for network in allowed_networks):
            raise ForbiddenAddress(f"host {host!r} is not on the public internet")
        checked.append(str(address))
    if not checked:
        raise ForbiddenAddress(f"host {host!r} has no usable address")
    return checked


def check_url(url: URL, ports: Collection[int]) -> None:
    """Raises InvalidUrl unless scheme, user part, host and port are allowed."""
    if url.scheme not in ("http", "https"):
        raise InvalidUrl(f"a media URL must be http, https or data, got {url.scheme or 'none'!r}")
    if url.raw_user is not None or url.raw_password is not None or "@" in url.raw_authority:
        raise InvalidUrl("a media URL must not have a user part")
    host = url.raw_host
    if not host:
        raise InvalidUrl("a media URL must have a host")
    if url.port not in ports:
        allowed = ", ".join(map(str, sorted(ports)))
        raise InvalidUrl(f"a media URL's port must be one of {allowed}, got {url.port}")
    if "%" in host:
        raise InvalidUrl("a media URL's host must not have escapes or a zone")
    if ":" not in host and _LOOKS_NUMERIC.fullmatch(host.rstrip(".").rpartition(".")[2]):
        # Resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as addresses too.
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise InvalidUrl("an IPv4 address must be four decimal numbers") from None


def parse_url(text: str, ports: Collection[int] = DEFAULT_PORTS) -> URL:
    """A URL that may be asked, its host still to be resolved. Raises InvalidUrl."""
    if len(text) > MAX_URL_CHARS:
        raise InvalidUrl(f"a media URL may have {MAX_URL_CHARS} characters, got {len(text)}")
    if _UNSAFE.search(text):
        raise InvalidUrl("a media URL must not have spaces, control characters or backslashes")
    try:
        # Signed URLs are signed as written, so nothing already in ASCII is quoted anew.
        url = URL(text, encoded=text.isascii())
        check_url(url, ports)
        if url.raw_host is not None and not url.raw_host.isascii():
            raise InvalidUrl("a media URL's host cannot be written in ASCII")
        return url
    except (ValueError, UnicodeError) as error:
        raise InvalidUrl(f"the media URL cannot be parsed: {error}") from error


def redirect_target(url: URL, location: str, ports: Collection[int]) -> URL:
    """Where a redirect of `url` leads, checked like a first URL. Raises InvalidUrl."""
    if _UNSAFE.search(location) or len(location) > MAX_URL_CHARS:
        raise InvalidUrl("a redirect leads to a URL that cannot be parsed")
    try:
        target = url.join(URL(location, encoded=location.isascii()))
    except ValueError as error:
        raise InvalidUrl("a redirect leads to a URL that cannot be parsed") from error
    target = parse_url(str(target.with_fragment(None)), ports)
    if url.scheme == "https" and target.scheme != "https":
        raise InvalidUrl("a redirect must not lead from https to http")
    return target
