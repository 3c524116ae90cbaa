"""Every operator in plain PyTorch: the definition that kernels are tested against, made to be read.

Names and argument order are those of `msa_kernels.ops`, without hints and without out=. Arithmetic
runs in `compute_dtype` (float32, or float64 to measure others by) and floating results come back in
it. They read lengths on the host, so they synchronise, and they are slow.
"""

from .attend import paged_decode, sparse_attention, sparse_decode, sparse_prefill
from .media import normalize_patches
from .merge import merge_lse
from .positions import BLOCK, Positions, find_pages, token_positions
from .remap import counted, kv_block_schedule
from .score import index_score
from .select import select_blocks, topk_blocks
from .view import decode_view
from .write import write_cache

__all__ = [
    "BLOCK",
    "Positions",
    "counted",
    "decode_view",
    "find_pages",
    "index_score",
    "kv_block_schedule",
    "merge_lse",
    "normalize_patches",
    "paged_decode",
    "select_blocks",
    "sparse_attention",
    "sparse_decode",
    "sparse_prefill",
    "token_positions",
    "topk_blocks",
    "write_cache",
]
