"""Which URLs and addresses are refused, as whole kinds."""

import ipaddress
import socket

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("aiohttp")

from yarl import URL

from examples.m3_serving.gateway.addresses import (
    check_addresses,
    is_public,
    parse_url,
    redirect_target,
)
from examples.m3_serving.gateway.errors import ForbiddenAddress, GatewayError, InvalidUrl

PRIVATE = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32",
    "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4",
    "240.0.0.0/4",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.0", "100.63.255.255"]
v4_private = st.sampled_from(PRIVATE).map(ipaddress.ip_network).flatmap(
    lambda network: st.integers(0, network.num_addresses - 1).map(lambda i: network[i])
)  # fmt: skip


@settings(deadline=None)
@given(v4_private)
def test_no_special_address_is_public(address):
    assert not is_public(address)


@settings(deadline=None)
@given(st.ip_addresses(v=4) | v4_private)
def test_addresses_inside_ipv6_are_never_public(address):
    value = int(address)
    for embedded in (
        value,  # compatible
        0xFFFF << 32 | value,  # mapped
        0xFFFF << 48 | value,  # translated
        0x64_FF9B << 96 | value,  # NAT64
        0x64_FF9B_0001 << 80 | value,  # local NAT64
        0x2002 << 112 | value << 80,  # 6to4
        0x2001 << 112 | value ^ 0xFFFFFFFF,  # Teredo
    ):
        assert not is_public(ipaddress.IPv6Address(embedded))


@settings(deadline=None)
@given(st.ip_addresses(v=6) | st.ip_addresses(v=4))
def test_what_python_calls_special_is_not_public(address):
    if not address.is_global or address.is_multicast:
        assert not is_public(address)


@pytest.mark.parametrize(
    "text",
    ["::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
     "fec0::1", "100::1", "5f00::1", "3fff::1", "2606:4700::1%1"],
)  # fmt: skip
def test_special_ipv6_is_not_public(text):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", [*PUBLIC, "2606:4700:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses_pass(text):
    assert check_addresses("host", [text]) == [text]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PUBLIC), max_size=4), v4_private, st.integers(0, 4))
def test_one_private_address_among_public_ones_is_enough(public, private, place):
    addresses = [*public[:place], str(private), *public[place:]]
    with pytest.raises(ForbiddenAddress) as caught:
        check_addresses("host", addresses)
    assert str(private) not in caught.value.message.replace("'host'", "")


@pytest.mark.parametrize("addresses", [[], ["nonsense"], [""]])
def test_no_usable_address_is_refused(addresses):
    with pytest.raises(ForbiddenAddress):
        check_addresses("host", addresses)


def test_allowed_networks_open_themselves_only():
    networks = [ipaddress.ip_network("127.0.0.1/32")]
    assert check_addresses("host", ["127.0.0.1"], networks) == ["127.0.0.1"]
    for other in ("127.0.0.2", "::1", "::ffff:127.0.0.1", "10.0.0.1"):
        with pytest.raises(ForbiddenAddress):
            check_addresses("host", [other], networks)


def forms_of(address: ipaddress.IPv4Address) -> list[str]:
    """How else resolvers let one write an IPv4 address."""
    value, parts = int(address), address.packed
    return [
        str(value),
        hex(value),
        f"0{value:o}",
        ".".join(hex(part) for part in parts),
        ".".join(f"0{part:o}" for part in parts),
        f"{parts[0]}.{value & 0xFFFFFF}",
        f"{parts[0]}.{parts[1]}.{value & 0xFFFF}",
        f"0X{value:X}",
        f"{address}.",
        f"{parts[0]:03o}.{parts[1]}.{parts[2]}.0x{parts[3]:x}",
    ]


@settings(deadline=None)
@given(st.ip_addresses(v=4), st.integers(0, 9), st.sampled_from(["http", "https"]))
def test_other_spellings_of_addresses_are_refused(address, form, scheme):
    with pytest.raises(InvalidUrl):
        spelling = forms_of(address)[form]
        parse_url(f"{scheme}://{spelling}/a.png")
        # "0.0.0.0." apart, nothing above may be the plain form, which is judged as an address.
        assert spelling == str(address)
        raise InvalidUrl("plain form")


@settings(deadline=None)
@given(v4_private)
def test_plain_literals_are_parsed_and_then_judged(address):
    url = parse_url(f"http://{address}/a.png")
    with pytest.raises(ForbiddenAddress):
        check_addresses(str(url.raw_host), [str(url.raw_host)])


@pytest.mark.parametrize("host", ["①②⑦.⓪.⓪.①", "１２７.0.0.1", "127。0。0。1", "１27.1"])
def test_digits_of_other_scripts_are_no_way_round(host):
    try:
        url = parse_url(f"http://{host}/")
    except InvalidUrl:
        return
    with pytest.raises(ForbiddenAddress):
        check_addresses(str(url.raw_host), [str(url.raw_host)])


@pytest.mark.parametrize(
    "url",
    [
        "", "image.png", "/etc/passwd", "//host/a.png", "file:///etc/passwd", "ftp://host/a",
        "gopher://host/", "ws://host/", "javascript:alert(1)", "blob:http://host/1", "http:",
        "http://", "http:///a", "http://?", "https://:443/", "http://good@evil/", "http://@evil/",
        "http://u:p@evil/", "http://good\\@evil/", "http://good\\.evil/", "http://ho st/",
        " http://host/", "http://host/\n", "http://host/\r\nX: y", "http://ho\x00st/",
        "http://host:22/", "http://host:0/", "http://host:65536/", "http://host:99999999999/",
        "http://host:-1/", "http://host:abc/", "http://host:8080/", "http://[::1", "http://[bad]/",
        "http://[fe80::1%25eth0]/", "http://%31%32%37.0.0.1/", "http://ho%2fst/",
        "http://" + "a" * 9000 + "/", "http://host/" + "a" * 9000, "http://256.1.1.1/",
        "http://1.2.3/", "http://1.2.3.4.5/", "http://0x/", "http://host.0x7f/",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url):
    with pytest.raises(GatewayError) as caught:
        parse_url(url)
    assert caught.value.status == 400


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text):
    for url in (text, "http://" + text, "http://host/" + text, "http://host:" + text):
        try:
            parsed = parse_url(url)
        except InvalidUrl:
            continue
        assert parsed.scheme in ("http", "https") and parsed.port in (80, 443)
        assert str(parsed.raw_host).isascii()


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://example.com/a.png", "example.com"),
        ("HTTPS://EXAMPLE.com:443/a%2Fb?sig=%2B%2f&x=1", "example.com"),
        ("http://example.com./a", "example.com."),
        ("http://bücher.example/ä.png", "xn--bcher-kva.example"),
        ("http://[2606:4700::1]/", "2606:4700::1"),
        ("http://1.1.1.1/", "1.1.1.1"),
    ],
)
def test_urls_that_pass(url, host):
    assert str(parse_url(url).raw_host).lower() == host


def test_a_signed_url_stays_as_written():
    text = "https://example.com/a%2Fb%20c?sig=%2B%2f%3d&x=~'"
    assert str(parse_url(text)) == text


def test_the_ports_of_the_operator_count():
    assert parse_url("http://host:8080/", {8080}).port == 8080
    with pytest.raises(InvalidUrl):
        parse_url("http://host/", {8080})


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://host/", "http://u@host/", "http://host:22/", "\\\\evil\\a",
     "http://0x7f.1/", "http://2130706433/", "//u@evil/", "http://[::1", "data:image/png,x",
     "http://host/ a"],
)  # fmt: skip
def test_redirects_are_judged_like_first_urls(location):
    with pytest.raises(InvalidUrl):
        redirect_target(URL("http://host/a"), location, {80, 443})


def test_redirects_may_be_relative_but_not_leave_tls():
    base = URL("https://host/a/b?c")
    assert str(redirect_target(base, "../d.png", {443})) == "https://host/d.png"
    assert str(redirect_target(base, "//other/e#f", {443})) == "https://other/e"
    with pytest.raises(InvalidUrl, match="https to http"):
        redirect_target(base, "http://host/", {80, 443})


def test_the_systems_resolver_reads_the_spellings_that_are_refused():
    """Why they are: otherwise the list above would guard against nothing."""
    assert socket.inet_aton("0x7f.1") == socket.inet_aton("2130706433") == b"\x7f\0\0\1"
