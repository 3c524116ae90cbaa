"""Two results files, row by row: faster, slower, or the same beyond the spread."""

from collections.abc import Iterable
from dataclasses import dataclass

from .rows import Row, by_date, latest

NOISE = 0.02
"""relative difference that no verdict is given on, whatever the spread: what a second run shows"""


@dataclass(frozen=True)
class Verdict:
    """One measurement in both files."""

    name: str
    old_us: float | None
    new_us: float | None
    verdict: str
    """"faster" | "slower" | "same" | "wrong" | "lost" | "new\""""
    ours: bool
    """of our operator; else of a peer, which says how alike the machines were"""

    @property
    def change(self) -> float | None:
        """new / old - 1."""
        if self.old_us is None or self.new_us is None:
            return None
        return self.new_us / self.old_us - 1

    @property
    def regression(self) -> bool:
        """Slower than it was, wrong, or not there any more."""
        return self.ours and self.verdict in ("slower", "wrong", "lost")


def compare(old: Iterable[Row], new: Iterable[Row]) -> list[Verdict]:
    """A verdict for everything that either file measured, ours first."""
    before, after = _measurements(old), _measurements(new)
    verdicts = []
    for key in dict.fromkeys([*before, *after]):
        name, ours = key
        verdicts.append(_judge(name, ours, before.get(key), after.get(key)))
    return sorted(verdicts, key=lambda v: not v.ours)


def _judge(name: str, ours: bool, old: tuple | None, new: tuple | None) -> Verdict:
    old_us, old_p10, old_p90, _ = old or (None,) * 4
    new_us, new_p10, new_p90, ok = new or (None,) * 4
    if ok is False:
        verdict = "wrong"
    elif new_us is None:
        verdict = "lost"
    elif old_us is None:
        verdict = "new"
    elif new_p10 > old_p90 and new_us > old_us * (1 + NOISE):
        verdict = "slower"
    elif new_p90 < old_p10 and new_us < old_us * (1 - NOISE):
        verdict = "faster"
    else:
        verdict = "same"
    return Verdict(name, old_us, new_us, verdict, ours)


def _measurements(rows: Iterable[Row]) -> dict[tuple[str, bool], tuple]:
    """(name, ours) -> (us, p10, p90, ok) of everything that was timed, or found wrong."""
    found = {}
    for row in by_date(latest(rows)):  # ours stands beside several peers: the newest counts
        if row.us is not None or row.ok is False:
            found[_name(row), True] = (row.us, row.p10, row.p90, row.ok)
        if row.peer is not None and (row.peer_us is not None or row.peer_ok is False):
            name = f"{_name(row)} {row.peer}"
            found[name, False] = (row.peer_us, row.peer_p10, row.peer_p90, row.peer_ok)
    return found


def _name(row: Row) -> str:
    letters = " ".join(f"{k} {v}" for k, v in row.shape.items() if k != "K")
    pattern = "" if row.pattern == "-" else f" {row.pattern}"
    return f"{row.phase} {row.op} {letters} {row.dtype}{pattern} {row.flush}"


def render(verdicts: Iterable[Verdict]) -> str:
    """As lines of text, and a summary."""
    verdicts = list(verdicts)
    lines = []
    for v in verdicts:
        times = " -> ".join("-" if us is None else f"{us:.1f}" for us in (v.old_us, v.new_us))
        change = "" if v.change is None else f" {v.change:+.1%}"
        lines.append(f"{v.verdict:<7}{times} us{change}  {v.name}")
    counts: dict[str, int] = {}
    for v in verdicts:
        if v.ours:
            counts[v.verdict] = counts.get(v.verdict, 0) + 1
    summary = ", ".join(f"{n} {word}" for word, n in sorted(counts.items())) or "nothing of ours"
    return "\n".join([*lines, f"ours: {summary}"])
