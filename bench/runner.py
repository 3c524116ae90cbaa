"""Runs cases: makes inputs, checks every contender, times those that are right, makes rows."""

import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from . import ceilings, machine, peers
from .cases import Case
from .check import Check, dense_attention
from .counters import Cost
from .counters import dense_attention as dense_cost
from .inputs import Inputs
from .operators import OPERATORS, Operator
from .peers import Call, CannotRun, Peer
from .rows import Row
from .timing import Clock, Prepared, Stats, poison, prepare

OURS = "ours"
_GEMM = "gemm"


@dataclass
class Options:
    """How to run, as the command line says."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    flushes: Sequence[str] = ("none",)
    peers: Sequence[str] = ()
    """all that some case names"""
    peer_dir: Path | None = None
    refcheck: bool = True
    layout: str = "interleaved"
    target_ms: float = 120.0
    """device time to measure each contender for, flushes left out"""
    budget_s: float | None = None
    """stop before the case that would start later than this"""
    debug: bool = False
    """print where a contender failed"""


class ContextLost(RuntimeError):
    """A contender did what the device does not recover from; the rows until then stand."""


@dataclass
class Contender:
    """One implementation on one case."""

    call: Call | None = None
    ready: Prepared | None = None
    check: Check | None = None
    reason: str | None = None
    stats: Stats | None = None

    @property
    def ok(self) -> bool | None:
        """None where nothing was looked at."""
        return None if self.check is None else self.check.ok


@dataclass
class Run:
    """A run of many cases."""

    options: Options
    say: Callable[[str], None] = print
    skipped: list[Case] = field(default_factory=list)
    """not run: the time was out"""
    peers: dict[str, Peer] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """peer -> why it is not there"""
    last_s: float = 0.0
    """what the last case took with compiling, checking and all, seconds"""

    def __post_init__(self) -> None:
        """Loads the peers."""
        for name in self.options.peers:
            try:
                self.peers[name] = peers.load(name, self.options.peer_dir)
            except CannotRun as reason:
                self.missing[name] = str(reason)

    def start(self, dtypes: set[str]) -> None:
        """Measures the ceilings; before the first row."""
        device = self.options.device
        self.began = time.monotonic()
        self.machine = machine.describe(device)
        self.commit = machine.commit()
        self.ceilings = ceilings.measure(device, dtypes, target_ms=min(60, self.options.target_ms))
        self.clocks = {
            flush: Clock(device, flush, target_ms=self.options.target_ms)
            for flush in self.options.flushes
        }
        self.gemm = ceilings.loop_gemm(device) if device.type == "cuda" else None

    def rows(self, cases: Sequence[Case]) -> Iterator[tuple[Case, list[Row]]]:
        """The rows of each case, as they come; what the time did not allow is in `skipped`."""
        for number, case in enumerate(cases):
            budget = self.options.budget_s
            if budget is not None and time.monotonic() - self.began > budget:
                self.skipped = list(cases[number:])
                return
            began = time.monotonic()
            try:
                rows = self.run(case)
            except ContextLost:
                raise
            except Exception as error:  # while it was counted or timed: the next may go well
                rows = [self._bare_row(case, self.options.flushes[0], reason=self._why(error))]
            self.last_s = time.monotonic() - began
            yield case, rows

    def run(self, case: Case) -> list[Row]:
        """One case: a row for each state of the L2 and each peer."""
        operator = OPERATORS[case.op]
        options = self.options
        inputs = Inputs(case.shape, case.dtype, case.pattern, options.device, layout=options.layout)
        if case.pattern not in ("uniform", "coherent", "shared"):
            inputs.pattern = "uniform"  # of what counts bytes by it
        contenders = {OURS: self._ours(operator, inputs)}
        for name in case.peers:
            if name in self.missing:
                continue
            peer = self.peers[name]
            contenders[name] = self._made(partial(peer.prepare, case.op, inputs))
        for contender in contenders.values():
            self._get_ready(contender, operator, inputs, graph=case.phase == "decode")

        rows = []
        costs = self._costs(operator, inputs, contenders)
        for flush in self.clocks:
            self._time(contenders, flush, with_gemm=case.phase == "prefill", seed=len(rows))
            rows += self._rows(case, operator, inputs, flush, contenders, costs)
        contenders.clear()
        del inputs
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        return rows

    def _ours(self, operator: Operator, inputs: Inputs) -> Contender:
        there, reason = operator.supported(inputs)
        if not there:
            return Contender(reason=reason)
        return self._made(partial(operator.ours, inputs))

    def _made(self, make: Callable[[], Call]) -> Contender:
        try:
            return Contender(make())
        except CannotRun as reason:
            return Contender(reason=str(reason))
        except Exception as error:  # a peer's own trouble is a row, not the end of the run
            return Contender(reason=self._why(error))

    def _get_ready(
        self, contender: Contender, operator: Operator, inputs: Inputs, graph: bool
    ) -> None:
        """Runs, checks and captures; leaves a reason where that is not possible."""
        call = contender.call
        if call is None:
            return
        try:
            first = call.run()
            contender.check = self._check(call, operator, inputs, first)
            del first
            if contender.ok is False:
                contender.reason = f"WRONG: {contender.check.message}"
                return
            contender.ready = self._prepare(contender, operator, inputs, graph)
            if contender.ok is False:
                contender.ready = None
                contender.reason = f"WRONG in a graph: {contender.check.message}"
                return
            contender.reason = contender.reason or call.note
        except Exception as error:  # as above
            contender.ready, contender.reason = None, self._why(error)

    def _prepare(
        self, contender: Contender, operator: Operator, inputs: Inputs, graph: bool
    ) -> Prepared:
        call, device = contender.call, self.options.device
        if not (graph and device.type == "cuda"):
            ready = prepare(call.run, device, graph=False)
            ready.on_host = call.on_host
            return ready
        try:
            ready = prepare(call.run, device, graph=True)
        except RuntimeError as error:  # for example a read-back within
            contender.reason = f"not in a graph: {self._why(error)}"
            torch.cuda.synchronize()
            return prepare(call.run, device, graph=False)
        if not call.writes_inputs:
            poison(ready.output)
        ready.run()
        contender.check = self._check(call, operator, inputs, ready.output)
        return ready

    def _check(self, call: Call, operator: Operator, inputs: Inputs, result) -> Check | None:
        if not self.options.refcheck:
            return None
        judge = dense_attention if call.dense else operator.check
        return judge(inputs, call.answer(result))

    def _why(self, error: Exception) -> str:
        if self.options.debug:
            traceback.print_exception(error)
        if self.options.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:  # nothing that runs after it would mean anything
                raise ContextLost(f"the CUDA context is lost: {lost}") from error
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return "out of memory"
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0]}"[:300]

    def _costs(self, operator: Operator, inputs: Inputs, contenders: dict) -> dict[str, Cost]:
        ours = operator.cost(inputs)
        dense = {n for n, c in contenders.items() if c.call is not None and c.call.dense}
        return {name: dense_cost(inputs) if name in dense else ours for name in contenders}

    def _time(self, contenders: dict, flush: str, with_gemm: bool, seed: int) -> None:
        ready = {name: c.ready for name, c in contenders.items() if c.ready is not None}
        self.loop_gemm = None
        for contender in contenders.values():
            contender.stats = None
        if not ready:
            return
        if with_gemm and self.gemm is not None:
            ready[_GEMM] = self.gemm
        stats = self.clocks[flush].measure(ready, seed=seed + random.Random(flush).randrange(1000))
        if _GEMM in stats:
            self.loop_gemm = ceilings.gemm_flops(ceilings.GEMM) / stats.pop(_GEMM).us / 1e6
        for name, measured in stats.items():
            contenders[name].stats = measured

    def _rows(self, case, operator, inputs, flush, contenders, costs) -> list[Row]:
        ours = contenders[OURS]
        peaks = ceilings.peaks(self.ceilings, operator.math_dtype(inputs))
        base = self._bare_row(case, flush, ours.reason)
        base.ok, base.max_err = ours.ok, ours.check.error if ours.check else None
        base.loop_gemm_tflops = self.loop_gemm
        base.bound_by = costs[OURS].floor_us(*peaks)[1]
        if ours.stats:
            base.us, base.p10, base.p90 = ours.stats.us, ours.stats.p10, ours.stats.p90
            base.graph, base.rounds = ours.ready.graph, ours.stats.rounds
            base.tflops, base.tbps, base.peak_share = _rates(costs[OURS], ours.stats.us, peaks)
        rows = []
        for name in case.peers:
            row = Row(**vars(base))
            row.peer = name
            if name in self.missing:
                row.peer_reason = self.missing[name]
            else:
                self._add_peer(row, name, contenders[name], costs[name], peaks)
            rows.append(row)
        return rows or [base]

    def _bare_row(self, case: Case, flush: str, reason: str | None) -> Row:
        """What is known without a measurement."""
        facts = dict(self.machine)
        return Row(
            op=case.op,
            phase=case.phase,
            preset=case.preset,
            shape=case.shape.to_json(),
            dtype=case.dtype,
            pattern=case.pattern,
            flush=flush,
            reason=reason,
            weight=case.weight,
            commit=self.commit,
            gpu=facts.pop("gpu"),
            date=machine.now(),
            machine=facts,
            ceilings=self.ceilings,
        )

    def _add_peer(self, row: Row, name: str, peer: Contender, cost: Cost, peaks) -> None:
        row.peer_version, row.peer_reason, row.peer_ok = (
            self.peers[name].version,
            peer.reason,
            peer.ok,
        )
        row.peer_err = peer.check.error if peer.check else None
        if peer.stats is None:
            return
        stats = peer.stats
        row.peer_us, row.peer_p10, row.peer_p90 = stats.us, stats.p10, stats.p90
        row.peer_tflops, row.peer_tbps, row.peer_share = _rates(cost, stats.us, peaks)
        if row.us is None:
            row.graph, row.rounds = peer.ready.graph, stats.rounds
        else:
            row.ratio = stats.us / row.us


def _rates(cost: Cost, us: float, peaks: tuple[float, float]) -> tuple[float, float, float]:
    """(1e12 FLOP/s, 1e12 bytes/s, share of the ceiling that bounds it)."""
    return cost.flops / us / 1e6, cost.bytes / us / 1e6, cost.floor_us(*peaks)[0] / us
