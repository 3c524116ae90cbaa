"""What generation gets back when media are prepared outside the process that generates.

One worker loop runs alone, beside threads of its own process that decode images at a fixed rate,
and beside a decode pool of another process that does the same. The loop is either a fixed amount of
work a step, half Python (what schedules, samples and talks to clients) and half numpy (what waits
for the device), or the engine of `examples/m3_serving` on a given checkpoint, on the CPU or a GPU.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ARRANGEMENTS = ("alone", "inside", "outside")
_WARM_UP_S = 1.0


@dataclass(frozen=True)
class Loop:
    """What generates."""

    name: str
    step: Callable[[], int]
    """computes tokens and tells how many"""
    restart: Callable[[], None] = lambda: None
    """called where a measurement begins, so that all begin alike"""


def fixed_loop() -> Loop:
    """A step of some ten milliseconds of one core; it makes one token."""
    weights = np.random.default_rng(0).random((320, 320), np.float32)

    def step() -> int:
        total = 0
        for i in range(40_000):
            total += i & 7
        x = weights
        for _ in range(6):
            x = np.tanh(x @ weights)
        return 1 if total and x.shape else 0

    return Loop("a fixed loop", step)


def engine_loop(folder: Path, device: str) -> Loop:
    """A step of the engine with four requests that never end; it makes a token each.

    On a GPU the model is bfloat16, as the kernels want it. The step waits for the GPU itself, since
    the next one needs the tokens.
    """
    import torch

    from examples.m3_serving import Engine

    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else None
    engine = Engine.from_folder(folder, dtype=dtype, device=device, cache_tokens=16_384)
    place = torch.cuda.get_device_name(device) if on_gpu else device

    def step() -> int:
        while sum(not request.finish_reason for request in requests) < 4:
            requests.append(
                engine.add_request(list(range(1, 200)), max_new_tokens=2000, ignore_eos=True)
            )
        before = sum(len(request.generated) for request in requests)
        engine.step()
        made = sum(len(request.generated) for request in requests) - before
        requests[:] = [request for request in requests if not request.finish_reason]
        return made

    def restart() -> None:
        for request in requests:
            engine.abort(request)
        requests.clear()
        step()
        while not all(request.generated for request in requests):
            step()

    requests: list[Any] = []
    return Loop(f"the engine on {folder.name}, {place}, torch {torch.__version__}", step, restart)


def photo_job() -> dict[str, Any]:
    """An image for the default family, as its gateway would ask for it."""
    from examples.m3_serving.gateway.families import MiniMaxM3Family
    from examples.m3_serving.gateway.job_spec import make_job
    from examples.m3_serving.gateway.protocols import MediaOptions

    family = MiniMaxM3Family()
    sizing = family.sizing("image", MediaOptions())
    return make_job("image", family.geometry, sizing, None, family.limits)


@contextmanager
def _threads(data: bytes, rate: float, count: int) -> Iterator[Callable[[], int]]:
    """Decodes in threads of this process; gives how many images are done."""
    from examples.m3_serving.gateway.jobs import run_job

    job, stop, done, given = photo_job(), threading.Event(), [0], [0]

    def decode() -> None:
        run_job(data, job)
        done[0] += 1

    def feed() -> None:
        due = time.perf_counter()
        while not stop.is_set():
            if given[0] - done[0] < 5 * count:  # late images are dropped, not piled up
                given[0] += 1
                pool.submit(decode)
            due += 1 / rate
            stop.wait(max(0.0, due - time.perf_counter()))

    with ThreadPoolExecutor(count) as pool:
        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            yield lambda: done[0]
        finally:
            stop.set()
            feeder.join()


async def pool_process(data: bytes, rate: float, workers: int) -> None:
    """A gateway's decode pool at the same rate; prints how many images are done when told to."""
    from examples.m3_serving.gateway.pool import DecodePool

    pool, job, done, running = DecodePool(workers), photo_job(), [0], set()

    async def decode() -> None:
        await pool.run(job, data)
        done[0] += 1

    async def feed() -> None:
        due = time.perf_counter()
        while True:
            if len(running) < 5 * workers:
                task = asyncio.create_task(decode())
                running.add(task)
                task.add_done_callback(running.discard)
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    feeding = asyncio.create_task(feed())
    while await asyncio.to_thread(sys.stdin.readline):
        print(done[0], flush=True)
    for task in (feeding, *running):
        task.cancel()
    await asyncio.gather(feeding, *running, return_exceptions=True)
    await pool.close()


@contextmanager
def _pool(photo: Path, rate: float, count: int) -> Iterator[Callable[[], int]]:
    """The same in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gateway.giveback", "pool", str(photo), str(rate), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def done() -> int:
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        yield done
    finally:
        process.stdin.close()
        process.wait()


@dataclass
class Result:
    """One arrangement at one rate: of one measurement, or medians over the rounds."""

    arrangement: str
    rate: float
    """images a second asked for"""
    tokens_s: float
    images_s: float
    step_p50_ms: float
    step_p99_ms: float


def measure(
    loop: Loop, arrangement: str, photo: Path, rate: float, count: int, seconds: float
) -> Result:
    """One measurement: tokens and images a second, and the slow steps."""

    def timed(done: Callable[[], int]) -> Result:
        loop.step()  # the first loads what is loaded late
        while arrangement != "alone" and not done():
            loop.step()
        warm = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < warm:
            loop.step()
        loop.restart()
        images, start = done(), time.perf_counter()
        tokens, steps = 0, []
        while (now := time.perf_counter()) < start + seconds:
            tokens += loop.step()
            steps.append(time.perf_counter() - now)
        took = time.perf_counter() - start
        images = done() - images
        steps.sort()
        return Result(
            arrangement,
            rate,
            tokens_s=tokens / took,
            images_s=images / took,
            step_p50_ms=1000 * steps[len(steps) // 2],
            step_p99_ms=1000 * steps[int(len(steps) * 0.99)],
        )

    if arrangement == "inside":
        with _threads(photo.read_bytes(), rate, count) as done:
            return timed(done)
    if arrangement == "outside":
        with _pool(photo, rate, count) as done:
            return timed(done)
    return timed(lambda: 0)


def measure_all(
    loop: Loop, photo: Path, rates: Sequence[float], count: int, seconds: float, rounds: int
) -> list[Result]:
    """The loop alone and each arrangement at each rate, in turns, since the machine's mood
    changes."""
    plan = [("alone", 0.0), *((name, rate) for rate in rates for name in ARRANGEMENTS[1:])]
    return [
        measure(loop, name, photo, rate, count, seconds)
        for _ in range(rounds)
        for name, rate in plan
    ]


def medians(results: Sequence[Result]) -> list[Result]:
    """One result for each arrangement and rate, in the order in which they come first."""
    groups: dict[tuple[str, float], list[dict[str, float]]] = {}
    for one in results:
        row = asdict(one)
        groups.setdefault((row.pop("arrangement"), row.pop("rate")), []).append(row)
    return [
        Result(*key, **{name: statistics.median(row[name] for row in rows) for name in rows[0]})
        for key, rows in groups.items()
    ]


def run(
    photo: Path,
    model: Path | None,
    device: str,
    rates: Sequence[float],
    count: int,
    seconds: float,
    rounds: int,
) -> tuple[str, list[Result]]:
    """Measures in a process that does nothing else.

    Args:
        photo: a file with an image.
        model: a checkpoint for the engine; None for the fixed loop.
        device: of the engine.
        rates: images a second.
        count: threads, or processes, that decode.
        seconds: a measurement.
        rounds: measurements of each.

    Returns:
        (what the loop is, medians over the rounds).
    """
    options = {
        "photo": str(photo),
        "model": str(model) if model else None,
        "device": device,
        "rates": list(rates),
        "count": count,
        "seconds": seconds,
        "rounds": rounds,
    }
    output = subprocess.run(
        [sys.executable, "-m", "bench.gateway.giveback", "measure", json.dumps(options)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found = json.loads(output)
    return found["loop"], medians([Result(**row) for row in found["results"]])


def table(results: Sequence[Result]) -> str:
    """Markdown; the first result is the loop alone."""
    alone = results[0].tokens_s
    lines = [
        "| media are prepared | asked for, images/s | images/s | tokens/s | of the loop alone "
        "| step p50 ms | p99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    words = {
        "alone": "not at all",
        "inside": "by threads of the worker",
        "outside": "by the gateway's processes",
    }
    lines += [
        f"| {words[one.arrangement]} | {one.rate:g} | {one.images_s:.1f} | {one.tokens_s:.1f} "
        f"| {100 * one.tokens_s / alone:.0f} % | {one.step_p50_ms:.1f} | {one.step_p99_ms:.1f} |"
        for one in results
    ]
    return "\n".join(lines)


def _main(command: str, *arguments: str) -> None:
    if command == "pool":
        photo, rate, count = arguments
        asyncio.run(pool_process(Path(photo).read_bytes(), float(rate), int(count)))
        return
    options = json.loads(arguments[0])
    model, device = options.pop("model"), options.pop("device")
    loop = engine_loop(Path(model), device) if model else fixed_loop()
    results = measure_all(loop, Path(options.pop("photo")), **options)
    print(json.dumps({"loop": loop.name, "results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
