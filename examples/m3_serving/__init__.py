"""A minimal serving loop of MiniMax-M3's language model on `msa_kernels`; see README.md."""

from .cache import CacheFull
from .config import ModelConfig
from .engine import Engine
from .sampling import SamplingParams
from .scheduler import Request

__all__ = ["CacheFull", "Engine", "ModelConfig", "Request", "SamplingParams"]
