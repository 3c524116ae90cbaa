"""The demo's second part: images, a clip and text over HTTP, through gateway and worker.

Three processes take part besides this one: the gateway (with its decoders), the worker, and nothing
they share but sockets and memory. What comes back is compared with transformers' own `generate` on
the same prompt, with patches from transformers' image processor: nothing of the gateway's is used
on that side.
"""

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from .demo_checkpoint import BOS, END, EOS, IMAGE, START, TURN, VIDEO, byte_letters
from .demo_reference import greedy_answer
from .vision import segments_of

NEW_TOKENS = 24
TIMEOUT_S = 180.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ask:
    """One request: text, perhaps with a medium in the middle."""

    before: str
    after: str = ""
    image: np.ndarray | None = None
    """[h, w, 3] uint8"""
    clip: np.ndarray | None = None
    """[frames, h, w, 3] uint8, one a second"""


def picture(seed: int, height: int = 300, width: int = 420) -> np.ndarray:
    """[height, width, 3] uint8: coloured disks on a gradient."""
    from PIL import Image, ImageDraw

    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    ground = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1).astype(np.uint8)
    image = Image.fromarray(ground)
    for _ in range(12):
        cx, cy, radius = draw.integers([0, 0, 15], [width, height, 70])
        colour = tuple(int(c) for c in draw.integers(0, 256, 3))
        box = (cx - radius, cy - radius, cx + radius, cy + radius)
        ImageDraw.Draw(image).ellipse([int(v) for v in box], fill=colour)
    return np.asarray(image)


def moving_square(frames: int = 9, height: int = 112, width: int = 140) -> np.ndarray:
    """[frames, height, width, 3] uint8: a square on its way; sides need no resizing."""
    clip = np.zeros((frames, height, width, 3), np.uint8)
    for t, frame in enumerate(clip):
        frame[..., 2] = np.linspace(0, 200, width, dtype=np.uint8)
        frame[10 + 8 * t : 40 + 8 * t, 5 + 12 * t : 35 + 12 * t, :2] = (250, 20 * t)
    return clip


def requests() -> dict[str, Ask]:
    """What is asked, by name."""
    question = "Which shapes are in this picture, and which of them lie on top of others? "
    return {
        "text": Ask("Tell me something about serving models that see."),
        "image": Ask(question, " Answer in one word.", image=picture(1)),
        "other image": Ask(question, " Answer in one word.", image=picture(2)),
        "clip": Ask("Here is a clip: ", " Where does the square go?", clip=moving_square()),
    }


def png(image: np.ndarray) -> bytes:
    """A file of the image."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def matroska(clip: np.ndarray) -> bytes:
    """A file of the clip, one frame a second; its codec loses nothing."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("ffv1", rate=1)
        stream.pix_fmt = "bgr0"
        stream.height, stream.width = clip.shape[1:3]
        for frame in clip:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def to_json(ask: Ask, model: str) -> dict[str, Any]:
    """The body of the HTTP request."""
    content: list[dict[str, Any]] = [{"type": "text", "text": ask.before}]
    if ask.image is not None:
        url = "data:image/png;base64," + base64.b64encode(png(ask.image)).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})
    if ask.clip is not None:
        url = "data:video/x-matroska;base64," + base64.b64encode(matroska(ask.clip)).decode()
        content.append({"type": "video_url", "video_url": {"url": url}})
    if ask.after:
        content.append({"type": "text", "text": ask.after})
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
    }


# The other side: transformers alone.


def patches_of(image: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """(patches [rows, 1176] float32, [1, gh, gw]) of transformers' image processor.

    The one of Qwen2-VL with M3's bounds, which is the same code; M3's own cannot be imported beside
    a CPU build of torch without torchvision.
    """
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * 28 * 28, "longest_edge": 672 * 672}
    )
    result = processor(Image.fromarray(image), return_tensors="pt")
    return result["pixel_values"], result["image_grid_thw"][0].tolist()


def clip_patches_of(clip: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """(patches [rows, 1176] float32, [T, gh, gw]) of the same processor, frame by frame.

    An image is a clip whose only frame is there twice, so each frame's half of a row can be taken
    from its own image. The last frame is repeated where one is missing.
    """
    halves = [patches_of(frame) for frame in clip]
    _, (_, gh, gw) = halves[0]
    frames = [rows.view(gh * gw, 3, 2, 14 * 14)[:, :, 0] for rows, _ in halves]
    frames += frames[-1:] * (len(frames) % 2)
    pairs = zip(frames[::2], frames[1::2], strict=True)
    rows = torch.cat([torch.stack(pair, 2).flatten(1) for pair in pairs])
    return rows, [len(frames) // 2, gh, gw]


def prompt_of(ask: Ask) -> tuple[list[int], dict[str, torch.Tensor]]:
    """(token ids, the other inputs of transformers' model), as M3's chat template has it."""
    ids = [BOS, TURN, *b"user\n", *ask.before.encode()]
    inputs = {}
    if ask.image is not None:
        rows, grid = patches_of(ask.image)
        ids += [START, *[IMAGE] * (len(rows) // 4), END]
        inputs = {"pixel_values": rows, "image_grid_thw": torch.tensor([grid])}
    if ask.clip is not None:
        rows, grid = clip_patches_of(ask.clip)
        for pair in range(grid[0]):
            stamp = f"]<]{2 * pair:.1f} seconds[>["
            ids += [*stamp.encode(), START, *[VIDEO] * (grid[1] * grid[2] // 4), END]
        segments = torch.tensor(segments_of(tuple(grid)))
        inputs = {"pixel_values_videos": rows, "video_grid_thw": segments}
    return [*ids, *ask.after.encode(), EOS, *b"\n", TURN, *b"ai\n"], inputs


def text_of(tokens: Sequence[int]) -> str:
    """How the checkpoint's tokenizer writes an answer: special tokens leave no trace."""
    letters = byte_letters()
    return "".join(letters[token] for token in tokens if token < 256)


# The processes.


@contextlib.contextmanager
def process(arguments: Sequence[str], announcement: str, log: Path) -> Iterator["Process"]:
    """A module of this package as a process of its own; ended with the block."""
    with log.open("wb") as errors:
        running = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        try:
            yield Process(running, announcement, log)
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            running.stdout.close()


class Process:
    """One that says on its standard output where it can be reached."""

    def __init__(self, running: subprocess.Popen, announcement: str, log: Path) -> None:
        """Made by `process`."""
        self._running, self._announcement, self._log = running, announcement, log

    def address(self) -> str:
        """Waits for it; RuntimeError, with what it wrote, if it ends or takes too long."""
        timer = threading.Timer(TIMEOUT_S, self._running.kill)
        timer.start()
        try:
            for line in self._running.stdout:
                if self._announcement in line:
                    return line.split(self._announcement)[1].strip()
        finally:
            timer.cancel()
        written = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._running.args[2]} did not start:\n{written}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an HTTP answer; RuntimeError with the body of one that is an error."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # No proxy: this goes to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {error.read().decode()}") from error


class Servers:
    """Worker and gateway of one checkpoint. Both start at once and in the background."""

    def __init__(self, stack: contextlib.ExitStack, checkpoint: Path) -> None:
        """Starts the worker; everything ends with `stack`."""
        self._stack, self._checkpoint = stack, checkpoint
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m3-demo-")))
        socket = f"unix:{self._folder}/worker.sock"
        name, model = __package__, ["--model", str(checkpoint)]
        worker = [f"{name}.worker", *model, "--listen", socket, "--step-tokens", "64"]
        gateway = [f"{name}.gateway", *model, "--worker", socket, "--port", "0"]
        self._worker = self._start(worker, "listening on ")
        self._gateway = self._start([*gateway, "--decoders", "2"], " at http://")

    def _start(self, arguments: list[str], announcement: str) -> Process:
        log = self._folder / f"{arguments[0].rsplit('.', 1)[-1]}.log"
        return self._stack.enter_context(process(arguments, announcement, log))

    def url(self) -> str:
        """Of the gateway, once both are there."""
        self._worker.address()
        return f"http://{self._gateway.address()}/v1/chat/completions"

    def ask(self, url: str, asks: dict[str, Ask]) -> dict[str, dict[str, Any]]:
        """The answers to requests that are sent together."""
        bodies = [to_json(ask, self._checkpoint.name) for ask in asks.values()]
        with ThreadPoolExecutor(len(asks)) as threads:
            return dict(zip(asks, threads.map(lambda body: post(url, body), bodies), strict=True))


def check_and_tabulate(
    answers: dict[str, dict[str, Any]], references: dict[str, tuple[list[int], list[int], float]]
) -> tuple[Table, list[str]]:
    """(one row a request, what differs from transformers or from what it should show).

    Args:
        answers: of the gateway, by the request's name.
        references: (prompt, answer, least margin) of transformers.
    """
    table, failures = Table("request"), []
    for header in ("prompt\ntokens", "of media", "cached", "new\ntokens", "equal", "least\nmargin"):
        table.add_column(header, justify="right")
    for name, answer in answers.items():
        prompt, tokens, margin = references[name.removesuffix(" again")]
        usage, details = answer["usage"], answer["usage"]["prompt_tokens_details"]
        got, expected = answer["choices"][0]["message"]["content"], text_of(tokens)
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        if got != expected or counts != (len(prompt), len(tokens)):
            failures.append(
                f"{name}: the answer to {len(prompt)} tokens must be {len(tokens)} tokens, "
                f"{expected!r}, as in transformers (least logit margin {margin:.2e}), got "
                f"{counts[1]} to {counts[0]}, {got!r}"
            )
        table.add_row(
            name,
            str(counts[0]),
            str(details["image_tokens"] + details["video_tokens"]),
            str(details["cached_tokens"]),
            str(counts[1]),
            "yes" if got == expected else "no",
            f"{margin:.4f}",
        )
    if references["image"][1] == references["other image"][1]:
        failures.append("images: another image must give another answer, got the same tokens")
    if references["image"][0] != references["other image"][0]:
        failures.append("images: both prompts must be the same token ids, got others")
    again = answers["image again"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    if not again:
        failures.append("image again: a page must come from the prefix cache, got none")
    return table, failures


def run(servers: Servers, model: Any, console: Console) -> list[str]:
    """Asks, compares, prints a table; returns what is wrong.

    Args:
        servers: started.
        model: transformers' of the same checkpoint.
        console: to print to.
    """
    asks = requests()
    with console.status("gateway and worker start"):
        url = servers.url()
    with console.status("images, clip and text over HTTP"):
        answers = servers.ask(url, asks)
        answers["image again"] = servers.ask(url, {"image": asks["image"]})["image"]
    references = {}
    for name, ask in asks.items():
        with console.status(f"transformers: {name}"):
            ids, inputs = prompt_of(ask)
            answer, margins = greedy_answer(model, ids, NEW_TOKENS, **inputs)
            references[name] = ids, answer, float(margins.min())
    table, failures = check_and_tabulate(answers, references)
    console.print(table)
    return failures
