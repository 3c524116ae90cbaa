"""Which kernels serve a call on Hopper, by their names in a profile: a plan that stopped being
taken would pass every other test.

A new way is a line of a table here. Names are without `msa_` and `_kernel`; `cache` stands for the
dtype of the caches.
"""

import os
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import msa_kernels
from tests import every_kernel
from tests.build.test_cuda_binary import HOT_KERNELS
from tests.conftest import no_gpu_reason
from tests.inputs import FP8, D, dtype_name, make_case

pytestmark = pytest.mark.gpu

CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)

KV_BLOCK, MERGE = "sparse_prefill_kv_block_sm90<cache>", "sparse_prefill_merge_sm90<cache>"
QUERY_BLOCK = "sparse_prefill_query_block_sm90<cache>"
LONG_PLAN = {
    "split_selection_sm90",
    "kv_block_schedule_scan_sm80<BlockItems>",
    "split_selection_scatter_sm90",
}
NARROW_PLAN = {"split_selection_requests_sm90", QUERY_BLOCK}
CHUNK = dict(lengths=[(600, 4000)], hq=64, hkv=4, selection="none")
PREFILL = {  # way: (case, options of the call, kernels)
    "short": ({**CHUNK, "lengths": [(60, 4000)]}, {}, {"split_selection_short_sm90"}),
    "long": (CHUNK, {}, {*LONG_PLAN, QUERY_BLOCK}),
    "small groups": ({**CHUNK, "hq": 16}, {}, LONG_PLAN),
    "batch_invariant": (CHUNK, {"batch_invariant": True}, LONG_PLAN),
    "narrow": ({**CHUNK, "max_pages": 16}, {}, NARROW_PLAN),
    "narrow by the hint": (CHUNK, {"max_seqlen_k": 2048}, NARROW_PLAN),
}

DECODE = {  # (requests, tokens of each, Hq, Hkv): kernels of bfloat16 caches, of FP8 caches
    (1, 1, 64, 4): ("decode_cluster_sm90<cache, true, 8>",) * 2,
    (1, 8, 64, 4): ("decode_cluster_pair_sm90", "decode_cluster_sm90<cache, true, 4>"),
    (8, 8, 16, 4): ("decode_pair_sm90<cache, 8>", "decode_pair_sm90<cache, 4>"),
    (32, 8, 16, 4): ("decode_pair_sm90<cache, 4>",) * 2,
    (32, 8, 64, 4): ("decode_tile_sm90<2>", "decode_pair_sm90<cache, 4>"),
    (16, 8, 64, 4): ("decode_tile_sm90<1>", "decode_pair_sm90<cache, 4>"),
    (32, 4, 64, 4): ("decode_tile_sm90<1>", "decode_pair_sm90<cache, 4>"),
    (300, 1, 64, 4): ("decode_stream_sm90<cache, true>",) * 2,
}
PAGED = {  # pages of a row: kernels
    20: {"decode_cluster_sm90<cache, false, 8>"},
    200: {"decode_sm80<cache, false>", "decode_merge_sm80"},
}

SCORE = {  # (query tokens, options of select_blocks): the kernel that scores for 4 heads
    (1, ()): "index_score_stream_sm90<cache, 8, true>",
    (4, ()): "index_score_stream_sm90<cache, 16, true>",
    (8, ()): "index_score_stream_sm90<cache, 32, true>",
    (16, ()): "index_score_stream_sm90<cache, 64, true>",
    (300, ()): "index_score_tile_sm90<cache>",
    (300, (("local_blocks", 0),)): "index_score_tile_sm80<cache>",
}
TOPK = {  # (rows, blocks): warps of a row, scores of a lane
    (3, 200): "1, 8",
    (3, 400): "1, 16",
    (3, 900): "1, 32",
    (3, 2000): "8, 8",
    (3, 5000): "8, 32",
    (3, 16384): "16, 32",
    (3, 16385): "16, 0",
    (2100, 2000): "2, 32",
    (2100, 4000): "4, 32",
}
MERGE_PARTS = {2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 40: 16}  # parts: those that a segment holds

NOT_ON_HOPPER = {"msa_index_score_stream_sm80_kernel", "msa_sparse_prefill_sm80_kernel"}
"""that `every_kernel` does not reach there"""


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if reason := no_gpu_reason():
        pytest.skip(reason)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU: the portable kernels serve every call")
    if os.environ.get("MSA_FORCE_PORTABLE") == "1":
        pytest.skip("MSA_FORCE_PORTABLE=1: the portable kernels serve every call")
    profiled(torch.cuda.synchronize)  # the first profile of a process may miss what it should see


def profiled(call) -> set[str]:
    """Names of the kernels of this library that run."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        torch.cuda.synchronize()
    return {event.name for event in record.events() if "msa_" in event.name}


def short(name: str) -> str:
    """Of "void msa::a::msa_some_sm90_kernel<(msa::DType)1, 8>(...)": "some_sm90<bfloat16, 8>"."""
    for long, plain in (
        (r"\(msa::DType\)1|__nv_bfloat16", "bfloat16"),
        (r"\(msa::DType\)2|__nv_fp8_e4m3", "float8"),
        (r"(\w+::)+", ""),
    ):
        name = re.sub(long, plain, name)
    kernel, arguments = re.search(r"msa_(\w+)_kernel(<[^<>()]*>)?", name).groups()
    return kernel + (arguments or "")


def assert_runs(call, expected: set[str], cache_dtype: torch.dtype = torch.bfloat16) -> None:
    cache = "float8" if cache_dtype == FP8 else "bfloat16"
    found = {short(name) for name in profiled(call)}
    assert found == {re.sub(r"\bcache\b", cache, name) for name in expected}


@CACHE_DTYPES
@pytest.mark.parametrize("way", PREFILL)
def test_prefill(way, cache_dtype):
    options, call_options, kernels = PREFILL[way]
    case = make_case(cache_dtype=cache_dtype, device="cuda", **options)
    around = set() if kernels is NARROW_PLAN else {KV_BLOCK, MERGE}
    assert_runs(
        lambda: msa_kernels.sparse_prefill(*case.attend_args, **case.scales, **call_options),
        kernels | around,
        cache_dtype,
    )


@CACHE_DTYPES
def test_tensors_without_a_tensor_map_take_the_portable_prefill(cache_dtype):
    case = make_case(cache_dtype=cache_dtype, device="cuda", **CHUNK)
    case = case.with_(q=case.q[:1].expand_as(case.q))
    assert_runs(
        lambda: msa_kernels.sparse_prefill(*case.attend_args, **case.scales),
        {"sparse_prefill_sm80<cache>"},
        cache_dtype,
    )


@CACHE_DTYPES
@pytest.mark.parametrize("shape", DECODE, ids=lambda shape: "-".join(map(str, shape)))
def test_decode(shape, cache_dtype):
    requests, tokens, hq, hkv = shape
    lengths = [(tokens, tokens + 130)] * requests  # the choice is made without them
    case = make_case(
        lengths, hq=hq, hkv=hkv, cache_dtype=cache_dtype, padding_rows=0, device="cuda"
    )
    assert_runs(
        lambda: msa_kernels.sparse_decode(*case.attend_args, **case.scales),
        {DECODE[shape][cache_dtype == FP8]},
        cache_dtype,
    )


@CACHE_DTYPES
@pytest.mark.parametrize("pages", PAGED)
def test_paged_decode(pages, cache_dtype):
    case = make_case([(1, 2100)], cache_dtype=cache_dtype, max_pages=pages, device="cuda")
    args = (case.q[:1], case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    assert_runs(lambda: msa_kernels.paged_decode(*args, **case.scales), PAGED[pages], cache_dtype)


@CACHE_DTYPES
@pytest.mark.parametrize("tokens,options", SCORE)
def test_scores(tokens, options, cache_dtype):
    case = make_case(
        [(tokens, 2100)], hq=4, hkv=4, padding_rows=0, index_dtype=cache_dtype, device="cuda"
    )
    score = SCORE[tokens, options]
    assert_runs(
        lambda: msa_kernels.select_blocks(*case.index_args, **dict(options)),
        {score, "topk_blocks_sm80<1, 8>"},
        cache_dtype,
    )
    # index_score wants own blocks too, which Hopper's tiles have no mask for.
    score = score.replace("tile_sm90", "tile_sm80")
    assert_runs(
        lambda: msa_kernels.index_score(*case.index_args),
        {score, "index_score_fill_sm80"},
        cache_dtype,
    )


@pytest.mark.parametrize("rows,blocks", TOPK)
def test_topk(rows, blocks):
    scores = torch.zeros(1, rows, blocks, device="cuda")
    visible = torch.full((rows,), blocks, dtype=torch.int32, device="cuda")
    assert_runs(
        lambda: msa_kernels.topk_blocks(scores, visible),
        {f"topk_blocks_sm80<{TOPK[rows, blocks]}>"},
    )


@pytest.mark.parametrize("parts", MERGE_PARTS)
def test_merge(parts):
    outs = torch.zeros(parts, 5, 4, D, device="cuda", dtype=torch.bfloat16)
    lses = torch.zeros(parts, 5, 4, device="cuda")
    assert_runs(
        lambda: msa_kernels.merge_lse(outs, lses),
        {f"merge_lse_sm80<bfloat16, {MERGE_PARTS[parts]}>"},
    )


def test_every_kernel_is_reached():
    """By the calls that the sanitizer, the graphs and the streams are tried on."""
    calls = list(every_kernel.calls("cuda"))
    names = profiled(lambda: [call() for _, call in calls])
    reached = {f"msa_{short(name).split('<')[0]}_kernel" for name in names}
    assert reached == set(HOT_KERNELS) - NOT_ON_HOPPER
    variants = {short(name) for name in names}
    assert {f"topk_blocks_sm80<{variant}>" for variant in TOPK.values()} <= variants
