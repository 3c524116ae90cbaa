"""Progress of a long run: a bar where there is a terminal and rich, else plain lines."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Plain:
    """Plain lines, one for each thing said; the rest is counted in front of it."""

    def __init__(self, total: int) -> None:
        """`total`: cases."""
        self.total, self.done = total, 0

    def say(self, text: str) -> None:
        """Prints a line."""
        print(f"[{self.done}/{self.total}] {text}", flush=True)

    def advance(self, text: str) -> None:
        """One case is done."""
        self.done += 1
        self.say(text)


@contextmanager
def progress(total: int) -> Iterator[Plain]:
    """Something with `say` and `advance`."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield Plain(total)
        return
    if not sys.stdout.isatty():
        yield Plain(total)
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=total)

        class Bar(Plain):
            def say(self, text: str) -> None:
                bar.console.print(text, markup=False, highlight=False)

            def advance(self, text: str) -> None:
                self.say(text)
                bar.advance(task)

        yield Bar(total)
