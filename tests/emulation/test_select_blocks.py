"""select_blocks of few query rows a request: scores of a stream of pages, then their top-k."""

import pytest
import torch

from tests.emulation.emulator import Emulator
from tests.inputs import BLOCK, FP8, dtype_name, make_case
from tests.tolerance import assert_selection

STREAM, TOPK = "msa_index_score_stream_sm90_kernel", "msa_topk_blocks_sm80_kernel"
LENGTHS = [(1, 24 * BLOCK + 70), (3, 11 * BLOCK), (0, 500), (1, 7), (2, 1)]
"""with padding ten tokens, two a request"""


def make(dtype, heads, lengths=LENGTHS, **options):
    return make_case(
        lengths, hq=heads, hkv=heads, dtype=torch.bfloat16, index_dtype=dtype, **options
    )


def check(library, case, seed, **rule):
    emulator = Emulator(library, seed)
    ids = emulator.select_blocks(*case.index_args, topk=case.topk, **rule)
    assert [launch.kernel for launch in emulator.launched] == [STREAM, TOPK]
    assert_selection(ids, case, **rule)


@pytest.mark.parametrize("heads", [1, 4, 11, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_rows(library, dtype, heads):
    """Tiles of 8, 16, 32 and 64 rows."""
    for seed in (0, 1):
        check(library, make(dtype, heads, topk=6), seed)


@pytest.mark.parametrize("rule", [{"local_blocks": 0}, {"init_blocks": 2, "local_blocks": 3}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_rules(library, dtype, rule):
    """Own blocks that need a score, of the tokens that are visible; blocks that need none."""
    case = make(dtype, 4, topk=8, poison="inf", strided=True)
    check(library, case, seed=3, **rule)
