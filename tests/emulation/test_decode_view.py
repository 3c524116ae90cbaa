"""decode_view: page tables of every sort of selection."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import SELECTIONS, make_case

BATCHES = ["decode_edges", "mixed", "overfull", "one", "no_requests"]


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
            args = (case.ids, *case.batch, case.k_cache.size(0), 6, 2)
            for got, want in zip(
                emulator.decode_view(*args), reference.decode_view(*args), strict=True
            ):
                assert torch.equal(got, want), batch
            assert [launch.kernel for launch in emulator.launched] == [
                "msa_decode_view_sm80_kernel"
            ]
