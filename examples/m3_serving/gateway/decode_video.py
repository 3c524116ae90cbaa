"""From untrusted bytes to RGB frames of a clip. Runs in a child process only.

FFmpeg guesses the format from the bytes, and some of its formats (concat scripts, playlists) name
other files to open. So it only gets bytes, never a path or URL, only the container formats listed
here, and no protocol through which it could open anything else.

Pixels: FFmpeg's own conversion to RGB with the frame's tagged matrix and range (BT.601 where
untagged), no tone mapping, no deinterlacing, square pixels assumed. Threads are off: the pool
already runs one child a core.
"""

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import av
import numpy as np
from av.stream import Disposition

from .errors import GatewayError, InvalidMedia, MediaTooLarge
from .protocols import ClipProbe
from .sampling import times_from_ticks

FORMATS = ("MP4", "MOV", "MKV", "WEBM", "AVI", "GIF")
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif"


@contextmanager
def _as_invalid_media():
    """Whatever the demuxer or decoder throws at hostile bytes is the bytes' fault."""
    try:
        yield
    except GatewayError:
        raise
    except MemoryError as error:
        raise MediaTooLarge("decoding the clip needs more memory than it may take") from error
    except av.FFmpegError as error:
        raise InvalidMedia(f"the clip cannot be decoded: {error.strerror}") from error
    except Exception as error:
        raise InvalidMedia(f"the clip cannot be decoded: {error}") from error


def stated_size(data: bytes) -> int | None:
    """Bytes that a Matroska or AVI file says it has; None if it does not say or is another.

    Their demuxers read up to wherever the bytes end and call that the end of the clip.
    """
    if data[:4] == b"RIFF":
        size = int.from_bytes(data[4:8], "little")
        return None if size in (0, 0xFFFFFFFF) else size + 8
    if data[:4] != b"\x1aE\xdf\xa3":
        return None
    header = _ebml_size(data, 4)
    if header is None:
        return None
    segment = header[1] + header[0]
    if data[segment : segment + 4] != b"\x18S\x80g":
        return None
    body = _ebml_size(data, segment + 4)
    return None if body is None else body[1] + body[0]


def _ebml_size(data: bytes, at: int) -> tuple[int, int] | None:
    """(size, where its content starts) from an EBML length; None if it is unknown or broken."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()  # the leading one's place says how many bytes there are
    if not 1 <= width <= 8:
        return None
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    unknown = value == (1 << 7 * width) - 1
    return None if unknown else (value, at + width)


def _open(data: bytes) -> av.container.InputContainer:
    try:
        return av.open(
            io.BytesIO(data),
            mode="r",
            container_options={"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"},
            metadata_errors="ignore",
        )
    except (av.InvalidDataError, av.ArgumentError) as error:  # no format's bytes, or another's
        raise InvalidMedia(
            f"not a readable clip of {', '.join(FORMATS)}, or its index is cut off"
        ) from error


def _video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """The first stream of moving pictures; cover art is a video stream too, but none of those."""
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise InvalidMedia("the clip's codec is not known")
            stream.codec_context.thread_count = 1
            return stream
    raise InvalidMedia("the file has no video stream")


def _check_frame_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaTooLarge(f"a clip's frame may have {max_pixels} pixels, got {width} x {height}")


def _display_matrix(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """(a, b, c, d): a pixel at (x, y) is shown at (a x + c y, b x + d y), each -1, 0 or 1."""
    side_data = frame.side_data.get("DISPLAYMATRIX")
    if side_data is None:
        return 1, 0, 0, 1
    values = struct.unpack("<9i", bytes(side_data)[:36])
    a, b, c, d = values[0], values[1], values[3], values[4]
    # The nearest of the eight orientations a pixel grid can have.
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return (1 if a >= 0 else -1), 0, 0, (1 if d >= 0 else -1)
    return 0, (1 if b >= 0 else -1), (1 if c >= 0 else -1), 0


def _orient(pixels: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """[h, w, 3] as shown, a view."""
    a, b, c, d = matrix
    if b:  # x runs along the shown y
        pixels = pixels.transpose(1, 0, 2)
        flip_x, flip_y = c < 0, b < 0
    else:
        flip_x, flip_y = a < 0, d < 0
    return pixels[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


def frame_to_rgb(frame: av.VideoFrame) -> np.ndarray:
    """[h, w, 3] uint8 RGB as shown: rotated and flipped, what is transparent shows white."""
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.reformat(format="rgba", threads=1).to_ndarray().astype(np.uint16)
        alpha = rgba[..., 3:]
        pixels = ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    else:
        pixels = frame.reformat(format="rgb24", threads=1).to_ndarray()
    return _orient(pixels, _display_matrix(frame))


def _presentation_ticks(
    container: av.container.InputContainer, stream: av.VideoStream, max_frames: int
) -> list[int]:
    """One tick a frame, ascending, by demuxing: what containers say of their length is a guess.

    Frames that an edit list hides are not counted. Where a container has no presentation time for
    some frames, decoding times serve for all: at a constant rate they are the same but for a shift.

    A file cut short is refused where it shows, here by its last packet or by an index that lists
    more: taken as a shorter clip, it would be answered about as if it were whole.
    """
    presentation: list[int | None] = []
    decoding: list[int | None] = []
    packets = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        packets += 1
        if packet.is_corrupt:
            raise InvalidMedia(f"the clip is cut short or damaged at packet {packets}")
        if packet.is_discard:
            continue
        presentation.append(packet.pts)
        decoding.append(packet.dts)
        if len(presentation) > max_frames:
            raise MediaTooLarge(f"a clip may have {max_frames} frames, this one has more")
    if container.format.name.startswith("mov") and packets < stream.frames:
        raise InvalidMedia(f"the clip is cut short: {packets} of {stream.frames} packets")
    ticks = presentation if None not in presentation else decoding
    if not ticks:
        raise InvalidMedia("the clip has no frame")
    if None in ticks:
        raise InvalidMedia("the clip has frames without a time")
    return sorted(set(ticks))  # two packets of one time are the fields of one frame


def probe_clip(data: bytes, max_frame_pixels: int, max_frames: int) -> ClipProbe:
    """Size and times of a clip; decodes its first frame only, which carries the rotation.

    Args:
        data: the file.
        max_frame_pixels: width * height above which it is refused.
        max_frames: frames in the file above which it is refused.

    Raises:
        InvalidMedia: not an accepted format, damaged, or without moving pictures.
        MediaTooLarge: more pixels, frames or memory than allowed.
    """
    size = stated_size(data)
    if size is not None and size > len(data):
        raise InvalidMedia(f"the clip is cut short: {len(data)} of {size} bytes")
    with _as_invalid_media(), _open(data) as container:
        stream = _video_stream(container)
        context = stream.codec_context
        _check_frame_pixels(context.width, context.height, max_frame_pixels)
        ticks = _presentation_ticks(container, stream, max_frames)
        rate, time_base = stream.average_rate, Fraction(stream.time_base)
    with _as_invalid_media(), _open(data) as container:
        stream = _video_stream(container)
        first = next(iter(container.decode(stream)), None)
        if first is None:
            raise InvalidMedia("the clip has no frame that can be decoded")
        width, height = first.width, first.height
        _check_frame_pixels(width, height, max_frame_pixels)
        if _display_matrix(first)[1]:
            width, height = height, width
    return ClipProbe(
        width=width,
        height=height,
        ticks=tuple(ticks),
        times=times_from_ticks(ticks, time_base, Fraction(rate) if rate else None),
    )


def decode_frames(
    data: bytes, probe: ClipProbe, indices: Sequence[int], max_frame_pixels: int
) -> Iterator[np.ndarray]:
    """The wanted frames one by one, [h, w, 3] uint8 RGB as shown.

    Args:
        data: the file.
        probe: of the same bytes.
        indices: into `probe.ticks`, ascending.
        max_frame_pixels: again for every frame, since a stream may change its size.

    Raises:
        InvalidMedia: damaged, or it ends before the last wanted frame.
    """
    wanted = [probe.ticks[index] for index in indices]
    found = 0
    with _as_invalid_media(), _open(data) as container:
        stream = _video_stream(container)
        # AVI keeps no presentation times. Its frames do come out in their order, but with those of
        # other frames on them where some are predicted from later ones.
        by_order = container.format.name == "avi"
        for position, frame in enumerate(container.decode(stream)):
            _check_frame_pixels(frame.width, frame.height, max_frame_pixels)
            if by_order:
                due = position >= indices[found]
            else:
                # At or after: a packet that shows nothing (a hidden reference frame) has a time.
                due = frame.pts is not None and frame.pts >= wanted[found]
            if not due:
                continue
            yield frame_to_rgb(frame)
            found += 1
            if found == len(wanted):
                return
        raise InvalidMedia(
            f"the clip is damaged or cut short: {found} of {len(wanted)} frames could be decoded"
        )
