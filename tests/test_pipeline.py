"""The composed calls against the reference, step after step on one cache."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    DTYPES,
    FP8,
    copied_caches,
    dtype_name,
    make_case,
    same_bits,
    sort_within_rows,
)
from tests.tolerance import (
    assert_attention,
    assert_close,
    attention_floor,
    attention_in_dtype,
    near,
)


def paged_cache(case):
    caches = (case.k_cache, case.v_cache, case.index_k_cache)
    return msa_kernels.PagedCache(*caches, case.k_scale, case.v_scale)


def batch_of(case, decode_requests=0):
    tokens = sum(q_len for q_len, _ in case.lengths[:decode_requests])
    lengths = (case.block_table, case.cu_seqlens_q, case.seq_lens, case.slot_mapping)
    return msa_kernels.Batch(*lengths, decode_requests, tokens)


def attend(case, decode_requests=0, **options):
    tokens = (case.q, case.k, case.v, case.index_q, case.index_k)
    batch = batch_of(case, decode_requests)
    return msa_kernels.msa_attention(*tokens, paged_cache(case), batch, **options)


def without_new_tokens(case):
    """The case with caches of its own whose slots of new tokens are poison again."""
    case = copied_caches(case)
    slot = case.slot_mapping[case.slot_mapping >= 0]
    for cache in (case.k_cache, case.v_cache, case.index_k_cache):
        by_slot = cache.transpose(1, 2) if cache.dim() == 4 else cache
        if cache.dtype == FP8:
            by_slot.view(torch.uint8)[slot // 128, slot % 128] = 0x7F
        else:
            by_slot[slot // 128, slot % 128] = float("nan")
    return case


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("batch", BATCHES)
def test_msa_attention(device, require, batch, dtypes):
    """Prefill path, decode path and every split between them; the new tokens are written first."""
    for op in ("write_cache", "sparse_prefill", "sparse_decode"):
        require(op, *dtypes)
    require("select_blocks", dtypes[0], dtypes[0])
    case = make_case(batch, dtype=dtypes[0], cache_dtype=dtypes[1], strided=True, device=device)
    ids = msa_kernels.select_blocks(*case.index_args)
    requests = len(case.lengths)
    for decode_requests in sorted({0, 1, requests // 2, requests - 1, requests} & {*range(99)}):
        if decode_requests <= requests:
            out = attend(without_new_tokens(case), decode_requests)
            assert_attention(case.with_(ids=ids), out, None)


def test_options_reach_the_operators(device, require):
    for op in ("write_cache", "sparse_prefill", "select_blocks"):
        require(op)
    case = make_case("long", device=device)
    rule = dict(init_blocks=1, local_blocks=2)
    ids = reference.select_blocks(*case.index_args, 7, **rule)
    out = torch.full_like(case.q, -7)
    assert attend(case, topk=7, scale=0.03, out=out, **rule) is out
    assert_attention(case.with_(ids=ids), out, None, scale=0.03)


def test_index_cache_matters(device, require):
    """Past 16 blocks another index cache gives another output."""
    for op in ("write_cache", "sparse_prefill", "select_blocks"):
        require(op)
    case = make_case("long", device=device)
    out = attend(case)[: case.num_real]
    other = make_case("long", seed=1, device=device)
    swapped = case.with_(index_k_cache=other.index_k_cache, block_table=case.block_table)
    pages = case.block_table, other.block_table
    assert not torch.equal(*pages)
    again = attend(swapped)[: case.num_real]
    assert bool((again != out).flatten(1).any(dim=-1).all())


def test_few_blocks_are_dense_attention(device, require):
    """Up to 16 blocks every block is selected: both layers are one."""
    for op in ("write_cache", "sparse_prefill", "select_blocks", "paged_decode"):
        require(op)
    case = make_case([(20, 2048), (1, 1500), (130, 130)], device=device)
    dense = msa_kernels.dense_attention(case.q, case.k, case.v, paged_cache(case), batch_of(case))
    torch.testing.assert_close(attend(case), dense, **near(dense.dtype))


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("batch", ["mixed", "verify", "overfull"])
def test_dense_attention(device, require, batch, dtypes):
    for op in ("write_cache", "paged_decode"):
        require(op, *dtypes)
    case = make_case(batch, dtype=dtypes[0], cache_dtype=dtypes[1], device=device)
    fresh = without_new_tokens(case)
    index_pool = fresh.pools[-1].clone()
    out = msa_kernels.dense_attention(
        fresh.q, fresh.k, fresh.v, paged_cache(fresh), batch_of(fresh)
    )
    exact, lse = reference.paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.seq_lens,
        cu_seqlens_q=case.cu_seqlens_q,
        **case.scales,
        compute_dtype=torch.float64,
    )
    every = torch.arange(case.block_table.size(1), dtype=torch.int32, device=device)
    dense = case.with_(ids=every.expand(2, case.num_tokens, -1))
    assert_close(out, exact, attention_in_dtype(dense), floor=attention_floor(exact, lse))
    assert same_bits(fresh.pools[-1], index_pool), "a dense layer has no index keys to write"


@pytest.mark.parametrize("layout", ["hnd", "nhd_kv"])
def test_growing_requests(device, require, layout):
    """A prompt in chunks, then single tokens, edited in place: as one prefill of everything."""
    for op in ("write_cache", "sparse_prefill", "sparse_decode", "select_blocks"):
        require(op)
    whole = make_case([(2350, 2350)], hq=4, hkv=2, layout=layout, padding_rows=0, device=device)
    expected = attend(whole)
    step = copied_caches(whole, "nan")
    begin = 0
    for count in [1000, 300, 700, 47, 1, 1, 126, 128, 1, 40, 1, 1, 1, 1, 1, 1]:
        rows = slice(begin, begin + count)
        begin += count
        now = step.with_(
            lengths=[(count, begin)],
            q=whole.q[rows],
            k=whole.k[rows],
            v=whole.v[rows],
            index_q=whole.index_q[rows],
            index_k=whole.index_k[rows],
            slot_mapping=whole.slot_mapping[rows],
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([begin], dtype=torch.int32, device=device),
        )
        out = attend(now, decode_requests=int(count <= 16))
        torch.testing.assert_close(out, expected[rows], **near(out.dtype))
    assert begin == 2350


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 14])
def test_fewer_rows_than_cu_seqlens_says(device, require, rows):
    """A caller's fault that must stay harmless: the rows that are there keep their positions."""
    for op in ("sparse_prefill", "sparse_decode", "paged_decode", "select_blocks", "index_score"):
        require(op)
    for op in ("kv_block_schedule", "decode_view"):
        require(op, torch.int32)
    case = make_case(
        [(5, 300), (7, 900), (3, 400)], values="integer", padding_rows=0, device=device
    )
    case = case.with_(q=case.q[:rows], index_q=case.index_q[:rows], ids=case.ids[:, :rows])
    assert torch.equal(
        msa_kernels.index_score(*case.index_args), reference.index_score(*case.index_args)
    )
    assert torch.equal(
        msa_kernels.select_blocks(*case.index_args), reference.select_blocks(*case.index_args)
    )
    for op in ("sparse_prefill", "sparse_decode"):
        out, lse = getattr(msa_kernels, op)(*case.attend_args, return_lse=True)
        assert_attention(case, out, lse)
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    out = msa_kernels.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q)
    want, _ = reference.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q)
    torch.testing.assert_close(out.float(), want, **near(out.dtype))
    lengths = (case.ids, case.cu_seqlens_q, case.seq_lens, 9)
    row_ptr, pairs = msa_kernels.kv_block_schedule(*lengths)[:2]
    want_row_ptr, want_pairs = reference.kv_block_schedule(*lengths)[:2]
    assert torch.equal(row_ptr, want_row_ptr)
    assert torch.equal(sort_within_rows(pairs, row_ptr), want_pairs)  # a GPU fixes no order there
    view = msa_kernels.decode_view(case.ids, *case.batch, case.k_cache, case.v_cache)
    want_view = reference.decode_view(case.ids, *case.batch, case.k_cache.size(0), 2, 1)
    assert torch.equal(view.page_table, want_view[0]) and torch.equal(view.kv_lens, want_view[1])
