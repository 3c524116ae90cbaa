"""Serves a small random MiniMax-M3 and checks every token against transformers.

Three requests of different lengths, cut from the sources of Python's standard library (bytes are
tokens), share the engine's steps: prompts in chunks, answers next to them. transformers then
generates the same answers with its eager attention, one request at a time. Then images, a clip and
text go over HTTP through gateway and worker (`demo_media.py`). One different token, and the demo
shows where and exits with status 1.
"""

import contextlib
import dataclasses
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import demo_media
from .config import DENSE_ATTENTION
from .demo_checkpoint import BOS, make_checkpoint
from .demo_reference import greedy_answer, load_reference
from .engine import Engine
from .model import Model
from .scheduler import Request

NEW_TOKENS = 64
PROMPT_TOKENS = {
    "argparse": 5300,
    "textwrap": 2300,
    "bisect": 700,
}  # module whose source is the text: tokens
STEP_TOKENS = 512


def prompts() -> dict[str, list[int]]:
    """Token ids of each prompt: the first bytes of a standard library module's source."""
    result = {}
    for name, count in PROMPT_TOKENS.items():
        source = Path(inspect.getsourcefile(__import__(name))).read_bytes()
        if len(source) < count:
            raise ValueError(f"the source of {name} must have {count} bytes, got {len(source)}")
        result[name] = [BOS, *source[: count - 1]]
    return result


def serve(engine: Engine, texts: dict[str, list[int]], console: Console) -> dict[str, Request]:
    """Runs all prompts through one engine, together."""
    requests = {
        name: engine.add_request(text, max_new_tokens=NEW_TOKENS) for name, text in texts.items()
    }
    with Progress(console=console, transient=True) as progress:
        total = sum(len(text) + NEW_TOKENS for text in texts.values())
        task = progress.add_task("engine", total=total)
        while engine.has_work:
            engine.step()
            progress.update(task, completed=sum(r.num_computed for r in requests.values()))
    return requests


def transformers_answers(
    model: Any, texts: dict[str, list[int]], console: Console
) -> dict[str, tuple[list[int], torch.Tensor]]:
    """(answer, margins [tokens]) of each prompt."""
    answers = {}
    for name, text in texts.items():
        with console.status(f"transformers: {name}"):
            answers[name] = greedy_answer(model, text, NEW_TOKENS)
    return answers


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that one has and the other has not; None if they are equal."""
    if a == b:
        return None
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def difference_without_selection(
    engine: Engine, prompt: list[int], answer: list[int]
) -> int | None:
    """Index at which the answer changes if all blocks are attended to; None if nowhere."""
    layers = (DENSE_ATTENTION,) * engine.config.num_layers
    config = dataclasses.replace(engine.config, layer_types=layers)
    dense = Engine(Model(config, engine.model.weights), cache_tokens=len(prompt) + len(answer))
    for index, token in enumerate(dense.stream(prompt, max_new_tokens=len(answer))):
        if token != answer[index]:
            return index
    return None


def check_and_tabulate(
    engine: Engine,
    requests: dict[str, Request],
    expected: dict[str, tuple[list[int], torch.Tensor]],
) -> tuple[Table, list[str]]:
    """(one row a request, what differs from transformers)."""
    headers = ("prompt\ntokens", "new\ntokens", "equal", "least\nmargin")
    table, failures = Table("request"), []
    for header in (*headers, "blocks\nvisible", "blocks\nattended", "tokens/s"):
        table.add_column(header, justify="right")
    for name, request in requests.items():
        (answer, margins), got = expected[name], request.generated
        at = first_difference(got, answer)
        if at is not None:
            got_token, expected_token = (a[at] if at < len(a) else "the end" for a in (got, answer))
            margin = f"{float(margins[at]):.2e}" if at < len(margins) else "none"
            failures.append(
                f"{name}: token {at} of the answer must be {expected_token} as in transformers "
                f"(logit margin {margin}), got {got_token}"
            )
        visible, attended = engine.blocks_of(request)
        table.add_row(
            name,
            str(len(request.prompt)),
            str(len(got)),
            "yes" if at is None else "no",
            f"{float(margins.min()):.4f}",
            str(visible),
            str(attended),
            f"{request.statistics.tokens_per_second(len(got)):.1f}",
        )
    return table, failures


def serve_texts(folder: Path, model: Any, console: Console) -> list[str]:
    """The first part, in this process; returns what is wrong."""
    texts = prompts()
    engine = Engine.from_folder(folder, max_step_tokens=STEP_TOKENS)
    started = time.perf_counter()
    requests = serve(engine, texts, console)
    console.print(
        f"engine: {len(requests)} requests together in {engine.num_steps} steps of at most "
        f"{STEP_TOKENS} tokens, {time.perf_counter() - started:.1f} s"
    )
    started = time.perf_counter()
    expected = transformers_answers(model, texts, console)
    console.print(f"transformers: one by one, {time.perf_counter() - started:.1f} s")
    table, failures = check_and_tabulate(engine, requests, expected)

    longest = max(requests.values(), key=lambda request: len(request.prompt))
    with console.status("the longest request again, attending to all blocks"):
        changed_at = difference_without_selection(engine, longest.prompt, longest.generated)
    if changed_at is None:
        failures.append(
            "selection: attending to all blocks must change the longest answer, got the same tokens"
        )
    else:
        console.print(
            f"attending to all blocks would change the longest answer from token {changed_at} on"
        )
    console.print(table)
    return failures


def main() -> int:
    """Returns the exit status: 0 if every token is the same, and selection and images mattered."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    console = Console()
    with console.status("checkpoint"):
        folder = make_checkpoint()
    with contextlib.ExitStack() as stack:
        servers = None
        if sys.version_info >= (3, 11):
            servers = demo_media.Servers(stack, folder)  # they start while the first part runs
        model = load_reference(folder)
        failures = serve_texts(folder, model, console)
        if servers is None:
            console.print("images, clip and text over HTTP: not run, the gateway needs Python 3.11")
        else:
            started = time.perf_counter()
            failures += demo_media.run(servers, model, console)
            seconds = time.perf_counter() - started
            console.print(f"gateway and worker, and transformers: {seconds:.1f} s")
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
