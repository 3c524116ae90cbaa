"""The skeleton's vocabulary: what passes between its parts, and what each part promises.

    MediaItem --fetch--> Fetched --decode, sample, size, patch (child process)--> Decoded
      --key--> PreparedItem --expand (with the text)--> ExpandedPrompt
      --WorkerClient--> GeneratedTokens, one message after the other

Nothing here knows a model. A model family is one object (`ModelFamily`) that says which policies,
limits and brackets it uses; a medium's bytes are only ever parsed in a child process (`pool.py`).
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from .errors import GatewayError

Modality = Literal["image", "video"]

Hold = Callable[[int], None]
"""Told of bytes that a request makes the server hold, as they come; may raise GatewayError."""


def hold_nothing(count: int) -> None:
    """The `Hold` of who does not count."""


@dataclass(frozen=True)
class MediaSource:
    """Where a medium comes from: exactly one of the two."""

    url: str | None = None
    """http, https or data URL"""
    data: bytes | None = None

    def __post_init__(self) -> None:
        """ValueError unless exactly one is given."""
        if (self.url is None) == (self.data is None):
            raise ValueError("exactly one of url and data must be given")


@dataclass(frozen=True)
class MediaOptions:
    """What the request says about one medium, unchecked; the family checks when it reads them."""

    detail: Any = None
    fps: Any = None
    """frames a second to look at, clips only"""
    max_long_side_pixel: Any = None


@dataclass(frozen=True)
class MediaItem:
    """One image or clip of a request, in the order of the prompt."""

    modality: Modality
    source: MediaSource
    options: MediaOptions = field(default_factory=MediaOptions)
    param: str | None = None
    """the request's field it stands in, for error messages"""

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Errors inside say that they are about this item."""
        try:
            yield
        except GatewayError as error:
            if self.param is not None:
                error.param = f"{self.param}.{error.param}" if error.param else self.param
            raise


@dataclass(frozen=True)
class MediaLimits:
    """What a request may ask for. Bytes are those of the medium itself, not of its base64."""

    max_images: int
    max_videos: int
    image_bytes: int
    video_bytes: int
    """of a clip inside the request"""
    video_url_bytes: int
    """of a clip behind a URL"""
    request_bytes: int
    """of all media of a request together, each source counted once"""
    image_pixels: int
    """width * height of an image's file"""
    frame_pixels: int
    """width * height of a clip's file"""
    source_frames: int
    """frames in a clip's file"""
    video_pixels: int
    """sampled frames * resized width * resized height"""

    def byte_cap(self, item: MediaItem) -> int:
        """Bytes this item may have."""
        if item.modality == "image":
            return self.image_bytes
        url = item.source.url
        inline = url is None or url[:5].lower() == "data:"
        return self.video_bytes if inline else self.video_url_bytes


@dataclass(frozen=True)
class Fetched:
    """A medium's bytes."""

    data: bytes
    digest: str
    """SHA-256 of data, hex"""


@dataclass(frozen=True)
class ImageProbe:
    """What an image's header says."""

    width: int
    """pixels, after orientation"""
    height: int
    """pixels, after orientation"""


@dataclass(frozen=True)
class ClipProbe:
    """What a clip's packets say, known before more than one frame is decoded."""

    width: int
    """pixels, after rotation"""
    height: int
    """pixels, after rotation"""
    ticks: tuple[int, ...]
    """presentation times in the stream's own unit, ascending, one a frame"""
    times: tuple[float, ...]
    """the same in seconds after the first frame"""


class SizingPolicy(Protocol):
    """From a source size to the size the model sees."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels, each a multiple of the model's alignment.

        Raises:
            InvalidMedia: the shape is refused.
        """

    def to_dict(self) -> dict[str, Any]:
        """Name and numbers, JSON-ready: part of the content key, and how a child gets it."""


class FrameSampler(Protocol):
    """Which frames of a clip the model sees."""

    def choose(self, times: Sequence[float]) -> list[int]:
        """Indices of frames, ascending, never twice the same.

        Args:
            times: presentation times in seconds, ascending, not empty.
        """

    def to_dict(self) -> dict[str, Any]:
        """Name and numbers, JSON-ready."""


@dataclass(frozen=True)
class PatchGeometry:
    """How frames are cut into rows.

    A family's is that of clips; an image's rows hold one frame (`job_spec.make_job`).
    """

    patch: int
    """side of a patch, pixels"""
    merge: int
    """patches a side that share one token"""
    temporal: int
    """frames a patch spans"""

    @property
    def alignment(self) -> int:
        """Pixels: both sides of a frame are a multiple of it."""
        return self.patch * self.merge

    @property
    def row_width(self) -> int:
        """Numbers in a row: channel, frame, y, x."""
        return 3 * self.temporal * self.patch**2


class PixelProcessor(Protocol):
    """From RGB frames to rows of patches."""

    grid: tuple[int, int, int]
    """[T, gh, gw] in patches"""

    def put(self, index: int, frame: np.ndarray) -> None:
        """Resizes and stores one frame, [h, w, 3] uint8 RGB; frames may come in any size."""

    def finish(self) -> np.ndarray:
        """[T * gh * gw, row_width] uint8, once every frame was put."""


class Decoder(Protocol):
    """Parses untrusted bytes. Runs in a child process only."""

    def __call__(self, data: bytes, job: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """(what was found, patches [rows, row_width] uint8 of the job's geometry)."""


@dataclass(frozen=True)
class Decoded:
    """What a child returns for one medium, checked by the pool."""

    patches: np.ndarray
    """[rows, row_width] uint8 of the job's geometry"""
    grid: tuple[int, int, int]
    """[T, gh, gw] in patches; rows = T * gh * gw"""
    indices: tuple[int, ...]
    """sampled frames; (0,) for an image"""
    timestamps: tuple[float, ...]
    """seconds, one a sampled frame; (0.0,) for an image"""
    processor: str
    """versions of everything that decides the pixels"""


@dataclass(frozen=True)
class PreparedItem:
    """A medium ready for the worker."""

    modality: Modality
    content_key: str
    """hex; equal keys mean equal tensors"""
    patches: np.ndarray
    """[rows, row_width] uint8, C order: the payload on the wire; a row of an image has one frame"""
    grid: tuple[int, int, int]
    """[T, gh, gw] in patches"""
    tokens: int
    """placeholder tokens: rows / merge**2"""
    timestamps: tuple[float, ...]
    """seconds, one a sampled frame"""
    placeholders: tuple[tuple[int, int], ...] = ()
    """(offset, length) in the expanded prompt, in tokens; filled by expansion"""


class MediaFetcher(Protocol):
    """From sources to bytes."""

    async def fetch_all(
        self, items: Sequence[MediaItem], limits: MediaLimits, hold: Hold = hold_nothing
    ) -> list[Fetched]:
        """Bytes of every item, in order; a source named twice is fetched once."""


class Tokenizer(Protocol):
    """What expansion needs of a tokenizer."""

    special_tokens: Mapping[str, int]
    """every string that the tokenizer turns into one id of its own, and that id"""

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ordinary text: special strings in it are spelled out, nothing is added."""


@dataclass(frozen=True)
class TemplateText:
    """Text of the chat template; special strings in it are special tokens."""

    text: str


@dataclass(frozen=True)
class UserText:
    """Text of the request; special strings in it are only text."""

    text: str


@dataclass(frozen=True)
class MediaSlot:
    """The place of a medium; `index` counts the request's media in order, from 0."""

    index: int


PromptPart = TemplateText | UserText | MediaSlot


@dataclass(frozen=True)
class Special:
    """One special token by its string."""

    token: str


@dataclass(frozen=True)
class Pads:
    """`count` times one special token, each to be replaced by a row of the tower's output."""

    token: str
    count: int


@dataclass(frozen=True)
class Stamp:
    """Ordinary text inside a medium's tokens, encoded on its own."""

    text: str


MediaPiece = Special | Pads | Stamp


@dataclass(frozen=True)
class ExpandedPrompt:
    """A prompt as the worker reads it."""

    token_ids: list[int]
    items: list[PreparedItem]
    """in the order of the prompt, placeholders filled"""


class ModelFamily(Protocol):
    """Everything the gateway knows about one kind of model."""

    model_type: str
    """as in the checkpoint's config.json"""
    geometry: PatchGeometry
    limits: MediaLimits
    placeholder_tokens: tuple[str, ...]
    """special tokens that stand for rows of the tower's output: of images, of clips"""
    bracket_tokens: tuple[str, ...]
    """the other special tokens that `pieces` uses: before a block of rows, after it"""
    chat_template: str
    """Jinja, for checkpoints that bring none"""

    def sizing(self, modality: Modality, options: MediaOptions) -> SizingPolicy:
        """The policy for one medium. Raises InvalidParameter."""

    def sampler(self, options: MediaOptions) -> FrameSampler:
        """The policy for one clip. Raises InvalidParameter."""

    def pieces(self, item: PreparedItem) -> list[MediaPiece]:
        """What stands in the prompt for one medium."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose tokens; None means the worker's default (greedy)."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """What a worker is asked for."""

    request_id: str
    prompt: ExpandedPrompt
    max_new_tokens: int
    sampling: SamplingOptions = SamplingOptions()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GeneratedTokens:
    """One message of the answer stream."""

    token_ids: tuple[int, ...]
    """new since the last message"""
    finish_reason: Literal["stop", "length"] | None = None
    """set in the last message only"""
    cached_tokens: int = 0
    """prompt tokens found in the prefix cache, set in the first message"""


@dataclass(frozen=True)
class WorkerHealth:
    """What is known of one worker."""

    name: str
    ready: bool
    running: int
    """requests it computes"""
    waiting: int
    """requests it has queued"""
    reason: str = ""
    """why it is not ready"""


class WorkerClient(Protocol):
    """The way to the processes that generate."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedTokens]:
        """The answer as it comes. Closing the iterator cancels the request at the worker.

        How long a worker may be silent once it has the request is for whoever reads to decide.

        Raises:
            WorkerBusy: all workers are at their limit of bytes or requests.
            WorkerUnavailable: none is healthy.
            WorkerLost: the worker died under the request.
            WorkerRejected: it refused the request.
        """

    async def health(self) -> list[WorkerHealth]:
        """One entry a configured worker."""

    async def close(self) -> None:
        """Ends the connections; running requests are cancelled."""
