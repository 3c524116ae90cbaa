"""`python -m tests.every_kernel`: each operator on shapes that reach each of its kernels, once.

Small, and without a look at results: for compute-sanitizer, which `python -m bench.gpu_check
--sanitize memcheck,racecheck` runs over it. MSA_FORCE_PORTABLE=1 gives a Hopper GPU the others'
kernels.
"""

import argparse
import functools
from collections.abc import Iterator

import torch

import msa_kernels as msa
from tests.inputs import FP8, copied_caches, make_case

BF16 = torch.bfloat16
Call = functools.partial


def main(argv: list[str] | None = None) -> int:
    """Runs the calls; prints each before it starts."""
    parser = argparse.ArgumentParser(prog="python -m tests.every_kernel", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--match", default="", help="only calls whose name has this in it")
    options = parser.parse_args(argv)
    device = options.device
    for name, call in calls(device):
        if options.match not in name:
            continue
        print(name, flush=True)
        call()
        if device != "cpu":
            torch.cuda.synchronize()
    return 0


def calls(device: str) -> Iterator[tuple[str, Call]]:
    """(what it is, a call without arguments: a partial, so that its tensors can be got at)."""
    for cache in (BF16, FP8):
        yield from _attend(device, cache)
        yield from _select(device, cache)
        case = make_case([(3, 300), (70, 700)], dtype=BF16, cache_dtype=cache, device=device)
        case = copied_caches(case, "nan")
        new = (case.k, case.v, case.index_k, case.slot_mapping)
        caches = (case.k_cache, case.v_cache, case.index_k_cache)
        yield f"write_cache {cache}", _later(_written, *new, *caches, **case.scales)

    # A kernel for each number of warps a row and of scores a lane; the sixth and seventh need rows.
    few = [(2, 5, 20), (1, 40, 400), (1, 40, 900), (1, 3, 2000), (1, 3, 5000)]
    for heads, tokens, blocks in (
        *few,
        (3, 690, 1100),
        (3, 690, 2100),
        (1, 3, 16384),
        (1, 3, 16385),
    ):
        scores = torch.randn(heads, tokens, blocks).to(device)
        visible = torch.full((tokens,), blocks, dtype=torch.int32, device=device)
        yield f"topk_blocks {blocks}", _later(msa.topk_blocks, scores, visible, 16)

    case = make_case([(70, 2500), (3, 300)], hq=8, hkv=4, dtype=BF16, device=device)
    schedule = (case.ids, case.cu_seqlens_q, case.seq_lens, case.block_table.size(1))
    yield "kv_block_schedule", _later(msa.kv_block_schedule, *schedule, max_queries_per_item=16)
    view = (case.ids, *case.batch, case.k_cache, case.v_cache)
    yield "decode_view", _later(msa.decode_view, *view)

    for parts in (2, 5, 16):
        outs = torch.randn(parts, 9, 16, 128).to(device, BF16)
        lses = torch.randn(parts, 9, 16).to(device)
        yield f"merge_lse {parts}", _later(msa.merge_lse, outs, lses)
        yield f"merge_lse {parts} apart", _later(msa.merge_lse, list(outs), list(lses))

    for frames in (1, 2):
        pixels = torch.arange(70 * frames * 588, dtype=torch.int32).remainder(251)
        patches = pixels.to(device, torch.uint8).view(70, -1)
        for dtype in (torch.float32, BF16):
            yield (
                f"normalize_patches {frames} {dtype}",
                _later(msa.normalize_patches, patches, [0.5] * 3, [0.25] * 3, dtype=dtype),
            )


def _attend(device: str, cache: torch.dtype) -> Iterator[tuple[str, Call]]:
    prefill = {
        # few tokens; enough for query-major tiles; one selection for all; nothing to select; more
        # slots than a round has; ids and pages that are none
        "few": dict(lengths=[(60, 2600), (5, 300)], hq=64, hkv=4),
        "tiles": dict(lengths=[(280, 2900), (30, 2500)], hq=64, hkv=4),
        "shared": dict(lengths=[(280, 2900)], hq=64, hkv=4, selection="same"),
        "narrow": dict(lengths=[(280, 700), (30, 300)], hq=16, hkv=2, max_pages=8),
        "rounds": dict(
            lengths=[(2000, 2000)], hq=64, hkv=4, topk=32, max_pages=40, selection="none"
        ),
        "garbage": dict(
            lengths=[(60, 2600)], hq=16, hkv=1, topk=32, max_pages=40, selection="garbage_tail"
        ),
        **{f"G {group}": dict(lengths=[(90, 2600)], hq=group, hkv=1) for group in (1, 2, 4, 8)},
    }
    for name, kind in prefill.items():
        case = make_case(dtype=BF16, cache_dtype=cache, device=device, **kind)
        if name == "rounds":
            case.ids[..., 0] = 0  # which is quick to draw
        elif name == "garbage":
            _spoil(case.block_table, case.k_cache.size(0))
        run = _later(msa.sparse_prefill, *case.attend_args, **case.scales, return_lse=True)
        yield f"sparse_prefill {name} {cache}", run
    case = make_case(dtype=BF16, cache_dtype=cache, device=device, **prefill["tiles"])
    run = _later(msa.sparse_prefill, *case.attend_args, **case.scales, batch_invariant=True)
    yield f"sparse_prefill batch_invariant {cache}", run

    # On Hopper: clusters, tiles of drafts of two groups and of one, pairs of tokens by 8 and by 4
    # warps, and neither: streams of FP8.
    decode = ((1, 1, 16), (9, 1, 16), (3, 8, 16), (33, 8, 16), (16, 8, 16), (34, 8, 16))
    decode += ((70, 4, 8), (8, 8, 4), (32, 8, 4))
    for requests, q_len, group in decode:
        lengths = [(q_len, 2400 - 61 * i % 2300) for i in range(requests)]
        heads = dict(hq=4 * group, hkv=4, padding_rows=1)
        case = make_case(lengths, dtype=BF16, cache_dtype=cache, device=device, **heads)
        run = _later(msa.sparse_decode, *case.attend_args, **case.scales, return_lse=True)
        yield f"sparse_decode B {requests} q {q_len} G {group} {cache}", run
    case = make_case(
        [(1, 700), (2, 2100)],
        hq=16,
        hkv=1,
        topk=32,
        selection="garbage_tail",
        dtype=BF16,
        cache_dtype=cache,
        device=device,
    )
    _spoil(case.block_table, case.k_cache.size(0))
    run = _later(msa.sparse_decode, *case.attend_args, **case.scales, return_lse=True)
    yield f"sparse_decode garbage {cache}", run
    for blocks in (3, 90):
        case = make_case(
            [(1, 128 * blocks - 5), (2, 200)],
            hq=8,
            hkv=1,
            dtype=BF16,
            cache_dtype=cache,
            device=device,
        )
        args = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
        run = _later(
            msa.paged_decode, *args, cu_seqlens_q=case.cu_seqlens_q, return_lse=True, **case.scales
        )
        yield f"paged_decode {blocks} pages {cache}", run


def _select(device: str, index: torch.dtype) -> Iterator[tuple[str, Call]]:
    decode, drafts = [(1, 2900), (1, 5)], [(8, 2900), (3, 300)]
    for name, lengths, max_pages in (
        ("decode", decode, None),
        ("decode, wide table", decode, 600),
        ("drafts", drafts, None),
        ("drafts, wide table", drafts, 600),
        ("prefill", [(280, 2900), (30, 300)], None),
    ):
        heads = dict(hq=64, hkv=4, dtype=BF16, index_dtype=index)
        case = make_case(lengths, **heads, max_pages=max_pages, device=device)
        yield f"select_blocks {name} {index}", _later(msa.select_blocks, *case.index_args, 16)
        yield f"index_score {name} {index}", _later(msa.index_score, *case.index_args)
    # A wide table makes a call large: scores are bounded first.
    for width, tokens in {8192: 150, 1024: 1100, 512: 2200}.items() if index == FP8 else ():
        case = make_case(
            [(tokens, 2900 + tokens)],
            hq=2,
            hkv=2,
            dtype=BF16,
            index_dtype=index,
            max_pages=width,
            device=device,
        )
        yield f"select_blocks bounds {width}", _later(msa.select_blocks, *case.index_args, 16)


def _spoil(table: torch.Tensor, num_pages: int) -> None:
    """Live entries of a table that are no page of the cache."""
    for block, page in ((1, -1), (2, num_pages), (3, 2**31 - 1)):
        table[:, block] = page


def _written(*args, **options) -> tuple[torch.Tensor, ...]:
    """The caches that `write_cache` has written to."""
    msa.write_cache(*args, **options)
    return args[4:7]


def _later(function, *args, **options) -> Call:
    return functools.partial(function, *args, **options)


if __name__ == "__main__":
    raise SystemExit(main())
