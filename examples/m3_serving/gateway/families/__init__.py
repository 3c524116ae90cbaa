"""The model families that the gateway serves. A new one is a module here and one line below."""

from ..registry import FamilyRegistry
from .minimax_m3 import MiniMaxM3Family
from .qwen2_vl import Qwen2VLFamily

__all__ = ["MiniMaxM3Family", "Qwen2VLFamily", "default_registry"]


def default_registry() -> FamilyRegistry:
    """Every family with its default settings."""
    registry = FamilyRegistry()
    registry.register(MiniMaxM3Family())
    registry.register(Qwen2VLFamily())
    return registry
