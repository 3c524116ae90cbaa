"""The decoding pool: whatever a child does, only its own request notices."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("PIL")

from gateway_media import FAMILY, GEOMETRY, clip_bytes, image_bytes, pattern
from PIL import Image

from examples.m3_serving.gateway import pool as pool_module
from examples.m3_serving.gateway.errors import (
    DecoderCrashed,
    InvalidMedia,
    MediaTooLarge,
    MediaTooSlow,
    Overloaded,
)
from examples.m3_serving.gateway.job_spec import make_job
from examples.m3_serving.gateway.jobs import run_job
from examples.m3_serving.gateway.pool import DecodePool, PoolLimits
from examples.m3_serving.gateway.protocols import MediaOptions

IMAGE = image_bytes(pattern(56, 84))
IMAGE_JOB = make_job("image", GEOMETRY, FAMILY.sizing("image", MediaOptions()), None, FAMILY.limits)
CLIP_JOB = make_job(
    "video",
    GEOMETRY,
    FAMILY.sizing("video", MediaOptions()),
    FAMILY.sampler(MediaOptions(fps=5)),
    FAMILY.limits,
)


def with_pool(body, workers=1, **limits):
    """Runs `body(pool)` and closes the pool; afterwards no child is left."""

    async def main():
        pool = DecodePool(workers, PoolLimits(**limits))
        try:
            return await body(pool)
        finally:
            pids = pool.child_pids
            await pool.close()
            for pid in pids:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    return asyncio.run(main())


async def works(pool):
    """The pool serves the next request."""
    decoded = await pool.run(IMAGE_JOB, IMAGE)
    assert decoded.grid == (1, 4, 6)


async def stopped_child(pool):
    """The pid of an idle child that will not answer its next job."""
    await works(pool)
    (pid,) = pool.child_pids
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_child_gives_what_the_same_job_gives_here():
    clip = clip_bytes((pattern(64, 96, t) for t in range(20)), 10)

    async def body(pool):
        return await pool.run(IMAGE_JOB, IMAGE), await pool.run(CLIP_JOB, clip)

    image, video = with_pool(body)
    for decoded, job, data in ((image, IMAGE_JOB, IMAGE), (video, CLIP_JOB, clip)):
        meta, patches = run_job(data, job)
        np.testing.assert_array_equal(decoded.patches, patches)
        assert list(decoded.grid) == meta["grid"]
        assert list(decoded.indices) == meta["indices"]
        assert list(decoded.timestamps) == meta["timestamps"]
        assert decoded.processor == meta["processor"] and "pillow=" in decoded.processor


def test_errors_of_a_medium_come_back_as_they_were_and_keep_the_child():
    async def body(pool):
        await works(pool)
        (pid,) = pool.child_pids
        with pytest.raises(InvalidMedia, match="PNG, JPEG"):
            await pool.run(IMAGE_JOB, b"<html>")
        limited = {**IMAGE_JOB, "limits": {**IMAGE_JOB["limits"], "image_pixels": 10}}
        with pytest.raises(MediaTooLarge, match="84 x 56"):
            await pool.run(limited, IMAGE)
        await works(pool)
        assert pool.child_pids == [pid]

    with_pool(body)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_child_that_dies_costs_its_request_only(how):
    async def body(pool):
        pid = await stopped_child(pool)
        running = asyncio.create_task(pool.run(IMAGE_JOB, IMAGE))
        waiting = asyncio.create_task(works(pool))
        await asyncio.sleep(0.05)
        os.kill(pid, how)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(DecoderCrashed):
            await running
        await waiting
        assert pid not in pool.child_pids

    with_pool(body)


def test_a_child_that_died_idle_is_replaced_before_it_gets_a_job():
    async def body(pool):
        await works(pool)
        (pid,) = pool.child_pids
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.1)
        await works(pool)

    with_pool(body)


def test_a_child_that_hangs_is_killed_at_the_wall_limit():
    async def body(pool):
        pid = await stopped_child(pool)
        start = time.monotonic()
        with pytest.raises(MediaTooSlow, match=r"0\.5 s"):
            await pool.run(IMAGE_JOB, IMAGE)
        assert time.monotonic() - start < 3
        await works(pool)
        assert pid not in pool.child_pids

    with_pool(body, wall_s=0.5)


def slow_gif(frames: int) -> bytes:
    """About 20 bytes a frame, each of which makes a decoder copy a canvas of 1000 x 1000 pixels."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1000, 1000, 0xF0, 0, 0) + bytes(6)
    frame = b"\x21\xf9\x04\0\x02\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
    return head + (frame + b"\x02\x02\x44\x01\0") * frames + b";"


def test_cpu_time_is_limited_by_the_kernel():
    sampling = {**CLIP_JOB["sampling"], "fps": 0.2}

    async def body(pool):
        decoded = await pool.run({**CLIP_JOB, "sampling": sampling}, slow_gif(10))
        assert decoded.grid[0] == 1
        with pytest.raises(MediaTooSlow, match="CPU"):
            await pool.run({**CLIP_JOB, "sampling": sampling}, slow_gif(20_000))
        await works(pool)

    with_pool(body, cpu_s=1)


def test_memory_is_limited_by_the_kernel():
    async def body(pool):
        await works(pool)
        (pid,) = pool.child_pids
        big = image_bytes(Image.new("RGB", (6000, 6000)), compress_level=1)
        with pytest.raises(MediaTooLarge, match="memory"):
            await pool.run(IMAGE_JOB, big)
        await works(pool)
        assert pid not in pool.child_pids  # what failed once may be left in pieces

    with_pool(body, memory_bytes=24 << 20)


def test_frames_take_no_address_space_beyond_their_rows():
    """Converters that start threads a frame each reserve some, and a long clip then fails."""
    clip = clip_bytes(
        (pattern(480, 640, t) for t in range(60)), 5, codec="mpeg4", pix_fmt="yuv420p"
    )

    async def body(pool):
        decoded = await pool.run(CLIP_JOB, clip)
        assert decoded.patches.nbytes > 50 << 20

    with_pool(body, memory_bytes=160 << 20)


def test_cancelling_a_request_kills_its_child():
    async def body(pool):
        pid = await stopped_child(pool)
        running = asyncio.create_task(pool.run(IMAGE_JOB, IMAGE))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await works(pool)
        assert pid not in pool.child_pids

    with_pool(body)


def test_closing_fails_what_runs_and_what_waits():
    async def body(pool):
        await stopped_child(pool)
        tasks = [asyncio.create_task(pool.run(IMAGE_JOB, IMAGE)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [DecoderCrashed, Overloaded, Overloaded]
        with pytest.raises(Overloaded):
            await works(pool)

    with_pool(body)


def test_children_end_with_a_server_that_was_killed():
    package = Path(pool_module.__file__).parent
    script = (
        f"import asyncio, sys; sys.path.append({str(package.parent)!r})\n"
        f"from {package.name}.pool import DecodePool\n"
        "async def main():\n"
        "    pool = DecodePool(1)\n"
        "    child = await pool._take()\n"
        "    print(child.process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with server, server.stdout as out:
        pid = int(out.readline())
        assert Path(f"/proc/{pid}").exists()
        server.kill()
        deadline = time.monotonic() + 5
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_beyond_the_queue_are_refused_as_overload():
    async def body(pool):
        pid = await stopped_child(pool)
        tasks = [asyncio.create_task(pool.run(IMAGE_JOB, IMAGE)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded) as caught:
            await pool.run(IMAGE_JOB, IMAGE)
        assert caught.value.status == 429
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*tasks)
        await works(pool)

    with_pool(body, queued_jobs=2)


def test_jobs_run_side_by_side_in_as_many_children_as_allowed():
    async def body(pool):
        results = await asyncio.gather(*(pool.run(IMAGE_JOB, IMAGE) for _ in range(12)))
        assert len(set(pool.child_pids)) == 2
        assert all((decoded.patches == results[0].patches).all() for decoded in results)

    with_pool(body, workers=2)


def test_children_are_replaced_after_their_share_of_jobs():
    async def body(pool):
        seen = []
        for _ in range(4):
            await works(pool)
            seen.append(tuple(pool.child_pids))
        assert seen[0] and seen[1] == () and seen[2] and seen[2] != seen[0]

    with_pool(body, jobs_per_child=2)


def test_an_input_above_the_limit_costs_its_request_only():
    async def body(pool):
        with pytest.raises(MediaTooLarge, match="1000000 bytes"):
            await pool.run(IMAGE_JOB, b"x" * 1_000_001)
        await works(pool)

    with_pool(body, input_bytes=1_000_000)


def test_children_do_not_see_the_servers_environment_nor_its_terminal(monkeypatch):
    monkeypatch.setenv("SERVER_SECRET", "hush")

    async def body(pool):
        await works(pool)
        assert os.getpgid(pool.child_pids[0]) != os.getpgid(0)
        with open(f"/proc/{pool.child_pids[0]}/environ") as environ:
            assert "SERVER_SECRET" not in environ.read()

    with_pool(body)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": [1, 4]}, {"grid": [1, 4, 7]}, {"grid": [1, 3, 8]}, {"grid": [0, 4, 6]},
        {"grid": [-1, -4, 6]}, {"grid": None}, {"grid": ["a", 4, 6]}, {"grid": [10**30, 4, 6]},
        {"indices": []}, {"indices": [0, 1, 2]}, {"timestamps": []}, {"timestamps": [float("nan")]},
        {"timestamps": ["x"]}, {"timestamps": None},
    ],
)  # fmt: skip
def test_answers_that_make_no_sense_are_not_believed(change):
    meta, patches = run_job(IMAGE, IMAGE_JOB)
    payload = bytearray(patches.tobytes())
    assert pool_module._checked(meta, payload, IMAGE_JOB).grid == (1, 4, 6)
    with pytest.raises(DecoderCrashed):
        pool_module._checked({**meta, **change}, payload, IMAGE_JOB)
    with pytest.raises(DecoderCrashed):
        pool_module._checked(meta, payload[:-1], IMAGE_JOB)


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="workers"):
        DecodePool(0)


def test_limits_are_defaults_that_fit_the_familys():
    limits = PoolLimits()
    assert limits.input_bytes >= FAMILY.limits.video_url_bytes
    assert limits.output_bytes >= 3 * FAMILY.limits.video_pixels
    assert replace(limits, wall_s=1.0).wall_s == 1.0
