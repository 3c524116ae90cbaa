"""One thin function per operator, in the order of the flow: a docstring and one call."""

from .attend import paged_decode, sparse_decode, sparse_prefill
from .media import normalize_patches
from .merge import merge_lse
from .remap import KVBlockSchedule, kv_block_schedule
from .score import index_score
from .select import select_blocks, topk_blocks
from .view import DecodeView, decode_view
from .write import write_cache

__all__ = [
    "DecodeView",
    "KVBlockSchedule",
    "decode_view",
    "index_score",
    "kv_block_schedule",
    "merge_lse",
    "normalize_patches",
    "paged_decode",
    "select_blocks",
    "sparse_decode",
    "sparse_prefill",
    "topk_blocks",
    "write_cache",
]
