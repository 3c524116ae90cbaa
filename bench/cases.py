"""What to measure: preset names to cases. The shapes are data, in presets/*.json."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .inputs import Shape
from .operators import OPERATORS

FOLDER = Path(__file__).parent / "presets"
PHASES = ("prefill", "decode")
NO_PATTERN = "-"


@dataclass(frozen=True)
class Case:
    """One operator on one shape."""

    op: str
    phase: str
    preset: str
    shape: Shape
    dtype: str
    pattern: str
    weight: float | None = None
    """calls that the shape stands for in its mix"""
    peers: tuple[str, ...] = ()
    """whom to run beside; as a preset names them, those that its table compares with"""

    def __str__(self) -> str:
        """As a line of progress says it."""
        letters = " ".join(f"{k} {v}" for k, v in self.shape.to_json().items() if k != "K")
        pattern = "" if self.pattern == NO_PATTERN else f" {self.pattern}"
        return f"{self.phase} {self.op} {letters} {self.dtype}{pattern}"


@lru_cache
def models() -> dict[str, dict[str, int]]:
    """Model preset -> heads and K of a rank."""
    return _load("models.json")["models"]


@lru_cache
def shape_sets() -> dict[str, dict]:
    """Preset of shapes -> its description as in the files."""
    names = ("sweeps.json", "tables.json", "prefill_production.json", "decode_rollout.json")
    return {name: entry for file in names for name, entry in _load(file).items()}


def mix_weights() -> dict[str, float]:
    """Preset whose shapes have weights -> their sum."""
    weights = {
        name: float(sum(sum(row[3:]) for table in _tables(name) for row in table["cases"]))
        for name in shape_sets()
    }
    return {name: weight for name, weight in weights.items() if weight}


def operators_of(words: Sequence[str]) -> list[str]:
    """Operator names for the words of a command line: operators, "prefill", "decode", "all"."""
    names: dict[str, None] = {}
    for word in words:
        if word in OPERATORS:
            names[word] = None
        elif word == "all" or word in PHASES:
            fitting = (n for n, o in OPERATORS.items() if word == "all" or word in o.phases)
            names.update(dict.fromkeys(fitting))
        else:
            choices = ", ".join([*OPERATORS, *PHASES, "all"])
            raise ValueError(f"no operator is called {word!r}; there are {choices}")
    return list(names)


def expand(
    words: Sequence[str],
    presets: Sequence[str],
    *,
    dtypes: Sequence[str] | None = None,
    patterns: Sequence[str] | None = None,
    max_model_len: int = 0,
    shrink: bool = False,
) -> list[Case]:
    """The cases of a command line.

    Args:
        words: operators, "prefill", "decode" or "all".
        presets: names of models and of shape sets; models alone take the set "standard", shape sets
            alone the model they name, else "m3-tp1".
        dtypes: instead of a preset's own.
        patterns: instead of a preset's own.
        max_model_len: tokens that block tables have columns for, if more than a shape needs.
        shrink: to shapes that a CPU does at once.

    Raises:
        ValueError: an unknown name.
    """
    ops = operators_of(words)
    phases = {p for p in PHASES if p in words} or set(PHASES)
    if set(words) - set(PHASES):
        phases = set(PHASES)
    known = [*models(), *shape_sets()]
    for name in presets:
        if name not in known:
            raise ValueError(f"no preset is called {name!r}; there are {', '.join(known)}")
    chosen = [name for name in presets if name in models()]
    sets = [name for name in presets if name in shape_sets()] or ["standard"]

    cases: list[Case] = []
    for name in sets:
        for table in _tables(name):
            if table["phase"] not in phases:
                continue
            ours = [op for op in ops if table["phase"] in OPERATORS[op].phases]
            ours = [op for op in ours if op in table.get("ops", ops)]
            for model in chosen or [table.get("model", "m3-tp1")]:
                cases += _of_table(name, table, ours, model, dtypes, patterns)

    def final(shape: Shape) -> Shape:
        shape = dataclasses.replace(shape, max_model_len=max_model_len)
        return shape.shrunk() if shrink else shape

    return _merged(dataclasses.replace(case, shape=final(case.shape)) for case in cases)


def _tables(name: str) -> list[dict]:
    entry = shape_sets()[name]
    if "strata" in entry:
        rows = [(b, t, ctx, w) for b, t, ctx, w, _ in entry["strata"]]
    elif "weights_by_nominal_kv_len" in entry:
        rows = [
            (batch, batch * entry["q_len_per_req"], int(ctx), weight)
            for ctx, weights in entry["weights_by_nominal_kv_len"].items()
            for batch, weight in zip(entry["batch_sizes"], weights, strict=True)
        ]
    else:
        return entry["tables"]
    # The heaviest first: a run that is cut has then covered as much of the mix as it could.
    rows.sort(key=lambda row: -row[3])
    if "low_latency" in entry:  # beside the mix, without a weight in it
        few, q_len = entry["low_latency"], entry["q_len_per_req"]
        rows += [(b, b * q_len, ctx) for ctx in few["kv_lens"] for b in few["batch_sizes"]]
    return [{**entry, "cases": rows}]


def _of_table(name, table, ops, model, dtypes, patterns) -> Iterable[Case]:
    for op in ops:
        for dtype in dtypes or table.get("dtypes", ["bfloat16"]):
            kinds = patterns or table.get("patterns", ["uniform"])
            for pattern in kinds if OPERATORS[op].patterned else [NO_PATTERN]:
                for requests, tokens, ctx, *weight in table["cases"]:
                    shape = Shape.of(requests, tokens, ctx, **models()[model])
                    preset = name if "model" in table else f"{model},{name}"
                    yield Case(
                        op,
                        table["phase"],
                        preset,
                        shape,
                        dtype,
                        pattern,
                        float(weight[0]) if weight else None,
                        tuple(table.get("peers", ())),
                    )


def _merged(cases: Iterable[Case]) -> list[Case]:
    """Each case once; where shrinking made many one, their weights are added."""
    merged: dict[Case, float | None] = {}
    for case in cases:
        bare = dataclasses.replace(case, weight=None)
        total = merged.get(bare)
        merged[bare] = case.weight if total is None else total + (case.weight or 0)
    return [dataclasses.replace(case, weight=weight) for case, weight in merged.items()]


def _load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))
