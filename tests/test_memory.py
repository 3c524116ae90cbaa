"""What a call allocates besides its outputs: bounded as documented, and the same for any pool."""

import pytest
import torch

import msa_kernels
from tests.conftest import no_gpu_reason
from tests.inputs import BLOCK, FP8, D, dtype_name, make_case

pytestmark = pytest.mark.gpu

MIB = 2**20
PARTS = 1024 * 16 * 520
"""bytes of the parts of a decode call: of as many CTAs, of a KV head's 16 query heads"""


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)
    yield
    torch.cuda.empty_cache()  # other processes test beside this one


def requested(when: str) -> int:
    """Bytes asked for: what is allocated depends on what the allocator has cached."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def extra_bytes(call) -> int:
    """The most that is asked for at once during a call, without what it returns."""
    call()  # what is loaded and allocated once
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    result = call()
    peak, after = requested("peak"), requested("current")
    del result
    assert requested("current") == before, "something is kept"
    return peak - after


def calls(case):
    """name -> call of every operator that is given a pool or a table of its pages."""
    tokens = (case.k, case.v, case.index_k, case.slot_mapping)
    caches = (case.k_cache, case.v_cache, case.index_k_cache)
    attend = (*case.attend_args,)
    paged = (case.q, *caches[:2], case.block_table, case.seq_lens)
    cu = {"cu_seqlens_q": case.cu_seqlens_q}
    schedule = (case.ids, case.cu_seqlens_q, case.seq_lens, case.block_table.size(1))
    view = (case.ids, *case.batch, *caches[:2])
    return {
        "write_cache": lambda: msa_kernels.write_cache(*tokens, *caches, **case.scales),
        "index_score": lambda: msa_kernels.index_score(*case.index_args),
        "select_blocks": lambda: msa_kernels.select_blocks(*case.index_args),
        "kv_block_schedule": lambda: msa_kernels.kv_block_schedule(*schedule),
        "sparse_prefill": lambda: msa_kernels.sparse_prefill(*attend, **case.scales),
        "sparse_decode": lambda: msa_kernels.sparse_decode(*attend, **case.scales),
        "paged_decode": lambda: msa_kernels.paged_decode(*paged, **cu, **case.scales),
        "decode_view": lambda: msa_kernels.decode_view(*view),
    }


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
@pytest.mark.parametrize("lengths", [[(1, 2500)] * 9, [(300, 2900), (4, 2000)]], ids=str)
def test_nothing_grows_with_the_pool(lengths, cache_dtype):
    """Pools of 1K and of 64K pages."""
    found = []
    for pages in (1024, 65536):
        case = make_case(
            lengths, hq=16, hkv=1, cache_dtype=cache_dtype, index_dtype=cache_dtype, device="cuda"
        )
        pool = torch.empty(3, pages, 1, BLOCK, D, dtype=cache_dtype, device="cuda")
        case = case.with_(k_cache=pool[0], v_cache=pool[1], index_k_cache=pool[2, :, 0])
        found.append({name: extra_bytes(call) for name, call in calls(case).items()})
        del pool, case
    assert found[0] == found[1]
    assert found[0]["write_cache"] == found[0]["index_score"] == found[0]["decode_view"] == 0
    assert found[0]["sparse_decode"] <= PARTS and found[0]["paged_decode"] <= PARTS


def long_case(tokens, context, cache_dtype=torch.bfloat16):
    """M3's heads; a table that walks few pages again and again."""
    few = make_case([(64, 1280)], hq=64, hkv=4, selection="none", padding_rows=0, device="cuda")
    blocks = context // BLOCK
    rng = torch.Generator("cuda").manual_seed(0)
    draw = {"generator": rng, "device": "cuda"}
    ids = torch.randint(blocks - tokens // BLOCK - 1, (4, tokens, 16), dtype=torch.int32, **draw)
    ids[..., 15] = blocks - 1 - torch.arange(tokens - 1, -1, -1, device="cuda") // BLOCK
    return few.with_(
        lengths=[(tokens, context)],
        q=few.q.repeat(tokens // 64, 1, 1),
        index_q=few.index_q.repeat(tokens // 64, 1, 1),
        ids=ids,
        block_table=few.block_table[:, torch.arange(blocks, device="cuda") % 10],
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([context], dtype=torch.int32, device="cuda"),
    )


def test_prefill_of_a_million_tokens_takes_less_than_a_gibibyte():
    case = long_case(16384, 2**20)
    extra = extra_bytes(lambda: msa_kernels.sparse_prefill(*case.attend_args))
    assert extra <= 1024 * MIB


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("context", [2**16, 2**20])
def test_scores_of_a_selection_take_64_mib(tokens, context):
    case = long_case(tokens, context)
    extra = extra_bytes(lambda: msa_kernels.select_blocks(*case.index_args))
    all_scores = 4 * tokens * (context // BLOCK) * 4
    assert extra <= min(64 * MIB, all_scores + MIB)


def test_scores_in_a_wide_table_take_512_mib():
    """Where the hint says that most of the table is empty, more tokens share a launch."""
    case = long_case(4096, 2**16)
    wide = torch.nn.functional.pad(case.block_table, (0, 8192 - case.block_table.size(1)))
    args = (*case.index_args[:2], wide, *case.batch[1:])
    extra = extra_bytes(lambda: msa_kernels.select_blocks(*args, max_seqlen_k=2**16))
    assert extra <= 512 * MIB


def test_a_token_of_a_table_past_the_bound_takes_its_own_scores():
    """64 MiB, or one token's scores where those are more."""
    case = long_case(64, 2**16)
    width = 5_000_000
    table = torch.full((1, width), -1, dtype=torch.int32, device="cuda")
    table[:, : case.block_table.size(1)] = case.block_table
    args = (case.index_q[:4], case.index_k_cache, table, case.cu_seqlens_q // 16, case.seq_lens)
    extra = extra_bytes(lambda: msa_kernels.select_blocks(*args))
    one_token = 4 * 4 * width
    assert one_token <= extra <= one_token + MIB


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 300])
def test_parts_of_long_rows_are_bounded(rows):
    """However long a row may be by its table's width."""
    case = long_case(64, 2**20)
    table = case.block_table.expand(rows, -1)
    lens = torch.full((rows,), 1000, dtype=torch.int32, device="cuda")
    args = (case.q[:1].expand(rows, -1, -1), case.k_cache, case.v_cache, table, lens)
    assert extra_bytes(lambda: msa_kernels.paged_decode(*args)) <= PARTS
