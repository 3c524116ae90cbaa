"""MiniMax Sparse Attention (MSA) as PyTorch custom operators.

Read `pipeline.py` first: one layer's attention, step by step. `ops/` has one function per operator,
`reference/` the definition of each in plain PyTorch, `python -m msa_kernels.info` tells what this
build runs on this machine.
"""

from importlib.metadata import PackageNotFoundError, version

from . import _load

_load.load_libraries()

from . import _fakes, debug, reference  # noqa: E402
from .ops import (  # noqa: E402
    DecodeView,
    KVBlockSchedule,
    decode_view,
    index_score,
    kv_block_schedule,
    merge_lse,
    normalize_patches,
    paged_decode,
    select_blocks,
    sparse_decode,
    sparse_prefill,
    topk_blocks,
    write_cache,
)
from .pipeline import Batch, PagedCache, dense_attention, msa_attention  # noqa: E402
from .positions import visible_blocks  # noqa: E402
from .support import build_info, is_supported  # noqa: E402

try:
    __version__ = version("msa_kernels")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = build_info()["cpu"]["version"]

_fakes.register()

__all__ = [
    "Batch",
    "DecodeView",
    "KVBlockSchedule",
    "PagedCache",
    "__version__",
    "build_info",
    "debug",
    "decode_view",
    "dense_attention",
    "index_score",
    "is_supported",
    "kv_block_schedule",
    "merge_lse",
    "msa_attention",
    "normalize_patches",
    "paged_decode",
    "reference",
    "select_blocks",
    "sparse_decode",
    "sparse_prefill",
    "topk_blocks",
    "visible_blocks",
    "write_cache",
]
