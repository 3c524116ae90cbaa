"""Media inside the request: data URLs, read as tolerantly as clients write them."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from .errors import InvalidMedia, InvalidUrl, MediaTooLarge

_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_PIECE_CHARS = 1 << 16


def is_data_url(url: str) -> bool:
    """Whether it carries its medium in itself."""
    return url[:5].lower() == "data:"


def decode_base64(text: bytes) -> bytes:
    """Bytes from base64 with or without padding, line breaks and the URL-safe letters.

    Raises:
        InvalidMedia: other characters, or cut inside a byte.
    """
    compact = text.translate(_URL_SAFE, delete=_WHITESPACE).rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidMedia(f"the data URL's base64 is corrupt: {error}") from error


def _unquoted(text: str) -> bytes:
    """Bytes of text with escapes, piece by piece: the library makes an object of every escape."""
    data, at = bytearray(), 0
    while at < len(text):
        end = at + _PIECE_CHARS
        escape = text.rfind("%", end - 2, end)  # one that the end would cut
        end = end if escape < 0 else escape
        data += unquote_to_bytes(text[at:end])
        at = end
    return bytes(data)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a data URL. Its MIME type is ignored: the bytes themselves say what they are.

    Raises:
        InvalidUrl: no comma.
        InvalidMedia: corrupt or empty.
        MediaTooLarge: more than max_bytes.
    """
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise InvalidUrl("a data URL must have a comma before its data")
    is_base64 = head.rpartition(";")[2].strip().lower() == "base64"
    # Refused before anything is copied: escapes are at most 3 characters a byte, base64 4/3.
    if len(body) > 4 * max_bytes + 1024:
        raise MediaTooLarge(f"a medium may have {max_bytes} bytes, this one has more")
    raw = _unquoted(body)
    data = decode_base64(raw) if is_base64 else raw
    if not data:
        raise InvalidMedia("the data URL is empty")
    if len(data) > max_bytes:
        raise MediaTooLarge(f"a medium may have {max_bytes} bytes, got {len(data)}")
    return data
