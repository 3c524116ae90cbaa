"""For a profiler: calls on the inputs of a benchmark, and the CSV of ncu as a table."""

import contextlib
import csv
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from .check import Check
from .inputs import Inputs
from .operators import Operator
from .timing import Clock


def call(
    operator: Operator,
    inputs: Inputs,
    *,
    flush: str = "clean",
    calls: int = 1,
    region: Callable[[], AbstractContextManager] | None = None,
) -> Check:
    """Calls ours once and looks at the result, then calls it again inside of regions.

    Args:
        operator: what to call.
        inputs: on what. Work on their device has ended when a region begins and when it ends.
        flush: state of the L2 before each region, see `timing.py`; nothing of it is in the region.
        calls: regions, one call each.
        region: makes a region; None: cudaProfilerStart to cudaProfilerStop on a GPU, else nothing.

    Returns:
        The verdict on the first call, which warms up and is in no region.

    Raises:
        RuntimeError: this build or device does not run the operator, or its result is wrong.
    """
    there, reason = operator.supported(inputs)
    if not there:
        raise RuntimeError(reason)
    ours = operator.ours(inputs)
    check = operator.check(inputs, ours.answer(ours.run()))
    if not check.ok:
        raise RuntimeError(f"WRONG: {check.message}")
    clock = Clock(inputs.device, flush)
    if region is None:
        region = torch.cuda.profiler.profile if clock.cuda else contextlib.nullcontext
    for _ in range(calls):
        clock.flush_l2()
        clock.synchronize()
        with region():
            ours.run()
            clock.synchronize()
    return check


_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_US |= {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}
_TIME = "gpu__time_duration.sum"
_SHARES = {
    "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "HBM": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
"""column -> metric, per cent of its peak"""


def kernels(path: str | Path) -> str:
    """The Markdown table of a file of `ncu --page raw --csv`: a line for each launch, in order.

    Raises:
        ValueError: the file holds no launch, or not the time of each.
    """
    text = Path(path).read_text(encoding="utf-8")
    # What ncu says besides begins with ==; a launch, and the two lines above it, with a quote.
    lines = [line for line in text.splitlines() if line.startswith('"')]
    units, *launches = csv.DictReader(lines) if len(lines) > 2 else [{}]
    if _TIME not in units or "Kernel Name" not in units:
        raise ValueError(f"{path} must hold what ncu --page raw --csv prints, with {_TIME}")
    table = [
        "| kernel | us | " + " | ".join(_SHARES) + " |",
        "| --- " * (2 + len(_SHARES)) + "|",
    ]
    for launch in launches:
        shares = (_number(launch.get(metric)) for metric in _SHARES.values())
        cells = ["-" if share is None else f"{share:.0f} %" for share in shares]
        us = (_number(launch[_TIME]) or 0.0) * _US[units[_TIME]]
        table.append(" | ".join(["| " + _name(launch["Kernel Name"]), f"{us:.1f}", *cells]) + " |")
    return "\n".join(table)


def _name(kernel: str) -> str:
    """A kernel's name without namespace, template arguments and parameters."""
    ours = re.search(r"\bmsa_\w+", kernel)
    return ours[0] if ours else re.split(r"[<(]", kernel.removeprefix("void "))[0]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # "n/a"
        return None
