"""FlashInfer's MSA operators: as installed, or its package unpacked into the folder of peers."""

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from ..inputs import Inputs
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
        raise CannotRun(f"has no kernel of its own for {op}")

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
                max_k_tiles=shape.max_blocks,
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
