"""How long a call takes with a cold L2, several contenders in one shuffled loop.

State of the L2 before each timed call:
    dirty  256 MB were just zeroed, so the cache is full of lines that the timed call's reads must
           first write back; what `triton.testing.do_bench` does
    clean  the same, then 320 MB were read: the cache is cold and clean, which is nearer to serving
    none   whatever the last call left there

Decode is timed as replays of a CUDA graph, since its launches cost more than its work. Elsewhere a
sleeping kernel stands in front where the host is slower than the device: the device is timed.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLUSHES = ("dirty", "clean", "none")
_DIRTY_BYTES = 256 << 20
_CLEAN_BYTES = 320 << 20
_FLUSH_US = 60
"""what the zeroing takes at least, us: time in which the host may run ahead"""
_SLACK_US = 100
"""what a busy host may be late by, us, without the device waiting for it"""


@dataclass(frozen=True)
class Stats:
    """Times of one contender, us."""

    us: float
    """median"""
    p10: float
    p90: float
    rounds: int

    @staticmethod
    def of(times: Sequence[float]) -> "Stats":
        """Of measured times, us."""
        if len(times) == 1:
            return Stats(times[0], times[0], times[0], 1)
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        return Stats(statistics.median(times), tenths[0], tenths[-1], len(times))


@dataclass
class Prepared:
    """A call that is ready to be timed."""

    run: Callable[[], Any]
    graph: bool = False
    output: Any = None
    """of a graph: the tensors that every replay writes"""
    host_us: float = 0.0
    """time the host needs to launch it, us"""
    on_host: bool = False
    """starts on an idle device, see `Call`"""


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device, flush: str, *, target_ms: float = 120.0) -> None:
        """`target_ms`: how long to measure each contender, flushes left out."""
        self.cuda = device.type == "cuda"
        self.flush = flush if self.cuda else "none"
        self.target_ms = target_ms
        if self.cuda:
            self.dirty = torch.empty(_DIRTY_BYTES // 4, dtype=torch.int32, device=device)
            self.clean = torch.zeros(_CLEAN_BYTES // 4, dtype=torch.float32, device=device)
            self.sink = torch.empty((), dtype=torch.float32, device=device)

    def measure(self, calls: Mapping[str, Prepared], seed: int = 0) -> dict[str, Stats]:
        """The times of every call, all of them in each round, in an order drawn anew."""
        first = {name: self._once(call) for name, call in calls.items()}
        first = {name: min(us, self._once(calls[name])) for name, us in first.items()}
        slowest = max(first.values())
        rounds = int(self.target_ms * 1e3 * len(calls) / sum(first.values()))
        least = 10 if slowest < 5e4 else 5
        if not self.cuda:
            least = 3
        rounds = max(least, min(100, rounds))
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, rng = list(calls), random.Random(seed)
        for _ in range(rounds):
            rng.shuffle(order)
            if self.cuda:
                pairs = {name: self._enqueue(calls[name]) for name in order}
                torch.cuda.synchronize()
                for name, (begin, end) in pairs.items():
                    times[name].append(begin.elapsed_time(end) * 1e3)
            else:
                for name in order:
                    times[name].append(self._once(calls[name]))
        return {name: Stats.of(measured) for name, measured in times.items()}

    def flush_l2(self) -> None:
        """Enqueues what brings the L2 into the state asked for."""
        if self.flush != "none":
            self.dirty.zero_()
        if self.flush == "clean":
            torch.sum(self.clean, dim=0, out=self.sink)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def _once(self, call: Prepared) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            call.run()
            return (time.perf_counter() - begin) * 1e6
        begin, end = self._enqueue(call)
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def _enqueue(self, call: Prepared) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        lead_us = call.host_us * 1.5 + _SLACK_US - (0 if self.flush == "none" else _FLUSH_US)
        if call.on_host:
            lead_us = 0
        if lead_us > 0:
            torch.cuda._sleep(int(lead_us * 2000))  # about 2000 cycles a us
        self.flush_l2()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        if call.on_host:
            torch.cuda.synchronize()
        begin.record()
        call.run()
        end.record()
        return begin, end


def prepare(run: Callable[[], Any], device: torch.device, graph: bool) -> Prepared:
    """Warms a call up, and captures it where a graph is asked for.

    Raises:
        RuntimeError: what the call raises; for a graph also that it cannot be captured.
    """
    if device.type != "cuda":
        run()
        return Prepared(run)
    if not graph:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        host_us = (time.perf_counter() - begin) * 1e6
        torch.cuda.synchronize()
        return Prepared(run, host_us=host_us)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        output = run()
    captured.replay()
    torch.cuda.synchronize()
    return Prepared(captured.replay, graph=True, output=output, host_us=20.0)


def poison(output: Any) -> None:
    """Overwrites every tensor of a result, so that what a replay does not write shows."""
    if isinstance(output, Tensor):
        if output.dtype.is_floating_point and output.dtype.itemsize > 1:
            output.fill_(float("nan"))
        elif not output.dtype.is_floating_point:
            output.fill_(-77)
    elif isinstance(output, (tuple, list)):
        for part in output:
            poison(part)
