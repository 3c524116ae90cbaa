"""decode_view: page tables of every sort of selection."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import SELECTIONS, make_case

BATCHES = ["decode_edges", "mixed", "overfull", "one", "no_requests"]


def check(emulator, *args):
    for got, want in zip(emulator.decode_view(*args), reference.decode_view(*args), strict=True):
        assert torch.equal(got, want)
    assert [launch.kernel for launch in emulator.launched] == ["msa_decode_view_sm80_kernel"]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_matches_reference(library, selection):
    emulator = Emulator(library, seed=1)
    for batch in BATCHES:
        for strided, topk in ((False, 16), (True, 5)):
            case = make_case(
                batch, selection=selection, strided=strided, topk=topk, hq=3, hkv=3, layout="nhd"
            )
            table = case.block_table
            if table.numel() > 2:
                table[0, 0], table[-1, 1] = -1, case.k_cache.size(0)
            check(emulator, case.ids, *case.batch, case.k_cache.size(0), 6, 2)


@pytest.mark.parametrize("hkv", [1, 6])
@pytest.mark.parametrize(
    "columns", [slice(0, 1040), slice(0, 1037), slice(1, 1040), slice(0, 1040, 2)], ids=str
)
def test_tables(library, columns, hkv):
    """More pages than a CTA copies, rows that are no vectors of 16 bytes or not contiguous;
    requests of as many tokens as any other, or not."""
    rng = torch.Generator().manual_seed(3)
    requests, each, topk = 5, 3, 16
    table = torch.randint(0, 9000, (requests, 1040), generator=rng).int()[:, columns]
    max_pages = table.size(1)
    seq_lens = torch.tensor([max_pages * 128 - 5, 40, 1025 * 128, max_pages * 128, 0]).int()
    seq_lens = seq_lens.clamp(max=max_pages * 128)
    for starts in (
        torch.arange(requests + 1) * each,
        torch.tensor([0, 1, 3, 6, 9, 15]),
        torch.tensor([0, 9, 9, 12, 13, 13]),
    ):
        ids = torch.stack(
            [
                torch.randperm(max_pages, generator=rng)[:topk].sort().values
                for _ in range(hkv * requests * each)
            ]
        )
        ids = ids.view(hkv, -1, topk)
        ids[:, ::3] = ids[:, ::3].flip(-1)
        table[0, ids[0, 0, :2]] = torch.tensor([-1, 9000]).int()
        for dtype in (torch.int32, torch.int64):
            emulator = Emulator(library, seed=1, ctas_at_once=2)
            check(emulator, ids.to(dtype), table, starts.int(), seq_lens, 9000, 2 * hkv, 2)


@pytest.mark.parametrize("length", [-1, -(2**31) + 3, -(2**31)])
def test_negative_lengths(library, length):
    case = make_case("decode_edges", hq=2, hkv=2, layout="nhd")
    seq_lens = case.seq_lens.clone()
    seq_lens[::2] = length
    batch = (case.block_table, case.cu_seqlens_q, seq_lens)
    check(Emulator(library, seed=2), case.ids, *batch, case.k_cache.size(0), 4, 2)
