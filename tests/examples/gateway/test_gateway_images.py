"""Images: orientation, modes, transparency, size caps, and every kind of damage."""

import io
import random
import struct
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("av")
pytest.importorskip("PIL")

from gateway_media import FAMILY, GEOMETRY, MAX_PIXELS, image_bytes, pattern
from PIL import Image, ImageOps

from examples.m3_serving.gateway.decode_image import decode_image, probe_image
from examples.m3_serving.gateway.errors import GatewayError, InvalidMedia, MediaTooLarge
from examples.m3_serving.gateway.job_spec import make_job
from examples.m3_serving.gateway.jobs import run_job
from examples.m3_serving.gateway.pixels import PatchWriter
from examples.m3_serving.gateway.protocols import MediaOptions

WHITE = (255, 255, 255)


def decode(data: bytes) -> np.ndarray:
    return decode_image(data, MAX_PIXELS)


def run(data: bytes):
    sizing = FAMILY.sizing("image", MediaOptions())
    return run_job(data, make_job("image", GEOMETRY, sizing, None, FAMILY.limits))


def png(width: int, height: int, depth: int, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand, for what Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    out = b"\x89PNG\r\n\x1a\n"
    for name, body in [(b"IHDR", header), *chunks, (b"IEND", b"")]:
        crc = zlib.crc32(name + body)
        out += struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)
    return out


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once_before_sizes(kind, orientation):
    stored = Image.fromarray(pattern(42, 70))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_bytes(stored, kind, exif=exif, **({} if kind == "PNG" else {"quality": 95}))
    with Image.open(io.BytesIO(data)) as reopened:
        shown = np.asarray(ImageOps.exif_transpose(reopened).convert("RGB"))
    assert shown.shape == ((70, 42, 3) if orientation >= 5 else (42, 70, 3))
    np.testing.assert_array_equal(decode(data), shown)
    probe = probe_image(data, MAX_PIXELS)
    assert (probe.height, probe.width) == shown.shape[:2]


def test_orientation_decides_the_grid():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = image_bytes(pattern(308, 588), "JPEG", exif=exif)
    assert run(data)[0]["grid"] == [1, 42, 22]


@pytest.mark.parametrize("value", [0, 9, 255, 2**15])
def test_meaningless_orientations_mean_none(value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert decode(image_bytes(pattern(10, 20), "JPEG", exif=exif)).shape == (10, 20, 3)


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=50)
def test_broken_exif_does_not_cost_the_image(block):
    data = image_bytes(pattern(10, 20), "JPEG", exif=b"Exif\0\0" + block)
    assert decode(data).shape in ((10, 20, 3), (20, 10, 3))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("hidden", [(0, 0, 0), (255, 0, 0), (10, 20, 30)])
def test_what_is_transparent_shows_white(kind, hidden):
    image = Image.new("RGBA", (30, 20), (*hidden, 0))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert (decode(image_bytes(image, kind, **options)) == 255).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_every_kind_of_transparency_is_composited(mode):
    """Alpha channels, a palette's transparent entry, and a transparent colour (tRNS)."""
    if mode in ("RGBA", "LA"):
        pixel = (0, 0, 0, 0) if mode == "RGBA" else (0, 0)
        data = image_bytes(Image.new(mode, (4, 4), pixel))
    elif mode == "P":
        image = Image.new("P", (4, 4), 1)
        image.putpalette([9, 9, 9, 0, 0, 0])
        data = image_bytes(image, transparency=1)
    else:
        data = image_bytes(Image.new(mode, (4, 4)), transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert (decode(data) == 255).all()


def test_half_transparent_black_is_grey_and_composited_before_the_resize():
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 64))
    _, patches = run(image_bytes(image))
    # Resized with hidden black beside red, the edge would have dark samples in green and blue.
    green = patches.reshape(-1, 3, 196)[:, 0]
    assert green.min() >= 250
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert set(np.unique(decode(image_bytes(half)))) == {127}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (5, 4), 1), WHITE),
        (Image.new("1", (5, 4), 0), (0, 0, 0)),
        (Image.new("L", (5, 4), 77), (77, 77, 77)),
        (Image.new("I;16", (5, 4), 0xABCD), (0xAB, 0xAB, 0xAB)),
        (Image.new("I;16", (5, 4), 65535), WHITE),
        (Image.new("RGB", (5, 4), (1, 2, 3)), (1, 2, 3)),
    ],
)
def test_png_modes_become_rgb(image, expected):
    assert (decode(image_bytes(image)) == expected).all()


def test_sixteen_bit_grey_with_a_transparent_value():
    rows = zlib.compress(b"".join(b"\0" + struct.pack(">2H", 1000, 40000) for _ in range(2)))
    data = png(2, 2, 16, 0, (b"tRNS", struct.pack(">H", 1000)), (b"IDAT", rows))
    assert decode(data)[0].tolist() == [[255] * 3, [40000 >> 8] * 3]


def test_cmyk_jpeg_becomes_rgb():
    data = image_bytes(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(decode(data).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (12, 8), colour) for colour in [(255, 0, 0), (0, 255, 0), WHITE]]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = image_bytes(
        frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options
    )
    assert (decode(data) == (255, 0, 0)).all()


def test_of_a_multi_picture_jpeg_the_first_picture_counts():
    frames = [Image.new("RGB", (16, 16), colour) for colour in [(200, 0, 0), (0, 200, 0)]]
    data = image_bytes(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.abs(decode(data).astype(int) - (200, 0, 0)).max() <= 3


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "PPM", "ICO", "PCX", "TGA", "EPS", "PDF"])
def test_other_formats_are_refused(kind):
    with pytest.raises(InvalidMedia, match="PNG, JPEG, WEBP, GIF"):
        decode(image_bytes(pattern(32, 32), kind))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"<!DOCTYPE html><html></html>",
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"RIFF\x10\0\0\0WEBPVP8 ",
    ],
)
def test_what_is_no_image_is_invalid_media(data):
    with pytest.raises(InvalidMedia):
        decode(data)


@pytest.mark.parametrize("brand", [b"heic", b"mif1", b"avif"])
def test_phone_formats_get_a_clear_answer(brand):
    with pytest.raises(InvalidMedia, match="HEIC and AVIF"):
        decode(b"\0\0\0\x18ftyp" + brand + b"\0" * 40)


SAMPLES = {kind: image_bytes(pattern(64, 96), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}


@pytest.mark.parametrize("kind", SAMPLES)
@given(data=st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.data_too_large])
def test_cut_files_are_invalid_media(kind, data):
    whole = SAMPLES[kind]
    # What follows the pixels (PNG's IEND, JPEG's and GIF's last marker) may be missing.
    cut = data.draw(st.integers(0, len(whole) - 40))
    with pytest.raises(InvalidMedia):
        decode(whole[:cut])


@pytest.mark.parametrize("kind", SAMPLES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_damaged_bytes_never_raise_anything_else(kind, seed):
    rng = random.Random(seed)
    damaged = bytearray(SAMPLES[kind])
    for _ in range(rng.randint(1, 12)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    try:
        assert decode(bytes(damaged)).dtype == np.uint8
    except GatewayError as error:
        assert 400 <= error.status < 500


def test_padding_after_the_end_is_harmless():
    np.testing.assert_array_equal(decode(SAMPLES["JPEG"] + b"\0" * 1000), decode(SAMPLES["JPEG"]))


def test_pixels_are_capped_by_the_header():
    """A small file with many pixels must be refused without its pixels being touched."""
    bomb = image_bytes(Image.new("1", (13000, 13000)))
    assert len(bomb) < 30_000
    for function in (decode_image, probe_image):
        with pytest.raises(MediaTooLarge, match="13000 x 13000"):
            function(bomb, MAX_PIXELS)
    for side in (14000, 100_000, 2**31 - 1):
        with pytest.raises(GatewayError) as caught:
            decode(png(side, side, 8, 0, (b"IDAT", zlib.compress(b"\0"))))
        assert caught.value.status in (400, 413)
    exact = image_bytes(pattern(10, 20))
    assert decode_image(exact, 200).shape == (10, 20, 3)
    with pytest.raises(MediaTooLarge):
        decode_image(exact, 199)


def test_a_text_chunk_that_inflates_is_refused():
    text = b"Comment\0\0" + zlib.compress(b"a" * (200 << 20))
    data = png(1, 1, 8, 0, (b"zTXt", text), (b"IDAT", zlib.compress(b"\0\0")))
    with pytest.raises(GatewayError) as caught:
        decode(data)
    assert caught.value.status < 500


def test_zero_sides_are_refused():
    with pytest.raises(InvalidMedia):
        decode(png(0, 5, 8, 0, (b"IDAT", zlib.compress(b""))))


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (13, 14), (14, 15)])
def test_tiny_images_are_prepared(size):
    meta, patches = run(image_bytes(pattern(*size)))
    assert np.prod(meta["grid"]) == len(patches) >= 16


def test_a_row_has_the_one_frame():
    """Half of what a clip of that frame alone has, and the same pixels."""
    pixels = pattern(60, 100)
    meta, patches = run(image_bytes(pixels))
    _, gh, gw = meta["grid"]
    writer = PatchWriter(1, 14 * gh, 14 * gw, GEOMETRY)
    writer.put(0, pixels)
    frames = writer.finish().reshape(-1, 3, 2, 196)
    assert patches.shape == (gh * gw, 588)
    for frame in (0, 1):
        np.testing.assert_array_equal(patches.reshape(-1, 3, 196), frames[:, :, frame])


def test_long_thin_images_are_refused_before_decoding():
    header_only = png(201, 1, 8, 0)
    with pytest.raises(InvalidMedia, match="200 times"):
        run(header_only)
