"""What generation gets back when media are prepared outside the process that generates.

One worker loop runs alone, beside threads of its own process that decode images at a fixed rate,
and beside a decode pool of another process that does the same. The loop is either a fixed amount of
work a step, half Python (what schedules, samples and talks to clients) and half numpy (what waits
for the device), or the engine of `examples/m3_serving` on a given checkpoint.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ARRANGEMENTS = ("alone", "inside", "outside")
_WARM_UP_S = 1.0


def fixed_loop() -> Callable[[], int]:
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

    return step


def engine_loop(folder: Path) -> Callable[[], int]:
    """A step of the engine with four requests that never end; it makes a token each."""
    from examples.m3_serving import Engine

    engine = Engine.from_folder(folder, cache_tokens=16_384)

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

    requests: list[Any] = []
    return step


def _job() -> dict[str, Any]:
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

    job, stop, done, given = _job(), threading.Event(), [0], [0]

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

    pool, job, done, running = DecodePool(workers), _job(), [0], set()

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


def measure(
    arrangement: str, photo: Path, model: Path | None, rate: float, count: int, seconds: float
) -> dict[str, float]:
    """One arrangement in this process: tokens and images a second, and the slow steps."""
    step = engine_loop(model) if model else fixed_loop()
    data = photo.read_bytes()

    def timed(done: Callable[[], int]) -> dict[str, float]:
        warm = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < warm or (arrangement != "alone" and not done()):
            step()
        images, start = done(), time.perf_counter()
        tokens, steps = 0, []
        while (now := time.perf_counter()) < start + seconds:
            tokens += step()
            steps.append(time.perf_counter() - now)
        took = time.perf_counter() - start
        steps.sort()
        return {
            "tokens_s": tokens / took,
            "images_s": (done() - images) / took,
            "step_p50_ms": 1000 * steps[len(steps) // 2],
            "step_p99_ms": 1000 * steps[int(len(steps) * 0.99)],
        }

    if arrangement == "inside":
        with _threads(data, rate, count) as done:
            return timed(done)
    if arrangement == "outside":
        with _pool(photo, rate, count) as done:
            return timed(done)
    return timed(lambda: 0)


@dataclass
class Result:
    """Medians over the rounds."""

    arrangement: str
    tokens_s: float
    images_s: float
    step_p50_ms: float
    step_p99_ms: float


def run(
    photo: Path, model: Path | None, rate: float, count: int, seconds: float, rounds: int
) -> list[Result]:
    """Every arrangement in a process of its own, in turns, since the machine's mood changes.

    Args:
        photo: a file with an image.
        model: a checkpoint for the engine; None for the fixed loop.
        rate: images a second.
        count: threads, or processes, that decode.
        seconds: a measurement.
        rounds: measurements of each.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ARRANGEMENTS}
    for _ in range(rounds):
        for name in ARRANGEMENTS:
            arguments = [name, str(photo), str(model or ""), str(rate), str(count), str(seconds)]
            output = subprocess.run(
                [sys.executable, "-m", "bench.gateway.giveback", "measure", *arguments],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
            found[name].append(json.loads(output))
    return [
        Result(name, **{key: statistics.median(row[key] for row in rows) for key in rows[0]})
        for name, rows in found.items()
    ]


def table(results: list[Result]) -> str:
    """Markdown."""
    alone = results[0].tokens_s
    lines = [
        "| media are prepared | tokens/s | of the loop alone | images/s | step p50 ms | p99 ms |",
        "|---|---|---|---|---|---|",
    ]
    words = {
        "alone": "not at all",
        "inside": "by threads of the worker",
        "outside": "by the gateway's processes",
    }
    lines += [
        f"| {words[one.arrangement]} | {one.tokens_s:.1f} | {100 * one.tokens_s / alone:.0f} % "
        f"| {one.images_s:.1f} | {one.step_p50_ms:.1f} | {one.step_p99_ms:.1f} |"
        for one in results
    ]
    return "\n".join(lines)


def _main(command: str, *arguments: str) -> None:
    if command == "pool":
        photo, rate, count = arguments
        asyncio.run(pool_process(Path(photo).read_bytes(), float(rate), int(count)))
        return
    name, photo, model, rate, count, seconds = arguments
    folder = Path(model) if model else None
    found = measure(name, Path(photo), folder, float(rate), int(count), float(seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
