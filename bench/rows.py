"""A measured row and its JSON: one object a line, complete in itself."""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One operator on one shape: ours, and one peer beside it. Times in us, medians of cold calls.

    A time is None where there is none, and the reason beside it says why.
    """

    op: str
    phase: str
    """"prefill" | "decode\""""
    preset: str
    shape: dict[str, int]
    """B, T, ctx, Hq, Hkv, K, and q where every request has as many query tokens; counts"""
    dtype: str
    pattern: str
    """of the selection; "-" where there is none"""
    flush: str
    """state of the L2: "dirty" | "clean" | "none\""""
    us: float | None = None
    p10: float | None = None
    p90: float | None = None
    tflops: float | None = None
    """useful FLOP / time, 1e12 FLOP/s"""
    tbps: float | None = None
    """fewest bytes / time, 1e12 bytes/s"""
    peak_share: float | None = None
    """shortest time that the measured ceilings allow / time"""
    bound_by: str | None = None
    """"compute" | "memory": which ceiling that is"""
    ok: bool | None = None
    """agrees with the reference; None: not looked at"""
    max_err: float | None = None
    """relative error of a floating result; share of rows with a near tie of a selection"""
    reason: str | None = None
    """why there is no time, or what to know about it"""
    peer: str | None = None
    peer_us: float | None = None
    peer_p10: float | None = None
    peer_p90: float | None = None
    peer_tflops: float | None = None
    peer_tbps: float | None = None
    peer_share: float | None = None
    peer_ok: bool | None = None
    peer_err: float | None = None
    peer_reason: str | None = None
    peer_version: str | None = None
    ratio: float | None = None
    """peer_us / us: above 1, ours is faster"""
    weight: float | None = None
    """calls that the shape stands for in its mix"""
    graph: bool = False
    """timed as replays of a CUDA graph"""
    rounds: int = 0
    """calls timed"""
    loop_gemm_tflops: float | None = None
    """BF16 GEMM 8192^3 timed in the same shuffled loop, 1e12 FLOP/s"""
    commit: str = "unknown"
    gpu: str = "cpu"
    date: str = ""
    """UTC, ISO 8601"""
    machine: dict[str, Any] = field(default_factory=dict)
    """clocks, driver, versions"""
    ceilings: dict[str, float] = field(default_factory=dict)
    """measured in the same run, see ceilings.py"""

    @property
    def key(self) -> tuple:
        """What a row measures, whoever was measured beside it."""
        shape = tuple(sorted(self.shape.items()))
        return (self.op, self.phase, self.dtype, self.pattern, self.flush, shape)

    def to_json(self) -> str:
        """One line. Floats keep five significant digits: clocks are not better than that."""
        return json.dumps(_rounded(dataclasses.asdict(self)), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> "Row":
        """A row of this or a newer version: what it does not know is left out."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in json.loads(line).items() if k in names})


def read(path: str | Path) -> list[Row]:
    """The rows of a file, in order. A line that a run did not live to finish is left out.

    Raises:
        ValueError: another line is no row.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or (line.startswith("{") and not line.endswith("}")):
            continue
        try:
            rows.append(Row.from_json(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}, is no row: {error}") from error
    return rows


def append(path: str | Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file; each run adds its rows as they come, so that a cut loses none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # after a line that was cut: on a line of their own
                file.write(b"\n")
        file.write("".join(row.to_json() + "\n" for row in rows).encode())


def latest(rows: Iterable[Row], *, of_each_preset: bool = False) -> list[Row]:
    """Of rows that measure the same beside the same peer, the newest; in the order of the first.

    `of_each_preset`: one for every preset that has such a row, as the means of mixes need. Of rows
    with one date the last counts.
    """
    kept: dict[tuple, Row] = {}
    for row in rows:
        key = (*row.key, row.peer, row.preset if of_each_preset else None)
        if key not in kept or row.date >= kept[key].date:
            kept[key] = row
    return list(kept.values())


def by_date(rows: Iterable[Row]) -> list[Row]:
    """The oldest first."""
    return sorted(rows, key=lambda row: row.date)


@dataclass
class WeightedMean:
    """A mix of calls as one number: sum(weight us) / sum(weight) over what both were timed on."""

    preset: str
    op: str
    dtype: str
    pattern: str
    flush: str
    peer: str | None
    us: float | None
    peer_us: float | None
    ratio: float | None
    cases: int
    """shapes that count"""
    covered: float
    """share of the mix's weight that these shapes have"""


def weighted_means(
    rows: Iterable[Row], mixes: Mapping[str, float] | None = None
) -> list[WeightedMean]:
    """The headline of each mix (preset whose rows have weights), per operator, pattern and peer.

    `mixes`: preset -> weight of all its shapes, also those without a row.
    """
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in latest(rows, of_each_preset=True):
        if row.weight is not None:
            key = (row.preset, row.op, row.dtype, row.pattern, row.flush, row.peer)
            groups[key].append(row)
    means = []
    for key, group in groups.items():
        peer = key[-1]
        ours_there = any(row.us is not None for row in group)
        peer_there = peer is not None and any(row.peer_us is not None for row in group)
        timed = [
            row
            for row in group
            if (row.us is not None or not ours_there)
            and (row.peer_us is not None or not peer_there)
        ]
        weight = sum(row.weight for row in timed)
        if not weight or not (ours_there or peer_there):
            continue
        us = sum(r.weight * r.us for r in timed) / weight if ours_there else None
        peer_us = sum(r.weight * r.peer_us for r in timed) / weight if peer_there else None
        ratio = peer_us / us if us and peer_us else None
        whole = (mixes or {}).get(key[0].split(",")[-1], 0.0)
        covered = weight / max(whole, sum(row.weight for row in group))
        means.append(WeightedMean(*key, us, peer_us, ratio, len(timed), covered))
    return means


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x
