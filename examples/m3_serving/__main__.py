"""Local command line: `python -m examples.m3_serving --model DIR --prompt-file FILE ...`."""

import argparse
import codecs
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn

from .config import DTYPES
from .engine import Engine
from .sampling import SamplingParams
from .scheduler import Request


class ByteTokenizer:
    """Bytes are tokens 0 to 255, for checkpoints without a tokenizer. Others have no text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def incremental(self) -> Callable[[int], str]:
        """A function from the next token to the text that has become certain with it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token])) if token < 256 else ""


class FileTokenizer:
    """A checkpoint's own tokenizer.json."""

    def __init__(self, path: Path) -> None:
        """Reads the file; the `tokenizers` package is needed only here."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as the file says."""
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(list(tokens))

    def incremental(self) -> Callable[[int], str]:
        """See `ByteTokenizer.incremental`; a character that spans tokens waits for its last one."""
        tokens: list[int] = []
        shown = ""

        def add(token: int) -> str:
            nonlocal shown
            tokens.append(token)
            text = self.decode(tokens)
            if text.endswith("\ufffd"):
                return ""
            new, shown = text[len(shown) :], text
            return new

        return add


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """tokenizer.json where there is one; else bytes, if the vocabulary can be that of bytes."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return FileTokenizer(path)
    if not 256 <= vocab_size < 512:
        raise ValueError(
            f"{folder} must hold tokenizer.json, or a model of bytes (vocab_size 256 to 511), "
            f"got neither: vocab_size {vocab_size}"
        )
    return ByteTokenizer()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked as far as that goes without the model."""
    parser = argparse.ArgumentParser(prog="python -m examples.m3_serving", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        default=[],
        help="text file, one request; repeatable",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="text, one request; repeatable"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="same seed, same answer; default: random")
    parser.add_argument("--stop-id", type=int, action="append", default=[], help="more stop tokens")
    parser.add_argument(
        "--stream", action="store_true", help="print the text as it comes; one prompt"
    )
    parser.add_argument("--cache-tokens", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument(
        "--step-tokens", type=int, default=512, help="tokens a step; default: %(default)s"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parsed = parser.parse_args(arguments)
    prompts = len(parsed.prompt) + len(parsed.prompt_file)
    if prompts == 0:
        parser.error("at least one --prompt or --prompt-file is needed")
    if parsed.stream and prompts > 1:
        parser.error(f"--stream prints one answer, got {prompts} prompts")
    return parsed


def stream(engine: Engine, request: Request, tokenizer: Tokenizer) -> None:
    """Prints the answer as it grows."""
    text_of, shown = tokenizer.incremental(), 0
    while engine.has_work:
        engine.step()
        for token in request.generated[shown:]:
            print(text_of(token), end="", flush=True)
        shown = len(request.generated)
    print()


def run(engine: Engine, requests: Sequence[Request], console: Console) -> None:
    """Serves all requests, showing tokens done and tokens per second."""
    columns = (
        *Progress.get_default_columns(),
        TextColumn("{task.fields[speed]:.1f} tokens/s generated"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(len(request.prompt) + request.max_new_tokens for request in requests)
        task, started = progress.add_task("tokens", total=total, speed=0.0), time.perf_counter()
        while engine.has_work:
            engine.step()
            generated = sum(len(request.generated) for request in requests)
            done = sum(request.num_computed for request in requests)
            progress.update(task, completed=done, speed=generated / (time.perf_counter() - started))


def summary(request: Request) -> str:
    """One line on a finished request."""
    numbers = request.statistics
    prompt, generated = len(request.prompt), len(request.generated)
    return (
        f"request {request.order}: {prompt} prompt tokens, {numbers.cached_tokens} from the cache, "
        f"{generated} generated, ended by {request.finish_reason}, "
        f"first token after {numbers.time_to_first_token:.2f} s, "
        f"{numbers.tokens_per_second(generated):.1f} tokens/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, and one line on stderr, for what is refused."""
    options, console, errors = parse_arguments(arguments), Console(), Console(stderr=True)
    try:
        engine = Engine.from_folder(
            options.model,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            device=options.device,
            cache_tokens=options.cache_tokens,
            max_step_tokens=options.step_tokens,
        )
        tokenizer = load_tokenizer(options.model, engine.config.vocab_size)
        texts = [
            *options.prompt,
            *(file.read_text(encoding="utf-8") for file in options.prompt_file),
        ]
        sampling = SamplingParams(options.temperature, options.top_p, options.seed)
        requests = [
            engine.add_request(
                tokenizer.encode(text),
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                stop_ids=options.stop_id,
            )
            for text in texts
        ]
    except (ValueError, OSError, AssertionError, RuntimeError) as error:  # the last two: a device
        errors.print(str(error), style="red", markup=False)
        return 2
    if options.stream:
        stream(engine, requests[0], tokenizer)
    else:
        run(engine, requests, console)
        for request in requests:
            console.rule(f"request {request.order}")
            print(tokenizer.decode(request.generated))
    for request in requests:
        errors.print(summary(request), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
