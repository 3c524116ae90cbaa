"""A request of the gateway as messages to a worker."""

from collections.abc import Iterator

import numpy as np

from ..errors import WorkerRejected
from ..protocols import GenerateRequest, PreparedItem
from . import worker_pb2 as pb
from .methods import CHUNK_BYTES, INLINE_BYTES, INLINE_TOTAL_BYTES, MAX_MESSAGE_BYTES, PROTOCOL

_MODALITIES = {"image": pb.MODALITY_IMAGE, "video": pb.MODALITY_VIDEO}


class Payload:
    """A request's patches, sorted into those that go inline and those that do not."""

    def __init__(self, items: list[PreparedItem]) -> None:
        """Takes small items inline, in order, as long as there is room for them."""
        self.bytes_of = [_bytes_of(item) for item in items]
        self.inline: set[int] = set()
        room = INLINE_TOTAL_BYTES
        for index, data in enumerate(self.bytes_of):
            if data.nbytes <= min(INLINE_BYTES, room):
                self.inline.add(index)
                room -= data.nbytes
        self.large = [i for i in range(len(items)) if i not in self.inline]

    def parts(self) -> list[memoryview]:
        """What does not go inline, in order: the content of a shared file."""
        return [self.bytes_of[index] for index in self.large]

    def chunks(self) -> Iterator[pb.Message]:
        """The same as messages."""
        for index in self.large:
            data = self.bytes_of[index]
            for offset in range(0, len(data), CHUNK_BYTES):
                part = bytes(data[offset : offset + CHUNK_BYTES])
                yield pb.Message(chunk=pb.Chunk(item=index, offset=offset, data=part))


def _bytes_of(item: PreparedItem) -> memoryview:
    if item.patches.dtype != np.uint8 or item.patches.ndim != 2:
        raise ValueError(f"patches must be uint8 in two dimensions, got {item.patches.dtype}")
    return memoryview(np.ascontiguousarray(item.patches)).cast("B")


def start_message(
    request: GenerateRequest, payload: Payload, shared_name: str | None
) -> pb.Message:
    """The first message.

    Args:
        request: of the gateway.
        payload: of its items.
        shared_name: the file that holds `payload.parts()`, or None: they follow in chunks.

    Raises:
        WorkerRejected: a number that does not fit its field, or a message too large for the wire.
    """
    sampling = request.sampling
    try:
        start = pb.Start(
            protocol=PROTOCOL,
            request_id=request.request_id,
            prompt=request.prompt.token_ids,
            max_new_tokens=request.max_new_tokens,
            sampling=pb.Sampling(
                temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed
            ),
            ignore_eos=request.ignore_eos,
        )
    except (ValueError, TypeError) as error:
        raise WorkerRejected(f"the request has a number no worker takes: {error}") from error
    offset = 0
    for index, item in enumerate(request.prompt.items):
        data = payload.bytes_of[index]
        message = start.items.add(
            modality=_MODALITIES[item.modality],
            content_key=item.content_key,
            dtype=pb.DTYPE_UINT8,
            shape=item.patches.shape,
            grid=item.grid,
            placeholders=[pb.Placeholders(offset=o, length=n) for o, n in item.placeholders],
        )
        if index in payload.inline:
            message.inline = bytes(data)
        elif shared_name is None:
            message.chunked.num_bytes = len(data)
        else:
            message.shared_memory.name = shared_name
            message.shared_memory.offset = offset
            message.shared_memory.num_bytes = len(data)
            offset += len(data)
    message = pb.Message(start=start)
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise WorkerRejected(
            f"prompt and description of the media must take at most {MAX_MESSAGE_BYTES} bytes on "
            f"the wire, got {message.ByteSize()}"
        )
    return message
