"""vLLM's Triton kernels for MiniMax-M3: score and top-k, sparse attention.

Loaded from an unpacked wheel (two files), or from an installed vLLM. The files import a platform
object, the triton module and a rounding helper: those are supplied here.
"""

import importlib
import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from ..inputs import BLOCK, FP8, D, Inputs
from .base import Call, CannotRun, load_file, module, need_triton, stand_ins, version_of

FILES = "vllm/models/minimax_m3/common/ops"


class Platform:
    """What the files ask of the platform object."""

    def is_cuda(self) -> bool:
        """Whether this is an NVIDIA GPU."""
        return torch.cuda.is_available()

    def is_rocm(self) -> bool:
        """Never: the library is for NVIDIA GPUs."""
        return False

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        """Whether the current device has exactly this compute capability."""
        return self.is_cuda() and torch.cuda.get_device_capability() == tuple(capability)

    def is_arch_support_pdl(self) -> bool:
        """Programmatic dependent launch: Hopper and later."""
        return self.is_cuda() and torch.cuda.get_device_capability() >= (9, 0)


def load(folder: Path | None) -> "Vllm":
    """From `folder`, else as installed."""
    triton = need_triton()
    if folder is None or not (folder / FILES).is_dir():
        if importlib.util.find_spec("vllm") is None:
            where = (
                f"{folder} has no {FILES}" if folder else "no folder of unpacked files was named"
            )
            raise CannotRun(f"vllm is not installed, and {where}")
        package = "vllm.models.minimax_m3.common.ops"
        try:
            index = importlib.import_module(f"{package}.index_topk")
            attend = importlib.import_module(f"{package}.sparse_attn")
        except ImportError as error:
            raise CannotRun(f"the installed vllm does not import: {error}") from error
        return Vllm(index, attend, metadata.version("vllm"))
    math = module("vllm.utils.math_utils", round_up=lambda x, step: -(-x // step) * step)
    supplied = {
        "vllm": module("vllm"),
        "vllm.platforms": module("vllm.platforms", current_platform=Platform()),
        "vllm.triton_utils": module("vllm.triton_utils", tl=triton.language, triton=triton),
        "vllm.utils": module("vllm.utils", math_utils=math),
        "vllm.utils.math_utils": math,
    }
    try:
        with stand_ins(supplied):
            index = load_file("_msa_bench_vllm_index", folder / FILES / "index_topk.py")
            attend = load_file("_msa_bench_vllm_attend", folder / FILES / "sparse_attn.py")
    except (ImportError, OSError, AttributeError) as error:
        raise CannotRun(f"vllm's files do not import: {error}") from error
    return Vllm(index, attend, version_of("vllm", folder))


class Vllm:
    """See the module."""

    name = "vllm"

    def __init__(self, index: ModuleType, attend: ModuleType, version: str) -> None:
        """`index`, `attend`: the two imported files."""
        self.index, self.attend, self.version = index, attend, version

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        if inputs.dtypes.q == torch.float32:
            raise CannotRun("takes no float32")
        steps = {
            "index_score": self._score,
            "select_blocks": self._select,
            "sparse_prefill": self._attend_prefill,
            "sparse_decode": self._attend_decode,
            "msa_prefill": self._chain,
            "msa_decode": self._chain,
            "decode_step": self._chain,
        }
        if op not in steps:
            raise CannotRun(f"has no kernel of its own for {op}")
        return steps[op](op, inputs)

    def _score(self, op: str, inputs: Inputs) -> Call:
        shape = inputs.shape
        args = (
            inputs.index_q,
            inputs.index_k_cache,
            inputs.block_table,
            inputs.cu_seqlens_q,
            inputs.seq_lens,
            inputs.prefix_lens,
            max(shape.q_lens),
            shape.ctx,
            shape.num_kv_heads,
        )

        def answer(score):
            seen = shape.ctx_blocks  # its scores are as wide as the longest request
            block = torch.arange(seen, device=score.device)
            hidden = block >= inputs.visible[:, None]
            score = score[..., :seen].masked_fill(hidden, float("-inf"))
            return torch.nn.functional.pad(score, (0, shape.max_blocks - seen), value=float("-inf"))

        return Call(lambda: self.index.minimax_m3_index_score(*args), answer)

    def _select(self, op: str, inputs: Inputs) -> Call:
        shape = inputs.shape
        if decode_like(inputs):
            q_len = shape.q_len
            args = (
                inputs.index_q,
                inputs.index_k_cache,
                inputs.block_table,
                inputs.seq_lens,
                shape.ctx,
                shape.topk,
                0,
                1,
                shape.num_kv_heads,
                q_len,
                q_len,
            )
            return Call(lambda: self.index.minimax_m3_index_decode(*args))
        score = self._score(op, inputs).run
        args = (inputs.cu_seqlens_q, inputs.prefix_lens, max(shape.q_lens), shape.topk, 0, 1)
        return Call(lambda: self.index.minimax_m3_index_topk(score(), *args))

    def _attend_prefill(self, op: str, inputs: Inputs, ids=None) -> Call:
        kv, scales, scale = packed(inputs), _scales(inputs), D**-0.5
        out = torch.empty_like(inputs.q)
        batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens, inputs.prefix_lens)
        last = (max(inputs.shape.q_lens), inputs.shape.num_kv_heads, scale, out, *scales)

        def run(ids=inputs.ids if ids is None else ids):
            self.attend.minimax_m3_sparse_attn(inputs.q, kv, ids, *batch, *last)
            return out

        return Call(run)

    def _attend_decode(self, op: str, inputs: Inputs, ids=None) -> Call:
        if inputs.shape.q_len is None:
            raise CannotRun("decode takes as many query tokens of every request")
        kv, scales, scale = packed(inputs), _scales(inputs), D**-0.5
        out = torch.empty_like(inputs.q)
        last = (inputs.shape.num_kv_heads, scale, out, inputs.shape.q_len, *scales)

        def run(ids=inputs.ids if ids is None else ids):
            table, lens = inputs.block_table, inputs.seq_lens
            self.attend.minimax_m3_sparse_attn_decode(inputs.q, kv, ids, table, lens, *last)
            return out

        return Call(run)

    def _chain(self, op: str, inputs: Inputs) -> Call:
        select = self._select(op, inputs).run
        attend = self._attend_prefill if op == "msa_prefill" else self._attend_decode
        nothing = inputs.block_table.new_empty(0)
        run_attend = attend(op, inputs, ids=nothing).run

        def run():
            ids = select()
            return ids, run_attend(ids)

        return Call(run, note="select and attend; no write" if op == "decode_step" else None)


def decode_like(inputs: Inputs) -> bool:
    """Whether an engine would send this batch down its decode path: few tokens, as many for all."""
    return inputs.shape.q_len is not None and inputs.shape.q_len <= 16


def packed(inputs: Inputs) -> torch.Tensor:
    """[pages, Hkv, 128, 2 D]: the pool whose halves K and V are."""
    k, _ = inputs.kv("interleaved")
    return k.as_strided((*k.shape[:3], 2 * D), k.stride())


def _scales(inputs: Inputs) -> tuple:
    if inputs.dtypes.cache != FP8:
        return ()
    return inputs.scales["k_scale"], inputs.scales["v_scale"]


assert BLOCK == 128  # the page of their kernels
