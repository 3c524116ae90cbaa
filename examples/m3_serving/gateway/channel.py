"""Messages between the pool and its children over a socket pair: a JSON header and raw bytes.

A frame is two big-endian lengths (header 4 bytes, payload 8 bytes), the header, the payload.
"""

import asyncio
import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct(">IQ")
MAX_HEADER_BYTES = 16 << 20


class ChannelClosed(Exception):
    """The other side is gone, or does not keep to the format."""


def _parse_header(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ChannelClosed("the header is no JSON") from error
    if not isinstance(header, dict):
        raise ChannelClosed("the header is no object")
    return header


def _check_lengths(raw: bytes | bytearray, max_payload: int) -> tuple[int, int]:
    header_bytes, payload_bytes = _LENGTHS.unpack(raw)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_payload:
        raise ChannelClosed(f"a message of {header_bytes} + {payload_bytes} bytes is too long")
    return header_bytes, payload_bytes


def _packed(header: dict[str, Any], payload: memoryview) -> bytes:
    raw = json.dumps(header).encode()
    return _LENGTHS.pack(len(raw), payload.nbytes) + raw


def send(sock: socket.socket, header: dict[str, Any], payload: memoryview) -> None:
    """Sends one message, blocking (a child's side)."""
    sock.sendall(_packed(header, payload))
    sock.sendall(payload)


def receive(sock: socket.socket, max_payload: int) -> tuple[dict[str, Any], bytearray]:
    """Receives one message, blocking (a child's side). Raises ChannelClosed."""

    def read(count: int) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            got = sock.recv_into(view)
            if not got:
                raise ChannelClosed("end of stream")
            view = view[got:]
        return buffer

    header_bytes, payload_bytes = _check_lengths(read(_LENGTHS.size), max_payload)
    return _parse_header(read(header_bytes)), read(payload_bytes)


async def send_async(sock: socket.socket, header: dict[str, Any], payload: memoryview) -> None:
    """Sends one message (the pool's side; a non-blocking socket). Raises ChannelClosed."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, _packed(header, payload))
        await loop.sock_sendall(sock, payload)
    except OSError as error:
        raise ChannelClosed(str(error)) from error


async def receive_async(sock: socket.socket, max_payload: int) -> tuple[dict[str, Any], bytearray]:
    """Receives one message (the pool's side). Raises ChannelClosed."""
    loop = asyncio.get_running_loop()

    async def read(count: int) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                got = await loop.sock_recv_into(sock, view)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not got:
                raise ChannelClosed("end of stream")
            view = view[got:]
        return buffer

    header_bytes, payload_bytes = _check_lengths(await read(_LENGTHS.size), max_payload)
    return _parse_header(await read(header_bytes)), await read(payload_bytes)
