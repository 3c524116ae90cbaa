"""kv_block_schedule: rows, pairs and work items of every sort of selection and batch."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import BATCHES, SELECTIONS, make_case, make_selection, sort_within_rows

KERNELS = [f"msa_kv_block_schedule_{name}_sm80_kernel" for name in ("clear", "count", "scatter")]
WITH_SCAN = [*KERNELS[:2], "msa_kv_block_schedule_scan_sm80_kernel", KERNELS[2]]


def check(emulator, ids, cu_seqlens_q, seq_lens, max_blocks, per_item=64, kernels=KERNELS):
    args = (ids, cu_seqlens_q, seq_lens, max_blocks, per_item)
    row_ptr, pairs, items, num_items = emulator.kv_block_schedule(*args)
    want = reference.kv_block_schedule(*args)
    assert torch.equal(row_ptr, want[0])
    assert torch.equal(sort_within_rows(pairs, row_ptr), want[1])
    assert torch.equal(items, want[2]) and torch.equal(num_items, want[3])
    assert [launch.kernel.split("<")[0] for launch in emulator.launched] == kernels


@pytest.mark.parametrize("selection", SELECTIONS)
def test_matches_reference(library, selection):
    emulator = Emulator(library, seed=1)
    for batch in BATCHES:
        for strided, topk, heads in ((False, 16, 2), (True, 5, 3)):
            case = make_case(
                batch, selection=selection, strided=strided, topk=topk, hq=heads, hkv=heads
            )
            check(emulator, case.ids, *case.batch[1:], case.block_table.size(1), per_item=7)


@pytest.mark.parametrize("topk", [1, 4, 17, 32])
def test_long_chunks(emulator, topk):
    """Several chunks a head, of several requests, and requests of several chunks."""
    case = make_case([(300, 300), (1, 5200), (900, 2300)], topk=topk, hq=2, hkv=2, padding_rows=9)
    for per_item in (1, 64, 2**31 - 1):
        check(emulator, case.ids, *case.batch[1:], case.block_table.size(1), per_item)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wild_ids(emulator, dtype):
    case = make_case("long", hq=2, hkv=2)
    limits, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    ids = torch.randint(limits.min, limits.max, case.ids.shape, generator=generator)
    some = torch.rand(ids.shape, generator=generator) < 0.5
    ids = torch.where(some, torch.randint(-3, 60, ids.shape, generator=generator), ids).to(dtype)
    check(emulator, ids, *case.batch[1:], case.block_table.size(1))
    if dtype == torch.int64:  # ids whose lower words are blocks
        high = torch.randint(-1, 2, ids.shape, generator=generator) << 32
        check(emulator, ids % 40 + high, *case.batch[1:], case.block_table.size(1))
    # Not at a multiple of 16 bytes.
    moved = torch.full((ids.numel() + 1,), 3, dtype=dtype)[1:].view(ids.shape).copy_(ids)
    check(emulator, moved, *case.batch[1:], case.block_table.size(1))


@pytest.mark.parametrize(
    ("max_blocks", "kernels"),
    [(2048, KERNELS), (2049, WITH_SCAN), (3000, WITH_SCAN), (8192, WITH_SCAN), (8193, WITH_SCAN)],
)
def test_wide_tables(emulator, max_blocks, kernels):
    """A request's rows fit the histogram, or do not, or only those of one request do."""
    lengths = [(70, 5000)] if max_blocks != 3000 else [(40, 3000), (0, 5), (50, 6000), (3, 999)]
    case = make_case(lengths, hq=2, hkv=2, padding_rows=40)
    check(emulator, case.ids, *case.batch[1:], max_blocks, kernels=kernels)


def test_many_requests(emulator):
    """More than a CTA keeps lengths of."""
    lengths = torch.arange(600) % 3
    cu_seqlens_q = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    seq_lens = (lengths * 200 - 3).int()
    tokens = int(cu_seqlens_q[-1]) + 1
    visible = reference.token_positions(cu_seqlens_q, seq_lens, tokens).visible
    ids = make_selection("random", visible, 1, 4, seed=1)
    check(emulator, ids, cu_seqlens_q, seq_lens, 5)


def test_no_work(emulator):
    zeros = torch.zeros(5, dtype=torch.int32)
    for tokens, requests in ((3, 4), (3, 0), (0, 4), (0, 0)):
        for max_blocks in (0, 8):
            ids = torch.zeros(2, tokens, 16, dtype=torch.int32)
            check(emulator, ids, zeros[: requests + 1], zeros[:requests], max_blocks)


@pytest.mark.parametrize("length", [-1, -(2**31) + 3, -(2**31)])
def test_negative_lengths(emulator, length):
    """Of requests that a CTA keeps in shared memory, and of more than that."""
    case = make_case("long", hq=2, hkv=2)
    seq_lens = case.seq_lens.clone()
    seq_lens[::2] = length
    check(emulator, case.ids, case.cu_seqlens_q, seq_lens, case.block_table.size(1))
    many = torch.arange(601).int()
    ids = torch.zeros(1, 600, 4, dtype=torch.int32)
    seq_lens = torch.where(many[1:] % 3 == 0, length, 300).int()
    check(emulator, ids, many, seq_lens, 3)
