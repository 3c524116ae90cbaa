"""Kinds of media faults that no other file of these tests holds: colour files that say more than
their pixels, chunks that inflate, animations without delays, flags that decoders could act on.
"""

import io
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("PIL")

import av
from gateway_media import MAX_PIXELS, image_bytes, pattern
from PIL import Image, ImageCms

from examples.m3_serving.gateway.decode_image import decode_image
from examples.m3_serving.gateway.decode_video import decode_frames, probe_clip
from examples.m3_serving.gateway.errors import GatewayError, MediaTooLarge


def decode(data: bytes) -> np.ndarray:
    return decode_image(data, MAX_PIXELS)


def probe(data: bytes, frames: int = 1000):
    return probe_clip(data, 10**6, frames)


def frames_of(data: bytes) -> list[np.ndarray]:
    found = probe(data)
    return list(decode_frames(data, found, range(len(found.ticks)), 10**6))


# --- images ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("profile", ["srgb", "lab", "broken"])
def test_colour_profiles_are_ignored_and_cost_nothing(kind, profile):
    icc = {
        "srgb": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        "lab": ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes(),
        "broken": b"\xff" * 200,
    }[profile]
    plain = decode(image_bytes(pattern(40, 56), kind))
    np.testing.assert_array_equal(
        decode(image_bytes(pattern(40, 56), kind, icc_profile=icc)), plain
    )


@pytest.mark.parametrize("inks", [(200, 40, 90, 30), (0, 255, 255, 0), (10, 20, 30, 200)])
def test_the_other_coding_of_cmyk_jpegs_is_read_as_such(inks):
    """Adobe's marker says whether three of the components are inks or luminance and colour."""
    data = bytearray(image_bytes(Image.new("CMYK", (16, 16), inks), "JPEG", quality=100))
    assert data[data.find(b"Adobe") + 11] == 0
    expected = [(255 - ink) * (255 - inks[3]) / 255 for ink in inks[:3]]
    assert np.abs(decode(bytes(data)).astype(int) - expected).max() <= 4
    data[data.find(b"Adobe") + 11] = 2
    y, cb, cr, black = (255 - ink for ink in inks)
    rgb = (
        y + 1.402 * (cr - 128),
        y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
        y + 1.772 * (cb - 128),
    )
    expected = [(255 - min(max(value, 0), 255)) * black / 255 for value in rgb]
    assert np.abs(decode(bytes(data)).astype(int) - expected).max() <= 4


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize("name", ["zTXt", "iTXt", "iCCP"])
def test_no_chunk_beside_the_pixels_may_inflate(name):
    """Refused, or not inflated at all; never more memory than the image takes."""
    bomb = zlib.compress(b"a" * (200 << 20))
    head = {"zTXt": b"k\0\0", "iTXt": b"k\0\1\0\0\0", "iCCP": b"k\0\0"}[name]
    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(name.encode(), head + bomb)
    data += chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")
    try:
        assert decode(data).shape == (1, 1, 3)
    except GatewayError as error:
        assert error.status < 500


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_a_long_animation_one_frame_is_decoded(kind, monkeypatch):
    """Frame counts are no way to make an image expensive."""
    frames = [Image.fromarray(pattern(16, 16, t)) for t in range(60)]
    data = image_bytes(
        frames[0], kind, save_all=True, append_images=frames[1:], duration=20, lossless=True
    )
    loads = []
    from PIL import ImageFile

    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda self: (loads.append(self.tell()), load(self))[1]
    )
    shown = decode(data)
    assert shown.shape == (16, 16, 3) and set(loads) <= {0}


# --- clips ---


def test_a_gif_without_delays_shows_ten_frames_a_second():
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "green", "blue")]
    data = image_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=0)
    assert probe(data).times == (0.0, 0.1, 0.2)


def test_frames_in_the_file_are_counted_before_they_are_decoded():
    """A GIF of few bytes a frame can have very many."""
    frames = [Image.new("RGB", (8, 8), ("red", "blue")[t % 2]) for t in range(200)]
    data = image_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=20)
    assert len(probe(data, 200).ticks) == 200
    with pytest.raises(MediaTooLarge, match="199 frames"):
        probe(data, 199)


def flagged(set_flags, codec="ffv1", pix_fmt="yuv444p", picture=pattern) -> bytes:
    """A clip whose stream or frames say something of themselves."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pix_fmt
        set_flags(stream.codec_context, None)
        for i in range(3):
            frame = av.VideoFrame.from_ndarray(picture(48, 64, i), format="rgb24")
            frame = frame.reformat(format=pix_fmt)
            frame.pts = i
            set_flags(None, frame)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def nothing(context, frame):
    pass


def test_pixels_are_taken_as_square_whatever_the_file_says():
    def wide(context, frame):
        if context is not None:
            context.sample_aspect_ratio = Fraction(2, 1)

    form = {"codec": "mpeg4", "pix_fmt": "yuv420p"}
    plain, stretched = flagged(nothing, **form), flagged(wide, **form)
    with av.open(io.BytesIO(stretched)) as file:
        next(file.decode(video=0))
        assert file.streams.video[0].codec_context.sample_aspect_ratio == 2
    found = probe(stretched)
    assert (found.width, found.height) == (64, 48)
    for one, other in zip(frames_of(plain), frames_of(stretched), strict=True):
        np.testing.assert_array_equal(one, other)


def test_transfer_functions_of_hdr_change_no_pixel():
    """No tone mapping: the model sees the code values, as with the reference's decoders."""

    def hdr(context, frame):
        target = context or frame
        target.color_trc, target.color_primaries = 16, 9  # PQ, BT.2020

    plain, tagged = flagged(nothing), flagged(hdr)
    with av.open(io.BytesIO(tagged)) as file:
        assert file.streams.video[0].codec_context.color_trc == 16
    for one, other in zip(frames_of(plain), frames_of(tagged), strict=True):
        np.testing.assert_array_equal(one, other)


def test_interlaced_frames_come_woven_one_a_time():
    """Both fields of a frame at once: no deinterlacing, and no frame a field."""
    interlaced = 1 << 18 | 1 << 29  # the encoder's flags: transform and motion by fields

    def fields(context, frame):
        if context is not None:
            context.flags |= interlaced

    def woven(height, width, t):
        picture = np.full((height, width, 3), 60, np.uint8)
        picture[1::2] = 190
        return picture

    data = flagged(fields, "mpeg2video", "yuv420p", woven)
    with av.open(io.BytesIO(data)) as file:
        assert all(frame.interlaced_frame for frame in file.decode(video=0))
    shown = frames_of(data)
    assert len(shown) == 3
    for frame in shown:
        assert abs(frame[::2].mean() - 60) < 12 and abs(frame[1::2].mean() - 190) < 12
