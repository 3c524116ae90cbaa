"""Builds the emulated kernels and calls them on torch's tensors."""

import ctypes
import os
import shlex
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = (
    HERE / "machine.cpp",
    HERE / "entry.cpp",
    HERE / "broken_kernels.cpp",
    CSRC / "step1_score/sm80/index_score_inst.cu",
    CSRC / "step1_score/sm90/index_score_inst.cu",
    CSRC / "step2_select/sm80/select_blocks_inst.cu",
    CSRC / "step2_select/sm80/topk_blocks_inst.cu",
    CSRC / "step2_select/sm90/bounded_select_inst.cu",
    CSRC / "step3_remap/sm80/kv_block_schedule_inst.cu",
    CSRC / "step4_attend/sm90/prefill_inst.cu",
    CSRC / "step3_view/sm80/decode_view_inst.cu",
    CSRC / "step4_attend/sm80/decode_inst.cu",
    CSRC / "step4_attend/sm90/decode_cluster_inst.cu",
    CSRC / "step4_attend/sm90/decode_pair_inst.cu",
    CSRC / "step4_attend/sm90/decode_quad_inst.cu",
    CSRC / "step4_attend/sm90/decode_stream_inst.cu",
    CSRC / "step4_attend/sm90/decode_tile_inst.cu",
    CSRC / "configs/built_configs.cpp",
    CSRC / "host/tensor_info.cpp",
)
# Kernels see one memory as bytes and as numbers; the shared memory has no constructor to look for.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-w", "-fno-strict-aliasing", "-fno-extern-tls-init"]
DEFINES = ["-DMSA_BACKEND_CUDA"]
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64)
"""of csrc/common/views.h, in its order"""


def build(
    folder: Path, csrc: Path = CSRC, sources: Iterable[Path] = SOURCES, others: Iterable[Path] = ()
) -> ctypes.CDLL:
    """Compiles the kernels in `csrc` for the CPU, and adds compiled others; seconds."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    includes = [f"-I{path}" for path in (HERE / "overlay", HERE, csrc)]

    def compile_source(source: Path) -> str:
        if source.is_relative_to(CSRC):
            source = csrc / source.relative_to(CSRC)
        target = str(folder / f"{source.parent.name}_{source.stem}.o")
        header = ["-include", "cuda_runtime.h"] if source.suffix == ".cu" else []  # as nvcc does
        options = [*FLAGS, *DEFINES, *includes, *header]
        run(*compiler, *options, "-x", "c++", "-c", str(source), "-o", target)
        return target

    def run(*command: str) -> None:
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr[-8000:]}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compile_source, sources), *map(str, others)]
    library = folder / "emulated_kernels.so"
    run(*compiler, "-shared", "-Wl,--no-undefined", *objects, "-o", str(library))
    return ctypes.CDLL(str(library))


class Launch(NamedTuple):
    kernel: str
    threads: int
    """of a CTA"""
    cluster: int
    """CTAs; 0: no clusters"""


class Emulator:
    """Calls of the library, each on so many SMs, in the order of a seed (0: in order).

    `batch`: block table, cu_seqlens_q and seq_lens, as a `Case` gives them.
    """

    def __init__(self, library: ctypes.CDLL, seed: int = 0, sms: int = 3, ctas_at_once: int = 1):
        self.library = library
        self.library.msa_emulate.restype = ctypes.c_char_p
        self.library.msa_emulated_kernels.restype = ctypes.c_char_p
        self.settings = [seed, sms, ctas_at_once]

    def _call(self, name: str, *arguments: list[int] | int) -> None:
        values = list(self.settings)
        for argument in arguments:
            values += argument if isinstance(argument, list) else [argument]
        error = self.library.msa_emulate(name.encode(), (ctypes.c_int64 * len(values))(*values))
        if error is not None:
            raise RuntimeError(error.decode())

    @property
    def launched(self) -> list[Launch]:
        """The kernels of the last call."""
        lines = self.library.msa_emulated_kernels().decode().splitlines()
        fields = [line.split() for line in lines]
        return [Launch(name, int(threads), int(cluster)) for name, threads, cluster in fields]

    def select_by_bounds(
        self, index_q, index_k_cache, *batch, window_tokens=None, **rule
    ) -> Tensor:
        """FP8 `select_blocks` by bounds, in windows of so many tokens."""
        pages = batch[0].size(1)
        windows = [window_tokens or index_q.size(0), -(-pages // 8) * 8]
        return self._select("select_by_bounds", index_q, index_k_cache, batch, windows, **rule)

    def select_blocks(self, index_q, index_k_cache, *batch, **rule) -> Tensor:
        return self._select("select_blocks", index_q, index_k_cache, batch, [], **rule)

    def _select(
        self,
        name: str,
        index_q,
        index_k_cache,
        batch: tuple[Tensor, ...],
        more: list[int],
        *,
        topk=16,
        init_blocks=0,
        local_blocks=1,
    ) -> Tensor:
        tokens, heads = index_q.shape[:2]
        ids = torch.full((heads, tokens, topk), -77, dtype=torch.int32)
        self._call(
            name,
            _rows(index_q),
            _cache(index_k_cache.unsqueeze(1)),
            _batch(tokens, *batch),
            [topk, init_blocks, local_blocks],
            _ids(ids),
            more,
        )
        return ids

    def topk_blocks(
        self, scores, visible_blocks, topk=16, *, init_blocks=0, local_blocks=1
    ) -> Tensor:
        heads, tokens, blocks = scores.shape
        ids = torch.full((heads, tokens, topk), -77, dtype=torch.int32)
        self._call(
            "topk_blocks",
            [scores.data_ptr(), heads, blocks, *scores.stride()],
            [visible_blocks.data_ptr(), visible_blocks.stride(0), tokens],
            [topk, init_blocks, local_blocks],
            _ids(ids),
        )
        return ids

    def index_score(self, index_q, index_k_cache, *batch, tile_rows: int) -> Tensor:
        """Scores of the blocks before the tokens' own; 12345 where none was written."""
        tokens, heads = index_q.shape[:2]
        scores = torch.full((heads, tokens, batch[0].size(1)), 12345.0)
        self._call(
            "score",
            _rows(index_q),
            _cache(index_k_cache.unsqueeze(1)),
            _batch(tokens, *batch),
            [scores.data_ptr(), heads, scores.size(2), *scores.stride()],
            tile_rows,
        )
        return scores

    def sparse_prefill(
        self, q, k_cache, v_cache, ids, *batch, batch_invariant=False, **scales
    ) -> tuple[Tensor, Tensor]:
        """out and LSE."""
        more = [*_ids(ids), int(batch_invariant)]
        return self._attend("sparse_prefill", q, k_cache, v_cache, batch, more, **scales)

    def sparse_decode(self, q, k_cache, v_cache, ids, *batch, **scales) -> tuple[Tensor, Tensor]:
        """out and LSE."""
        return self._attend("sparse_decode", q, k_cache, v_cache, batch, _ids(ids), **scales)

    def paged_decode(
        self, q, k_cache, v_cache, page_table, kv_lens, *, cu_seqlens_q=None, **scales
    ) -> tuple[Tensor, Tensor]:
        """out and LSE."""
        batch = (page_table, cu_seqlens_q, kv_lens)
        return self._attend("paged_decode", q, k_cache, v_cache, batch, [], **scales)

    def _attend(
        self,
        name: str,
        q,
        k_cache,
        v_cache,
        batch: tuple[Tensor | None, ...],
        more: list[int],
        *,
        k_scale=None,
        v_scale=None,
    ) -> tuple[Tensor, Tensor]:
        (tokens, heads, _), kv_heads = q.shape, k_cache.size(1)
        out = torch.full_like(q, -77, memory_format=torch.contiguous_format)
        lse = torch.full((tokens, heads), -77.0)
        self._call(
            name,
            _rows(q),
            _cache(k_cache),
            _cache(v_cache),
            _batch(tokens, *batch),
            _rows(out),
            [lse.data_ptr(), *lse.stride()],
            [0 if scale is None else scale.data_ptr() for scale in (k_scale, v_scale)],
            [kv_heads, heads // kv_heads],
            more,
        )
        return out, lse

    def decode_view(
        self,
        ids,
        block_table,
        cu_seqlens_q,
        seq_lens,
        num_pages: int,
        page_step: int,
        head_step: int,
    ) -> tuple[Tensor, Tensor]:
        """The page table and lengths of its rows."""
        heads, tokens, topk = ids.shape
        # Columns first, as strides may be.
        page_table = torch.full((topk, tokens * heads), -77, dtype=torch.int32).T
        kv_lens = torch.full((tokens * heads,), -77, dtype=torch.int32)
        self._call(
            "decode_view",
            _ids(ids),
            _batch(tokens, block_table, cu_seqlens_q, seq_lens),
            [num_pages, page_step, head_step],
            [page_table.data_ptr(), *page_table.stride()],
            [kv_lens.data_ptr(), *kv_lens.stride()],
        )
        return page_table, kv_lens

    def kv_block_schedule(
        self, ids, cu_seqlens_q, seq_lens, max_blocks: int, max_queries_per_item: int = 64
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """row_ptr, pairs, work items and how many."""
        heads, tokens, _ = ids.shape
        rows, pairs = heads * seq_lens.numel() * max_blocks, ids.numel()
        items = min(rows, pairs) + pairs // max_queries_per_item
        sizes = ((rows + 1,), (pairs,), (items, 3), (1,))
        results = tuple(torch.full(size, -77, dtype=torch.int32) for size in sizes)
        no_table = torch.empty(seq_lens.numel(), 0, dtype=torch.int32)
        self._call(
            "kv_block_schedule",
            _ids(ids),
            _batch(tokens, no_table, cu_seqlens_q, seq_lens),
            [max_blocks, max_queries_per_item],
            [result.data_ptr() for result in results],
            items,
        )
        return results

    def break_rule(self, rule: str) -> int:
        """A kernel that breaks it; returns what one read that did not wait for a copy of 4."""
        name, result = ctypes.create_string_buffer(rule.encode()), ctypes.c_int64()
        self._call("break_rule", [ctypes.addressof(name), ctypes.addressof(result)])
        return result.value


def _rows(x: Tensor) -> list[int]:
    return [x.data_ptr(), DTYPES.index(x.dtype), x.stride(0), x.stride(1)]


def _cache(cache: Tensor) -> list[int]:
    return [cache.data_ptr(), DTYPES.index(cache.dtype), cache.size(0), *cache.stride()[:3]]


def _batch(tokens: int, table: Tensor, cu_seqlens_q: Tensor | None, seq_lens: Tensor) -> list[int]:
    starts = [0, 0] if cu_seqlens_q is None else [cu_seqlens_q.data_ptr(), cu_seqlens_q.stride(0)]
    vectors = [*starts, seq_lens.data_ptr(), seq_lens.stride(0)]
    return [*vectors, table.data_ptr(), *table.stride(), table.size(0), tokens, table.size(1)]


def _ids(ids: Tensor) -> list[int]:
    heads, _, topk = ids.shape
    return [ids.data_ptr(), DTYPES.index(ids.dtype), heads, topk, *ids.stride()]
