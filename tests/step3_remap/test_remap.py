"""kv_block_schedule: a permutation of the selection, by block, cut into bounded work items."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    SELECTIONS,
    make_case,
    make_selection,
    same_bits,
    sort_within_rows,
)


def check(ids, cu_seqlens_q, seq_lens, max_blocks, max_queries_per_item=64):
    """Row pointers and pairs equal to the reference; items cover every pair exactly once."""
    schedule = msa_kernels.kv_block_schedule(
        ids, cu_seqlens_q, seq_lens, max_blocks, max_queries_per_item=max_queries_per_item
    )
    row_ptr, pairs, work_items, num_work_items = reference.kv_block_schedule(
        ids, cu_seqlens_q, seq_lens, max_blocks, max_queries_per_item
    )
    got_pairs = schedule.pairs
    if got_pairs.is_cuda and got_pairs.shape == pairs.shape:  # a GPU fixes no order within a row
        got_pairs = sort_within_rows(got_pairs, row_ptr)
    for name, got, want in (
        ("row_ptr", schedule.row_ptr, row_ptr),
        ("pairs", got_pairs, pairs),
    ):
        assert got.dtype == torch.int32 and got.shape == want.shape, name
        assert torch.equal(got, want), name

    items = schedule.work_items
    assert items.dtype == torch.int32 and torch.equal(items, work_items)
    assert schedule.num_work_items.shape == (1,)
    assert schedule.num_work_items.dtype == torch.int32
    assert torch.equal(schedule.num_work_items, num_work_items)
    # What the reference must be, too.
    used = int(schedule.num_work_items)
    assert used <= len(items)
    assert bool((items[used:] == -1).all())
    row, begin, end = items[:used].long().unbind(1)
    assert bool((end > begin).all()) and bool((end - begin <= max_queries_per_item).all())
    assert bool((row[1:] >= row[:-1]).all()), "rows are not ascending"
    # Each within its row, and all together every pair once.
    assert bool((begin >= row_ptr[row]).all()) and bool((end <= row_ptr[row + 1]).all())
    total = int(row_ptr[-1])
    cover = torch.zeros(total + 1, dtype=torch.int64, device=ids.device)
    cover.scatter_add_(0, begin, torch.ones_like(begin))
    cover.scatter_add_(0, end, -torch.ones_like(end))
    assert bool((cover.cumsum(0)[:total] == 1).all()), "a pair is not covered exactly once"
    # Even: no row is cut into more items than it needs.
    per_row = torch.bincount(row, minlength=len(row_ptr) - 1)
    lengths = row_ptr.long().diff()
    assert bool((per_row == lengths.add(max_queries_per_item - 1) // max_queries_per_item).all())
    return schedule


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_matches_reference(device, require, selection, batch, strided):
    require("kv_block_schedule", torch.int64 if selection == "int64" else torch.int32)
    case = make_case(batch, selection=selection, topk=5, strided=strided, hq=3, hkv=3)
    ids, lengths = case.ids.to(device), [case.cu_seqlens_q.to(device), case.seq_lens.to(device)]
    check(ids, *lengths, case.block_table.size(1))


@pytest.mark.parametrize("per_item", [1, 2, 7, 64, 128, 10**6, 2**31 - 1])
@pytest.mark.parametrize("topk", [1, 16, 17, 32])
def test_item_sizes(device, require, topk, per_item):
    require("kv_block_schedule", torch.int32)
    case = make_case([(300, 300), (1, 5200), (200, 2300)], topk=topk)
    ids, lengths = case.ids.to(device), [case.cu_seqlens_q.to(device), case.seq_lens.to(device)]
    check(ids, *lengths, case.block_table.size(1), per_item)


def test_all_queries_on_one_block(device, require):
    """The longest row there can be: as many pairs as tokens."""
    require("kv_block_schedule", torch.int32)
    case = make_case([(700, 5200)], selection="same")
    ids, lengths = case.ids.to(device), [case.cu_seqlens_q.to(device), case.seq_lens.to(device)]
    schedule = check(ids, *lengths, case.block_table.size(1))
    assert int(schedule.row_ptr.diff().max()) == 700


@pytest.mark.parametrize("max_blocks", [0, 1, 5, 17, 1000])
def test_blocks_past_max_blocks_are_dropped(device, require, max_blocks):
    require("kv_block_schedule", torch.int32)
    case = make_case("mixed")
    check(case.ids.to(device), case.cu_seqlens_q.to(device), case.seq_lens.to(device), max_blocks)


def test_wild_ids(device, require):
    """Any numbers at all: nothing is read or written out of bounds, and what counts is right."""
    require("kv_block_schedule", torch.int64)
    case = make_case("long")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        ids = torch.randint(limits.min, limits.max, case.ids.shape, generator=generator)
        some = torch.rand(ids.shape, generator=generator) < 0.5
        ids = torch.where(some, torch.randint(-3, 60, ids.shape, generator=generator), ids)
        check(
            ids.to(dtype).to(device),
            case.cu_seqlens_q.to(device),
            case.seq_lens.to(device),
            case.block_table.size(1),
        )


def test_no_work(device, require):
    """Lengths all 0, no requests, no tokens: no pairs and no items."""
    require("kv_block_schedule", torch.int32)
    zeros = torch.zeros(5, dtype=torch.int32, device=device)
    for tokens, requests in ((3, 4), (3, 0), (0, 4), (0, 0)):
        ids = torch.zeros(2, tokens, 16, dtype=torch.int32, device=device)
        schedule = check(ids, zeros[: requests + 1], zeros[:requests], 8)
        assert int(schedule.num_work_items) == 0


def test_twenty_runs_give_the_same_bits(device, require):
    """All of it on the CPU; on a GPU all but the order of the pairs within a row."""
    require("kv_block_schedule", torch.int32)
    case = make_case([(300, 5300), (257, 257), (1, 9)], device=device)
    args = (case.ids, case.cu_seqlens_q, case.seq_lens, case.block_table.size(1))

    def run():
        schedule = msa_kernels.kv_block_schedule(*args)
        if device == "cpu":
            return schedule
        return schedule._replace(pairs=sort_within_rows(schedule.pairs, schedule.row_ptr))

    first = run()
    for _ in range(19):
        assert all(same_bits(a, b) for a, b in zip(first, run(), strict=True))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_batch(device, require, data):
    require("kv_block_schedule", torch.int32)
    q_len = st.one_of(st.integers(0, 4), st.integers(0, 40))
    seq_len = st.one_of(st.integers(0, 600), st.sampled_from([128, 256, 2048, 2049, 5248]))
    lengths = data.draw(st.lists(st.tuples(q_len, seq_len), max_size=5))
    padding = data.draw(st.integers(0, 3))
    topk, heads = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 4))
    max_blocks = data.draw(st.integers(0, 45))
    cu_seqlens_q = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    seq_lens = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    num_tokens = int(cu_seqlens_q[-1]) + padding
    visible = reference.token_positions(cu_seqlens_q, seq_lens, num_tokens).visible
    kind = data.draw(st.sampled_from(SELECTIONS))
    ids = make_selection(kind, visible, heads, topk, seed=data.draw(st.integers(0, 9)))
    per_item = data.draw(st.sampled_from([1, 3, 64, 1000]))
    check(ids.to(device), cu_seqlens_q.to(device), seq_lens.to(device), max_blocks, per_item)
