"""What one would use instead: adaptors to other kernels, none of whose code is here."""

import importlib
import os
from pathlib import Path

from .base import Call, CannotRun, Peer

NAMES = ("vllm", "sglang", "flashinfer", "dense", "torch", "host")
ENVIRONMENT = "MSA_BENCH_PEER_DIR"
"""names the folder of unpacked files where --peer-dir does not"""


def load(name: str, folder: str | Path | None = None) -> Peer:
    """The peer of that name; raises CannotRun with the reason when it cannot be had."""
    if name not in NAMES:
        raise CannotRun(f"no peer is called {name!r}; there are {', '.join(NAMES)}")
    folder = folder or os.environ.get(ENVIRONMENT)
    found = importlib.import_module(f"{__name__}.{name}")
    return found.load(Path(folder) if folder else None)


__all__ = ["ENVIRONMENT", "NAMES", "Call", "CannotRun", "Peer", "load"]
