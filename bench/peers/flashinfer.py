"""FlashInfer's MSA operators, and its paged decode, which knows nothing of MSA, over our view.

As installed, or its package unpacked into the folder of peers.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import msa_kernels as msa

from ..inputs import BLOCK, Inputs
from .base import Call, CannotRun, module, version_of
from .vllm import decode_like


def load(folder: Path | None) -> "FlashInfer":
    """From `folder`, else as installed; kernels are compiled at run time where there are none."""
    if folder is not None and (folder / "flashinfer" / "msa_ops").is_dir():
        version = version_of("flashinfer_python", folder)
        # The package without its __init__, which imports all of FlashInfer and what that needs. It
        # stays in sys.modules: its files import each other when they are called.
        sys.modules["flashinfer"] = module("flashinfer", __version__=version)
        sys.modules["flashinfer"].__path__ = [str(folder / "flashinfer")]
    elif importlib.util.find_spec("flashinfer") is not None:
        version = metadata.version("flashinfer-python")
    else:
        where = f"{folder} has no flashinfer/msa_ops" if folder else "no folder was named"
        raise CannotRun(f"flashinfer is not installed, and {where}")
    try:
        ops = importlib.import_module("flashinfer.msa_ops")
    except Exception as error:  # its import reaches into CUDA, compilers and caches
        sys.modules.pop("flashinfer", None)
        raise CannotRun(f"flashinfer.msa_ops does not import: {error}") from error
    return FlashInfer(ops, version, note=_without_cute_dsl())


def _without_cute_dsl() -> str | None:
    """Where the CuTe DSL is missing, asks for FlashInfer's CUDA programs; what to know then."""
    if importlib.util.find_spec("cutlass") is not None:
        return None
    dispatch = importlib.import_module("flashinfer.msa_ops._sm90_dispatch")
    for preference in ("_cute_proxy_decode_preferred", "_cute_prefill_preferred"):
        setattr(dispatch, preference, lambda *_: False)
    return "its CUDA programs: no CuTe DSL here, which it prefers for some shapes"


class FlashInfer:
    """See the module. What it does not serve it says itself when it is called."""

    name = "flashinfer"

    def __init__(self, ops: ModuleType, version: str, note: str | None = None) -> None:
        """`ops`: flashinfer.msa_ops; `note`: what to know about every row."""
        self.ops, self.version, self.note = ops, version, note

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        if op == "select_blocks":
            select = self._select(inputs)
            return Call(select, lambda ids: ids.transpose(0, 1), note=self.note)
        if op in ("sparse_prefill", "sparse_decode"):
            attend = self._attend(op, inputs)
            return Call(lambda: attend(inputs.ids), note=self.note)
        if op in ("msa_prefill", "msa_decode", "decode_step"):
            select, attend = self._select(inputs), self._attend(op, inputs)

            def run():
                ids = select().transpose(0, 1).contiguous()
                return ids, attend(ids)

            notes = [self.note, "select and attend; no write" if op == "decode_step" else None]
            return Call(run, note="; ".join(filter(None, notes)) or None)
        if op == "paged_decode":
            if inputs.scales:
                raise CannotRun("its paged decode is asked for bfloat16 caches")
            batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
            view = msa.decode_view(inputs.ids, *batch, *inputs.kv())
            q = inputs.q.unflatten(1, (inputs.shape.num_kv_heads, -1)).flatten(0, 1)
            run = self.paged_decode(q, *view)
            return Call(run, lambda pair: pair[0].view(inputs.q.shape), "decode_view before it")
        raise CannotRun(f"has no kernel of its own for {op}")

    @staticmethod
    def paged_decode(
        q: Tensor, page_table: Tensor, kv_lens: Tensor, k_pages: Tensor, v_pages: Tensor
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Its paged GQA decode, planned on the host for these lengths; gives (out, lse).

        q [R, G, D], one KV head; k_pages, v_pages [N, 1, 128, D] of any, equal strides.
        """
        decode = importlib.import_module("flashinfer.decode")
        pages = (kv_lens + BLOCK - 1) // BLOCK
        used = torch.arange(page_table.size(1), device=q.device) < pages[:, None]
        row_ptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        space = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(space, "HND")
        wrapper.plan(
            row_ptr,
            page_table[used],
            (kv_lens - (pages - 1) * BLOCK).int(),
            q.size(1),
            1,
            q.size(2),
            BLOCK,
            q_data_type=q.dtype,
            kv_data_type=k_pages.dtype,
        )

        def run() -> tuple[Tensor, Tensor]:
            out, lse = wrapper.run(q, (k_pages, v_pages), return_lse=True)
            return out, lse * math.log(2)  # it counts in powers of 2

        return run

    def _select(self, inputs: Inputs):
        shape, keys = inputs.shape, inputs.index_k_cache[:, None]
        visible = inputs.visible
        ids = torch.empty(
            (shape.num_tokens, shape.num_kv_heads, shape.topk),
            dtype=torch.int32,
            device=inputs.device,
        )

        def run():
            scores = self.ops.msa_proxy_score(
                inputs.index_q,
                keys,
                inputs.cu_seqlens_q,
                page_table=inputs.block_table,
                seqused_k=inputs.seq_lens,
                causal=True,
                max_seqlen_q=max(shape.q_lens),
                max_k_tiles=shape.ctx_blocks,
            )
            return self.ops.msa_topk_select(
                scores, shape.topk, num_valid_pages=visible, output=ids, force_end_blocks=1
            )

        return run

    def _attend(self, op: str, inputs: Inputs):
        k, v = inputs.kv("interleaved")
        batch = {"page_table": inputs.block_table, "seqused_k": inputs.seq_lens, "causal": True}
        if op in ("sparse_decode", "msa_decode", "decode_step"):
            if not decode_like(inputs):
                raise CannotRun("decode takes as many query tokens of every request")
            q_len = inputs.shape.q_len
            return lambda ids: self.ops.msa_sparse_decode_attention(
                inputs.q, k, v, ids, seqlen_q=q_len, **batch
            )
        return lambda ids: self.ops.msa_sparse_attention(
            inputs.q, k, v, ids, inputs.cu_seqlens_q, **batch
        )
