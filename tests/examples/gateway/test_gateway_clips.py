"""Clips: what is opened at all, real times, rotation, budgets, damage."""

import io
import random
import re
import wave
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("av")
pytest.importorskip("PIL")

import av
from gateway_media import FAMILY, GEOMETRY, GOLDEN, clip_bytes, image_bytes, pattern
from PIL import Image

from examples.m3_serving.gateway.decode_video import decode_frames, probe_clip
from examples.m3_serving.gateway.errors import GatewayError, InvalidMedia, MediaTooLarge
from examples.m3_serving.gateway.job_spec import make_job
from examples.m3_serving.gateway.jobs import run_job
from examples.m3_serving.gateway.pixels import PatchWriter
from examples.m3_serving.gateway.protocols import MediaOptions
from examples.m3_serving.gateway.sampling import SpacedSampler

PIXELS, FRAMES = FAMILY.limits.frame_pixels, FAMILY.limits.source_frames


def probe(data: bytes):
    return probe_clip(data, PIXELS, FRAMES)


def frames_of(data: bytes, indices=None) -> list[np.ndarray]:
    found = probe(data)
    wanted = range(len(found.ticks)) if indices is None else indices
    return list(decode_frames(data, found, wanted, PIXELS))


def run(data: bytes, fps=None, keep_last=False, **limits):
    options = MediaOptions(fps=fps)
    sampler = replace(FAMILY.sampler(options), keep_last=keep_last)
    limits = replace(FAMILY.limits, **limits)
    sizing = FAMILY.sizing("video", options)
    return run_job(data, make_job("video", GEOMETRY, sizing, sampler, limits))


def counted(count: int, height: int = 48, width: int = 64):
    """Frames that say their number by their brightness."""
    for i in range(count):
        yield np.full((height, width, 3), i % 256, np.uint8)


@pytest.mark.parametrize("name", "ACDF")
def test_golden_clips_end_to_end(name):
    """Encoded without loss, decoded, sampled, patched: the rows of the frames themselves."""
    case = next(case for case in GOLDEN["videos"] if case["name"] == name)
    rate = Fraction(case["src_fps"])
    data = clip_bytes((pattern(*case["src_hw"], t) for t in range(case["frames"])), rate)
    meta, patches = run(data, fps=case["fps"])
    assert meta["indices"] == case["indices"] and meta["grid"] == case["grid_thw"]
    assert meta["timestamps"] == [index / case["src_fps"] for index in case["indices"]]
    writer = PatchWriter(len(case["indices"]), *case["resized_hw"], GEOMETRY)
    for i, index in enumerate(case["indices"]):
        writer.put(i, pattern(*case["src_hw"], index))
    np.testing.assert_array_equal(patches, writer.finish())


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "webm", "avi"])
@pytest.mark.parametrize("rate", [Fraction(30), Fraction(30000, 1001), Fraction(25)])
def test_containers_give_exact_times_at_a_constant_rate(container, rate):
    codec = "libvpx-vp9" if container == "webm" else "mpeg4"
    data = clip_bytes(counted(40), rate, container=container, codec=codec, pix_fmt="yuv420p")
    found = probe(data)
    assert found.times == tuple(float(i / rate) for i in range(40))
    decoded = frames_of(data)
    assert len(decoded) == 40
    brightness = [frame.mean() for frame in decoded]
    assert all(abs(value - i * 255 / 255) < 12 for i, value in enumerate(brightness))


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_b_frames_come_in_presentation_order(container):
    frames = (np.full((48, 64, 3), 4 * i, np.uint8) for i in range(60))
    data = clip_bytes(frames, 30, container=container, codec="libx264", pix_fmt="yuv420p")
    with av.open(io.BytesIO(data)) as file:
        decode_order = [packet.pts for packet in file.demux(video=0) if packet.size]
    # AVI keeps no presentation times, and those that FFmpeg makes up are ascending but wrong.
    assert container == "avi" or decode_order != sorted(decode_order)
    levels = [frame.mean() for frame in frames_of(data, range(0, 60, 3))]
    np.testing.assert_allclose(levels, range(0, 240, 12), atol=3)


def test_variable_rate_uses_presentation_times():
    pts = [round(1000 * i / 30) for i in range(30)] + [1000 + 1000 * i for i in range(10)]
    data = clip_bytes(counted(40), 30, pts=pts, time_base=Fraction(1, 1000))
    meta, _ = run(data, fps=1)
    assert meta["indices"] == [0, *range(30, 40)]
    assert meta["timestamps"] == [0.0, *(float(s) for s in range(1, 11))]
    for index, frame in zip(meta["indices"], frames_of(data, meta["indices"]), strict=True):
        assert (frame == index).all()


def test_times_count_from_the_first_frame():
    pts = [5000 + 100 * i for i in range(5)]
    data = clip_bytes(counted(5), 10, pts=pts, time_base=Fraction(1, 1000))
    assert probe(data).times == (0.0, 0.1, 0.2, 0.3, 0.4)


def test_length_is_counted_where_the_container_does_not_say():
    data = clip_bytes(counted(17))
    with av.open(io.BytesIO(data)) as file:
        assert file.streams.video[0].frames == 0
    assert len(probe(data).ticks) == 17


@pytest.mark.parametrize("rotation", [0, 90, 180, 270, -90])
def test_rotation_is_applied_once_before_sizes(rotation):
    source = pattern(64, 112)
    data = clip_bytes([source] * 3, container="mp4", codec="libx264rgb", pix_fmt="rgb24")
    plain = frames_of(data)[0]
    turned = clip_bytes(
        [source] * 3, container="mp4", codec="libx264rgb", pix_fmt="rgb24", rotation=rotation
    )
    with av.open(io.BytesIO(turned)) as file:
        # FFmpeg's angle is counter-clockwise, as numpy's.
        quarter_turns = round(next(file.decode(video=0)).rotation / 90)
    assert quarter_turns % 4 == (rotation // 90) % 4
    expected = np.rot90(plain, quarter_turns)
    found = probe(turned)
    assert (found.height, found.width) == expected.shape[:2]
    np.testing.assert_array_equal(frames_of(turned)[0], expected)


@pytest.mark.parametrize(
    ("matrix", "change"),
    [
        ((-1, 0, 0, 1), lambda x: x[:, ::-1]),
        ((1, 0, 0, -1), lambda x: x[::-1]),
        ((0, 1, 1, 0), lambda x: x.transpose(1, 0, 2)),
        ((0, -1, -1, 0), lambda x: x[::-1, ::-1].transpose(1, 0, 2)),
        ((0, 1, -1, 0), lambda x: np.rot90(x, -1)),
    ],
)
def test_mirrored_display_matrices(matrix, change):
    one, w = 1 << 16, 1 << 30
    a, b, c, d = (one * value for value in matrix)
    options = {"container": "mp4", "codec": "libx264rgb", "pix_fmt": "rgb24"}
    source = [pattern(64, 112)] * 2
    plain = frames_of(clip_bytes(source, **options))[0]
    data = clip_bytes(source, matrix=[a, b, 0, c, d, 0, 0, 0, w], **options)
    np.testing.assert_array_equal(frames_of(data)[0], change(plain))


SECRET = pattern(32, 32, 3)


@pytest.mark.parametrize(
    "script",
    [
        "ffconcat version 1.0\nfile {path}\n",
        "ffconcat version 1.0\nfile 'file:{path}'\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{path}\n#EXT-X-ENDLIST\n",
        "concat:{path}|{path}",
        "subfile,,start,0,end,0,,:{path}",
        "file:{path}",
        "{path}",
        "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><BaseURL>{path}"
        "</BaseURL></MPD>",
        "[InternetShortcut]\nURL=file://{path}\n",
    ],
)
def test_bytes_that_name_a_file_do_not_open_it(tmp_path, script):
    path = tmp_path / "secret.mkv"
    path.write_bytes(clip_bytes([SECRET] * 3))
    with pytest.raises(InvalidMedia):
        run(script.format(path=path).encode())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "TIFF", "WEBP"])
def test_images_are_no_clips(kind):
    with pytest.raises(InvalidMedia):
        run(image_bytes(pattern(40, 40), kind))


def audio_only(container: str, cover: bool = False) -> bytes:
    """Silence, with or without a cover picture."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream("aac", rate=8000, layout="mono")
        if cover:
            add_cover(file)
        for i in range(10):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 8000, 1024 * i
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def add_cover(file) -> None:
    stream = file.add_stream("mjpeg", rate=1)
    stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
    stream.disposition = av.stream.Disposition.attached_pic
    picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 200, np.uint8), format="rgb24")
    picture.pts = 0
    file.mux(stream.encode(picture))
    file.mux(stream.encode())


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_sound_alone_is_no_clip(container):
    with pytest.raises(InvalidMedia, match="no video stream"):
        run(audio_only(container))


def test_sound_with_a_cover_picture_is_no_clip():
    data = audio_only("mp4", cover=True)
    with av.open(io.BytesIO(data)) as file:
        assert len(file.streams.video) == 1
    with pytest.raises(InvalidMedia, match="no video stream"):
        run(data)


def test_a_wave_file_is_no_clip():
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))
    with pytest.raises(InvalidMedia):
        run(out.getvalue())


def with_cover(film: int) -> bytes:
    """A film of so many frames at 30 a second, and a cover picture."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        add_cover(file)
        for i, pixels in enumerate(counted(film)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = i
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def test_cover_art_is_not_the_clip():
    data = with_cover(12)
    with av.open(io.BytesIO(data)) as file:
        attached = av.stream.Disposition.attached_pic
        assert any(stream.disposition & attached for stream in file.streams.video)
    found = probe(data)
    assert (found.width, found.height, len(found.ticks)) == (64, 48, 12)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"<html>", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI "]
)
def test_what_is_no_clip_is_invalid_media(data):
    with pytest.raises(InvalidMedia):
        run(data)


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"ffconcat version 1.0\nfile a.mkv\n",
        image_bytes(pattern(40, 40), "PNG"),
        b"\0\0\0\x18ftypisom",
    ],
)
def test_what_cannot_be_opened_is_told_what_could(data):
    """In words of this server's, without FFmpeg's name for bytes that have none."""
    with pytest.raises(InvalidMedia, match="not a readable clip of MP4, MOV, MKV") as caught:
        run(data)
    assert "none" not in caught.value.message


def test_what_ffmpeg_says_is_told_without_its_numbers():
    """An index that is whole, and packets that are not what it says."""
    damaged = MP4[: MP4.index(b"mdat") + 4] + bytes(MP4.index(b"moov") - MP4.index(b"mdat") - 8)
    damaged += MP4[MP4.index(b"moov") - 4 :]
    with pytest.raises(InvalidMedia) as caught:
        run(damaged)
    assert not re.search(r"Errno|none|\d{4}", caught.value.message)


MP4 = clip_bytes(counted(60), 30, container="mp4", codec="mpeg4", pix_fmt="yuv420p")
MKV = clip_bytes(pattern(48, 64, t) for t in range(60))


def test_a_file_without_its_index_is_invalid_media():
    assert b"moov" in MP4
    with pytest.raises(InvalidMedia):
        run(MP4[: MP4.rindex(b"moov")])
    with pytest.raises(InvalidMedia):
        run(MP4.replace(b"moov", b"abcd"))


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9, 0.99])
def test_a_clip_cut_short_is_not_a_shorter_clip(kept, tmp_path):
    data = clip_bytes(
        (pattern(48, 64, t) for t in range(60)),
        container="mp4",
        codec="mpeg4",
        pix_fmt="yuv420p",
        options={"movflags": "faststart"},
        out=tmp_path / "clip.mp4",  # its index is moved in front, which needs a real file
    )
    assert data.index(b"moov") < data.index(b"mdat")
    start = data.index(b"mdat") + 4
    with pytest.raises(InvalidMedia):
        run(data[: start + int(kept * (len(data) - start))])
    with av.open(io.BytesIO(data)) as file:
        ends = [packet.pos + packet.size for packet in file.demux(video=0) if packet.size]
    with pytest.raises(InvalidMedia, match="cut short"):
        run(data[: ends[int(kept * len(ends)) - 1]])  # exactly after a frame
    avi = clip_bytes(counted(60), container="avi", codec="mpeg4", pix_fmt="yuv420p")
    for whole in (MKV, avi):
        with pytest.raises(InvalidMedia, match="cut short"):
            run(whole[: int(kept * len(whole))])
        with pytest.raises(InvalidMedia, match="cut short"):
            run(whole[:-1])


@pytest.mark.parametrize("data", [MP4, MKV], ids=["mp4", "mkv"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_damaged_bytes_never_raise_anything_else(data, seed):
    rng = random.Random(seed)
    damaged = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.5 else data)
    for _ in range(rng.randint(0, 20)):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    try:
        meta, patches = run(bytes(damaged), fps=5)
        assert np.prod(meta["grid"]) == len(patches)
    except GatewayError as error:
        assert 400 <= error.status < 500


@pytest.mark.parametrize(("count", "temporal"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_short_and_odd_clips_repeat_the_last_frame(count, temporal):
    meta, patches = run(clip_bytes(counted(count, 56, 56), 1), fps=1)
    assert meta["grid"] == [temporal, 4, 4]
    per_frame = patches.reshape(temporal, 16, 3, 2, 196)
    shown = [int(per_frame[i // 2, 0, 0, i % 2, 0]) for i in range(2 * temporal)]
    assert shown == [min(i, count - 1) for i in range(2 * temporal)]


def test_keep_last_keeps_the_last_frame():
    data = clip_bytes(counted(15), 30)
    assert run(data, fps=1)[0]["indices"] == [0]
    assert run(data, fps=1, keep_last=True)[0]["indices"] == [0, 14]


def test_budgets_are_judged_before_decoding(monkeypatch):
    def never(*arguments):
        raise AssertionError("decoded")

    monkeypatch.setattr("examples.m3_serving.gateway.jobs.decode_frames", never)
    data = clip_bytes(counted(60), 1)
    size = FAMILY.sizing("video", MediaOptions()).size(48, 64)
    pixels = 60 * size[0] * size[1]
    with pytest.raises(AssertionError, match="decoded"):
        run(data, video_pixels=pixels)
    with pytest.raises(MediaTooLarge, match="60 frames"):
        run(data, video_pixels=pixels - 1)
    with pytest.raises(MediaTooLarge, match="59 frames"):
        run(data, source_frames=59)
    with pytest.raises(MediaTooLarge, match="64 x 48"):
        run(data, frame_pixels=64 * 48 - 1)


def test_frames_are_decoded_one_at_a_time():
    """The generator must not run ahead of whoever resizes."""
    data = clip_bytes(counted(30))
    frames = decode_frames(data, probe(data), range(30), PIXELS)
    for i in range(5):
        assert (next(frames) == i).all()
    frames.close()


@pytest.mark.parametrize("size", [(47, 63), (1, 64), (3, 5)])
def test_odd_sizes_decode_completely(size):
    data = clip_bytes([pattern(*size)] * 2)
    np.testing.assert_array_equal(frames_of(data)[0], pattern(*size))


def changing_size(sizes: list[tuple[int, int]]) -> bytes:
    """Motion JPEG whose frames have their own sizes; the container states the first."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("mjpeg", rate=1)
        stream.height, stream.width = sizes[0]
        stream.pix_fmt = "yuvj420p"
        file.start_encoding()
        for i, (height, width) in enumerate(sizes):
            picture = Image.fromarray(np.full((height, width, 3), 40 * i + 40, np.uint8))
            packet = av.Packet(image_bytes(picture, "JPEG", subsampling=2))
            packet.stream, packet.time_base = stream, Fraction(1, 1)
            packet.pts = packet.dts = i
            packet.is_keyframe = True
            file.mux(packet)
    return out.getvalue()


def test_frames_that_change_their_size_are_each_resized_and_each_judged():
    data = changing_size([(48, 64), (96, 128), (30, 20)])
    assert [frame.shape[:2] for frame in frames_of(data)] == [(48, 64), (96, 128), (30, 20)]
    meta, patches = run(data, fps=1)
    assert meta["grid"] == [2, 4, 4]
    levels = patches.reshape(2, 16, 3, 2, 196).mean((1, 2, 4))
    np.testing.assert_allclose(levels, [[40, 80], [120, 120]], atol=2)
    with pytest.raises(MediaTooLarge, match="128 x 96"):
        run(data, fps=1, frame_pixels=64 * 48)


def test_a_gif_is_a_clip_with_its_own_delays():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    frames = [Image.new("RGB", (64, 48), colour) for colour in colours]
    data = image_bytes(
        frames[0], "GIF", save_all=True, append_images=frames[1:], duration=[500, 1500, 300]
    )
    assert probe(data).times == (0.0, 0.5, 2.0)
    for frame, colour in zip(frames_of(data), colours, strict=True):
        assert (frame == colour).all()
    assert run(data, fps=1)[0]["indices"] == [0, 2]


def test_a_transparent_gif_shows_white():
    image = Image.new("RGBA", (64, 48), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 48))
    other = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    data = image_bytes(image, "GIF", save_all=True, append_images=[other], duration=500)
    first = frames_of(data)[0]
    assert (first[:, 40:] == 255).all() and (first[:, :24] == (255, 0, 0)).all()


@pytest.mark.parametrize(("alpha", "shown"), [(0, 255), (128, 137), (255, 20)])
def test_a_clips_alpha_is_composited_on_white(alpha, shown):
    pixels = np.full((48, 64, 4), 20, np.uint8)
    pixels[..., 3] = alpha
    (frame,) = frames_of(clip_bytes([pixels], pix_fmt="bgra"))
    assert frame.shape == (48, 64, 3) and set(np.unique(frame)) == {shown}


@pytest.mark.parametrize(
    ("pix_fmt", "codec"), [("yuv420p10le", "ffv1"), ("yuv444p", "ffv1"), ("gray", "ffv1")]
)
def test_other_pixel_formats_become_rgb(pix_fmt, codec):
    level = np.full((48, 64, 3), 120, np.uint8)
    (frame,) = frames_of(clip_bytes([level], pix_fmt=pix_fmt, codec=codec))
    assert frame.shape == level.shape and np.abs(frame.astype(int) - 120).max() <= 2


@pytest.mark.parametrize("matrix", ["ITU709", "ITU601"])
@pytest.mark.parametrize("full_range", [False, True])
def test_tagged_matrix_and_range_are_used(matrix, full_range):
    """Pure red is another triple in each; read with the wrong one it is off by tens of levels."""
    red = (0.2126, 0.0722) if matrix == "ITU709" else (0.299, 0.114)
    y, cb, cr = red[0], -red[0] / (2 * (1 - red[1])), 0.5
    if full_range:
        values = [round(255 * y), round(128 + 255 * cb), min(255, round(128 + 255 * cr))]
    else:
        values = [round(16 + 219 * y), round(128 + 224 * cb), round(128 + 224 * cr)]
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("ffv1", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv444p"
        stream.codec_context.colorspace = 1 if matrix == "ITU709" else 5
        stream.codec_context.color_range = 2 if full_range else 1
        planes = np.stack([np.full((48, 64), value, np.uint8) for value in values])
        frame = av.VideoFrame.from_ndarray(planes, format="yuv444p", channel_last=False)
        frame.colorspace = 1 if matrix == "ITU709" else 5
        frame.color_range = 2 if full_range else 1
        frame.pts = 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    (shown,) = frames_of(out.getvalue())
    assert np.abs(shown.astype(int) - (255, 0, 0)).max() <= 4


def test_the_sampler_sees_the_same_times_as_the_stamps():
    data = clip_bytes(counted(50), 25)
    assert SpacedSampler(2).choose(probe(data).times) == run(data, fps=2)[0]["indices"]
