"""A minimal serving loop of MiniMax-M3's language model on `msa_kernels`; see README.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import CacheFull
    from .config import ModelConfig
    from .engine import Engine
    from .sampling import SamplingParams
    from .scheduler import Request

__all__ = ["CacheFull", "Engine", "ModelConfig", "Request", "SamplingParams"]

_MODULES = {
    "CacheFull": "cache",
    "Engine": "engine",
    "ModelConfig": "config",
    "Request": "scheduler",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `gateway` beside the engine runs without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
