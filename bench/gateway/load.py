"""Many clients at once against one gateway: rates, latencies, CPU, memory, and nothing lost."""

import asyncio
import base64
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from . import material
from .processes import Use, running, use_of

BASE = "http://media.invalid"
Body = Callable[[int], dict[str, Any]]

SCRIPT = {"tokens": 16, "delay_s": 0.0, "stall_every": 0, "die_every": 0, "stall_s": 60.0}


@dataclass(frozen=True)
class Scenario:
    """What clients send, and what the worker does."""

    name: str
    media: int
    """images or clips a request"""
    body: Body
    """of request number n"""
    files: tuple[str, ...] = ()
    """that it needs"""
    script: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """Of one scenario."""

    name: str
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """seconds, of whole answers"""
    errors: Counter[str] = field(default_factory=Counter)
    """answers that said what went wrong, by code"""
    lost: int = 0
    """requests that ended with neither answer nor error"""
    own_cpu_s: float = 0.0
    children_cpu_s: float = 0.0
    media: int = 0
    """images or clips a request"""
    resident: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, bytes of the gateway, bytes of its children)"""

    @property
    def ended(self) -> int:
        """Requests."""
        return len(self.latencies) + self.errors.total() + self.lost

    def quantile(self, part: float) -> float:
        """Of the latencies, seconds; NaN without any."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes) -> str | None:
    """None for a whole answer, else the error's code; raises for a request that is lost."""
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            return str((await response.json())["error"]["code"])
        last = b""
        async for line in response.content:
            if line.strip():
                last = line.strip().removeprefix(b"data: ")
        if last == b"[DONE]":
            return None
        return str(json.loads(last)["error"]["code"])


async def _clients(
    url: str, base: str, scenario: Scenario, clients: int, seconds: float, pid: int
) -> Outcome:
    outcome = Outcome(scenario.name, media=scenario.media)
    numbers = itertools.count()
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        def body() -> bytes:
            return json.dumps(scenario.body(next(numbers))).replace(BASE, base).encode()

        async def one_client(end: float) -> None:
            while time.perf_counter() < end:
                started = time.perf_counter()
                try:
                    code = await _ask(session, url, body())
                except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                    outcome.lost += 1
                    continue
                if code is None:
                    outcome.latencies.append(time.perf_counter() - started)
                else:
                    outcome.errors[code] += 1

        def note(use: Use) -> None:
            row = (time.perf_counter() - start, use.own_bytes, use.children_bytes)
            outcome.resident.append(row)

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.5)
                note(await asyncio.to_thread(use_of, pid))

        # Once for the processes that start with the first request, unmeasured.
        await asyncio.gather(
            *(_ask(session, url, body()) for _ in range(4)),
            return_exceptions=True,
        )
        before: Use = use_of(pid)
        start = time.perf_counter()
        note(before)
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one_client(start + seconds) for _ in range(clients)))
        outcome.seconds = time.perf_counter() - start
        after = use_of(pid)
        note(after)
        watching.cancel()
    outcome.own_cpu_s = after.own_cpu_s - before.own_cpu_s
    outcome.children_cpu_s = after.children_cpu_s - before.children_cpu_s
    return outcome


def _chat(*content: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}, *content]
    return {
        "model": material.MODEL,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 16,
        "stream": True,
    }


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def scenarios(media: Path) -> list[Scenario]:
    """All of them, cheap ones first; in their URLs, BASE stands for the media server."""
    photo, clip = ("photo.jpg",), ("clip.mp4",)

    def text(n: int) -> dict[str, Any]:
        return _chat()

    @cache
    def inline() -> str:
        data = base64.b64encode((media / "photo.jpg").read_bytes()).decode()
        return f"data:image/jpeg;base64,{data}"

    def by_url(n: int) -> dict[str, Any]:
        return _chat(_image(f"{BASE}/photo.jpg?{n}"))

    def clip_by_url(n: int) -> dict[str, Any]:
        part = {"type": "video_url", "video_url": {"url": f"{BASE}/clip.mp4?{n}", "fps": 1}}
        return _chat(part)

    stalls, dies = {"stall_every": 5, "stall_s": 1.0}, {"die_every": 5}
    return [
        Scenario("text", 0, text),
        Scenario("image, data URL", 1, lambda n: _chat(_image(inline())), photo),
        Scenario("image, URL", 1, by_url, photo),
        Scenario("clip, URL", 1, clip_by_url, clip),
        Scenario("image, 1 worker in 5 stalls", 1, by_url, photo, stalls),
        Scenario("image, 1 worker in 5 dies", 1, by_url, photo, dies),
        Scenario("text, 1 worker in 5 dies", 0, text, (), dies),
    ]


def _write_media(folder: Path, files: set[str]) -> None:
    if "photo.jpg" in files:
        (folder / "photo.jpg").write_bytes(material.photo(1080, 1920))
    if "clip.mp4" in files:
        (folder / "clip.mp4").write_bytes(material.clip(360, 640, 10))


def run(work: Path, clients: int, seconds: float, only: str | None = None) -> Iterator[Outcome]:
    """Each scenario against a gateway of its own.

    Args:
        work: an empty folder.
        clients: at a time, each sends its next request when the last has ended.
        seconds: a scenario.
        only: part of the names of the scenarios to run.
    """
    checkpoint, media = work / "checkpoint", work / "media"
    for folder in (checkpoint, media):
        folder.mkdir()
    material.write_checkpoint(checkpoint)
    chosen = [one for one in scenarios(media) if not only or only in one.name]
    _write_media(media, {file for one in chosen for file in one.files})
    with running("bench.gateway.media_server", str(media)) as server:
        port = int(server.stdout.readline())
        for scenario in chosen:
            script = json.dumps({**SCRIPT, **scenario.script})
            arguments = ("bench.gateway.serve", str(checkpoint), str(port), script)
            with running(*arguments) as gateway:
                url = gateway.stdout.readline().split()[-1] + "/v1/chat/completions"
                base = f"http://127.0.0.1:{port}"
                yield asyncio.run(_clients(url, base, scenario, clients, seconds, gateway.pid))


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| scenario | requests/s | p50 s | p99 s | gateway CPU ms/request | decoder CPU ms/medium "
        "| errors told | lost | RSS MiB of the gateway at 0, 1/3, 2/3, 3/3; of decoders |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        told = ", ".join(f"{code} {count}" for code, count in sorted(one.errors.items())) or "none"
        children = one.children_cpu_s * 1000 / max(one.ended * one.media, 1)
        own, decoders = ([row[i] / 2**20 for row in one.resident] for i in (1, 2))
        lines.append(
            f"| {one.name} | {one.ended / one.seconds:.1f} | {one.quantile(0.5):.3f} "
            f"| {one.quantile(0.99):.3f} | {one.own_cpu_s * 1000 / max(one.ended, 1):.1f} "
            f"| {f'{children:.0f}' if one.media else '-'} | {told} | {one.lost} "
            f"| {', '.join(f'{own[i * (len(own) - 1) // 3]:.0f}' for i in range(4))}; "
            f"{max(decoders):.0f} |"
        )
    return "\n".join(lines)
