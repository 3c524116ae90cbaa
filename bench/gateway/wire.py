"""A photo's way from its decoder to a worker: its bytes, and the CPU time that they cost.

Decode pool and worker client are the gateway's, in a process without HTTP; the worker is that of
`examples/m3_serving`. Photos come one after the other and are all the same, so that the worker has
the features and pages of all but the first: what it spends is for the bytes and one short step.
"""

import asyncio
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.m3_serving.gateway.pool import DecodePool
from examples.m3_serving.gateway.protocols import (
    Decoded,
    ExpandedPrompt,
    GenerateRequest,
    PreparedItem,
)
from examples.m3_serving.gateway.wire.client import ClientOptions, GrpcWorkerClient

from .giveback import photo_job
from .processes import running, use_of

TRANSPORTS = {"shared memory": ClientOptions(), "messages": ClientOptions(shared_directory=None)}
_PAGE_TOKENS = 128
_WARM_UP = 3
"""photos"""


@dataclass(frozen=True)
class Result:
    """Of one transport; CPU times in milliseconds a photo."""

    transport: str
    num_bytes: int
    """of a photo's patches"""
    decoded_ms: float
    """of the gateway, until it has the patches"""
    sent_ms: float
    """of the gateway, until it has the answer"""
    worker_ms: float


def _request(decoded: Decoded, key: str, placeholder: int) -> GenerateRequest:
    """The patches in a prompt of whole pages and a token, which is all there is to compute."""
    tokens = len(decoded.patches) // 4
    item = PreparedItem(
        "image", key, decoded.patches, decoded.grid, tokens, decoded.timestamps, ((0, tokens),)
    )
    text = 1 + -tokens % _PAGE_TOKENS
    prompt = ExpandedPrompt([placeholder] * tokens + [1] * text, [item])
    return GenerateRequest("photo", prompt, max_new_tokens=1)


async def _measure(
    transport: str, photo: bytes, placeholder: int, address: str, worker: int, seconds: float
) -> Result:
    pool, client = DecodePool(1), GrpcWorkerClient([address], TRANSPORTS[transport])
    job, key = photo_job(), hashlib.sha256(photo).hexdigest()
    decoding, sending, num_bytes = [], [], 0

    async def one_photo() -> None:
        nonlocal num_bytes
        start = time.process_time()
        decoded = await pool.run(job, photo)
        decoding.append(time.process_time() - start)
        num_bytes = decoded.patches.nbytes
        async for _ in client.generate(_request(decoded, key, placeholder)):
            pass
        sending.append(time.process_time() - start - decoding[-1])

    try:
        for _ in range(_WARM_UP):
            await one_photo()
        decoding.clear()
        sending.clear()
        before, end = use_of(worker).own_cpu_s, time.perf_counter() + seconds
        while time.perf_counter() < end:
            await one_photo()
        spent = (use_of(worker).own_cpu_s - before) / len(sending)
    finally:
        await client.close()
        await pool.close()
    return Result(
        transport,
        num_bytes,
        1000 * statistics.median(decoding),
        1000 * statistics.median(sending),
        1000 * spent,
    )


def run(photo: bytes, model: Path, seconds: float, rounds: int) -> Iterator[Result]:
    """Each transport, in turns.

    Args:
        photo: a file with an image.
        model: a checkpoint with a vision tower.
        seconds: a measurement.
        rounds: measurements of each.
    """
    placeholder = json.loads((model / "config.json").read_text())["image_token_index"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--model", str(model), "--listen", f"unix:{folder}/worker.sock")
        with running("examples.m3_serving.worker", *arguments) as worker:
            address = worker.stdout.readline().split()[-1]
            for _ in range(rounds):
                for transport in TRANSPORTS:
                    yield asyncio.run(
                        _measure(transport, photo, placeholder, address, worker.pid, seconds)
                    )


def table(results: list[Result]) -> str:
    """Markdown; the least of the rounds, since whatever else runs can only add to them."""
    lines = [
        "| patches go by | bytes | gateway CPU ms: from the decoder | to the worker "
        "| worker CPU ms |",
        "|---|---|---|---|---|",
    ]
    for transport in TRANSPORTS:
        rows = [one for one in results if one.transport == transport]
        decoded, sent, worker = (
            min(getattr(one, name) for one in rows)
            for name in ("decoded_ms", "sent_ms", "worker_ms")
        )
        lines.append(
            f"| {transport} | {rows[0].num_bytes:,} | {decoded:.2f} | {sent:.2f} | {worker:.1f} |"
        )
    return "\n".join(lines)
