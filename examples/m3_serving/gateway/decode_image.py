"""From untrusted bytes to one RGB image. Runs in a child process only.

What is decided here, once: only the formats of the allow-list are tried (Pillow knows dozens, one
of which starts a PostScript interpreter); the pixel cap applies to the header, before anything is
allocated; the EXIF orientation is applied before sizes are used; transparency is composited on
white before the resize; of an animation the first frame is the image. Colour profiles are ignored,
as the reference processor does.
"""

import io
import warnings
from contextlib import contextmanager

import numpy as np
from PIL import Image

from .errors import GatewayError, InvalidMedia, MediaTooLarge
from .protocols import ImageProbe

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1", b"avif", b"avis")


@contextmanager
def _as_invalid_media():
    """Whatever a parser throws at hostile bytes is the bytes' fault.

    Pillow alone raises OSError, SyntaxError, ValueError, struct.error, EOFError, IndexError and
    more for them, and nothing but parsing happens inside.
    """
    try:
        yield
    except GatewayError:
        raise
    except MemoryError as error:
        raise MediaTooLarge("decoding the image needs more memory than it may take") from error
    except Image.DecompressionBombError as error:
        raise MediaTooLarge(f"the image has too many pixels: {error}") from error
    except Exception as error:
        raise InvalidMedia(f"the image cannot be decoded: {error}") from error


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """The image with its header read, its size checked, its pixels not yet decoded."""
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        raise InvalidMedia(f"HEIC and AVIF are not accepted; send one of {', '.join(FORMATS)}")
    with warnings.catch_warnings():
        # Pillow warns of large images; the cap below is the answer to those.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.UnidentifiedImageError as error:
            raise InvalidMedia(f"not a readable image of {', '.join(FORMATS)}") from error
    if image.width * image.height > max_pixels:
        raise MediaTooLarge(
            f"an image may have {max_pixels} pixels, got {image.width} x {image.height}"
        )
    return image


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1 where the EXIF block is missing, damaged or says something else."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except MemoryError:
        raise
    except Exception:
        # Viewers show an image whose EXIF block is broken, unrotated.
        return 1
    return value if value in _ORIENTATIONS else 1


def probe_image(data: bytes, max_pixels: int) -> ImageProbe:
    """Size as shown, from the header where the format keeps the orientation there.

    Raises:
        InvalidMedia, MediaTooLarge.
    """
    with _as_invalid_media(), _open(data, max_pixels) as image:
        width, height = image.size
        if _orientation(image) >= 5:
            width, height = height, width
        return ImageProbe(width=width, height=height)


def _sixteen_bit_to_rgb(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow would clip at 255: the high byte, as for 16-bit colour."""
    values = np.asarray(image).astype(np.int64)
    grey = (np.clip(values, 0, 65535) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image of any mode as RGB; what is transparent shows white."""
    if image.mode.startswith("I"):
        return _sixteen_bit_to_rgb(image)
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        # Premultiplied modes have no direct way to RGB.
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(data: bytes, max_pixels: int) -> np.ndarray:
    """The image as shown.

    Args:
        data: the file.
        max_pixels: width * height above which it is refused unread.

    Returns:
        [h, w, 3] uint8 RGB.

    Raises:
        InvalidMedia: not an accepted format, damaged or cut short.
        MediaTooLarge: more pixels or memory than allowed.
    """
    with _as_invalid_media(), _open(data, max_pixels) as image:
        image.load()
        orientation = _orientation(image)
        rgb = to_rgb(image)
        if orientation != 1:
            rgb = rgb.transpose(_ORIENTATIONS[orientation])
        return np.asarray(rgb)
