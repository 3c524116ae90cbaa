"""A module as a process, and what a process and its children use, read from /proc."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A module, with its arguments, as a process that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Use:
    """Up to now."""

    own_cpu_s: float
    """seconds, of the process itself"""
    children_cpu_s: float
    """seconds, of its children, ended ones too"""
    own_bytes: int
    """resident"""
    children_bytes: int
    """resident, shared pages counted in each"""


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()  # from the state on: field 3 is index 0


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def use_of(pid: int) -> Use:
    """Of a process that runs."""
    own = _stat(pid)
    cpu = sum(map(int, own[13:15]))  # of children that ended
    resident = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            fields = _stat(int(entry))
            if int(fields[1]) == pid:
                cpu += sum(map(int, fields[11:13]))
                resident += _resident(int(entry))
        except (OSError, ValueError):
            continue  # it ended meanwhile
    return Use(sum(map(int, own[11:13])) / _TICKS, cpu / _TICKS, _resident(pid), resident)
