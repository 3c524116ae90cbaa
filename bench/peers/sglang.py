"""SGLang's Triton kernels for MiniMax sparse attention, prefill and decode.

Loaded from an unpacked wheel (one folder). The files import platform predicates and one switch:
those are supplied here, with the switch to their run-time compiled CUDA top-k off.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from ..inputs import BLOCK, D, Inputs
from .base import Call, CannotRun, load_file, module, need_triton, stand_ins, version_of
from .vllm import decode_like

FILES = "sglang/kernels/ops/attention/minimax_sparse"
_NAME = "_msa_bench_sglang"


def load(folder: Path | None) -> "Sglang":
    """From `folder`."""
    need_triton()
    if folder is None or not (folder / FILES).is_dir():
        where = f"{folder} has no {FILES}" if folder else "no folder of unpacked files was named"
        raise CannotRun(where)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    no = SimpleNamespace(get=lambda: False)
    supplied = {
        "sglang": module("sglang"),
        "sglang.srt": module("sglang.srt"),
        "sglang.srt.utils": module(
            "sglang.srt.utils",
            is_gfx95_supported=lambda: False,
            is_hip=lambda: False,
            is_xpu=lambda: False,
        ),
        "sglang.srt.environ": module(
            "sglang.srt.environ",
            envs=SimpleNamespace(SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX=no),
        ),
        "sglang.srt.runtime_context": module(
            "sglang.srt.runtime_context",
            get_platform=lambda: SimpleNamespace(is_sm90=hopper),
        ),
    }
    try:
        with stand_ins(supplied):
            load_file(_NAME, folder / FILES / "__init__.py")
            parts = [
                importlib.import_module(f"{_NAME}.{part}")
                for part in (
                    "prefill.flash_with_topk_idx",
                    "prefill.topk_sparse",
                    "decode.flash_with_topk_idx",
                    "decode.topk_sparse",
                )
            ]
    except (ImportError, OSError, AttributeError) as error:
        raise CannotRun(f"sglang's files do not import: {error}") from error
    return Sglang(*parts, version=version_of("sglang", folder))


class Sglang:
    """See the module."""

    name = "sglang"

    def __init__(self, prefill_select, prefill, decode_select, decode, version: str) -> None:
        """The four imported files."""
        self.prefill_select, self.prefill = prefill_select, prefill
        self.decode_select, self.decode = decode_select, decode
        self.version = version

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        if inputs.dtypes.q == torch.float32:
            raise CannotRun("takes no float32")
        steps = {
            "select_blocks": self._select,
            "sparse_prefill": self._attend,
            "sparse_decode": self._attend,
            "msa_prefill": self._chain,
            "msa_decode": self._chain,
            "decode_step": self._chain,
        }
        if op not in steps:
            raise CannotRun(f"has no kernel of its own for {op}")
        if op in ("sparse_decode", "msa_decode", "decode_step") and not decode_like(inputs):
            raise CannotRun("decode takes as many query tokens of every request")
        return steps[op](op, inputs)

    def _select(self, op: str, inputs: Inputs) -> Call:
        shape = inputs.shape
        keys = inputs.index_k_cache.view(-1, 1, D)
        slots = slots_of_tokens(inputs)
        if op != "msa_prefill" and decode_like(inputs):
            request, lens = rows_as_requests(inputs)

            def run():
                _, ids, _ = self.decode_select.flash_decode_with_topk_idx(
                    q=inputs.index_q,
                    sink=None,
                    k_cache=keys,
                    v_cache=None,
                    req_to_token=slots,
                    seq_lens=lens,
                    max_seqlen=shape.ctx,
                    slot_ids=request,
                    block_size=BLOCK,
                    topk=shape.topk,
                    init_blocks=0,
                    local_blocks=1,
                    disable_index_value=True,
                    page_size=BLOCK,
                )
                return ids

            return Call(run)
        request = torch.arange(shape.num_requests, dtype=torch.int32, device=inputs.device)
        # Their block of queries is one token here, so such blocks are counted as tokens are. Given,
        # the counts are not read back from the device in each call.
        counted = {
            "cu_seqblocks_q": inputs.cu_seqlens_q,
            "max_seqblock_q": max(shape.q_lens),
            "all_seqblock_q": shape.num_tokens,
        }

        def run():
            _, ids = self.prefill_select.flash_prefill_with_topk_index(
                q=inputs.index_q,
                k_cache=keys,
                v_cache=None,
                sink=None,
                req_to_token=slots,
                slot_ids=request,
                cu_seqlens=inputs.cu_seqlens_q,
                seq_lens=inputs.seq_lens,
                prefix_lens=inputs.prefix_lens,
                max_seqlen_q=max(shape.q_lens),
                max_seqlen_k=shape.ctx,
                block_size_q=1,
                block_size_k=BLOCK,
                topk=shape.topk,
                init_blocks=0,
                local_blocks=1,
                disable_index_value=True,
                page_size=BLOCK,
                **counted,
            )
            return ids

        return Call(run)

    def _attend(self, op: str, inputs: Inputs, chained: bool = False) -> Call:
        shape = inputs.shape
        k, v = (_pool_of_slots(cache) for cache in inputs.kv("nhd"))
        slots = slots_of_tokens(inputs)
        selected = None if chained else inputs.ids
        if op in ("sparse_decode", "msa_decode", "decode_step"):
            request, lens = rows_as_requests(inputs)

            def run(ids=selected):
                return self.decode.flash_decode_with_gqa_share_sparse(
                    q=inputs.q,
                    sink=None,
                    k_cache=k,
                    v_cache=v,
                    req_to_token=slots,
                    seq_lens=lens,
                    slot_ids=request,
                    block_size=BLOCK,
                    topk_idx=ids,
                    page_size=BLOCK,
                )

            return Call(run)
        request = torch.arange(shape.num_requests, dtype=torch.int32, device=inputs.device)

        def run(ids=selected):
            return self.prefill.flash_prefill_with_gqa_share_sparse(
                q=inputs.q,
                k_cache=k,
                v_cache=v,
                sink=None,
                req_to_token=slots,
                slot_ids=request,
                topk_idx=ids,
                block_size_q=1,
                block_size_k=BLOCK,
                cu_seqlens=inputs.cu_seqlens_q,
                seq_lens=inputs.seq_lens,
                prefix_lens=inputs.prefix_lens,
                max_seqlen_q=max(shape.q_lens),
                cu_seqblocks_q=inputs.cu_seqlens_q,
                max_seqblock_q=max(shape.q_lens),
            )

        return Call(run)

    def _chain(self, op: str, inputs: Inputs) -> Call:
        select, attend = self._select(op, inputs).run, self._attend(op, inputs, chained=True).run

        def run():
            ids = select()
            return ids, attend(ids)

        return Call(run, note="select and attend; no write" if op == "decode_step" else None)


def slots_of_tokens(inputs: Inputs) -> torch.Tensor:
    """[B, max_blocks * 128] int32: the slot of every token of every request."""
    offset = torch.arange(BLOCK, dtype=torch.int32, device=inputs.device)
    slots = inputs.block_table.clamp(min=0)[..., None] * BLOCK + offset
    return slots.flatten(1).contiguous()


def rows_as_requests(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """([T] request of each token, [T] KV length it sees): a token as a request of its own."""
    return inputs.request.int(), (inputs.pos + 1).int()


def _pool_of_slots(cache: torch.Tensor) -> torch.Tensor:
    """[pages, Hkv, 128, D] over an NHD pool, as [slots, Hkv, D]."""
    return cache.transpose(1, 2).flatten(0, 1)
