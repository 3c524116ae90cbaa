"""Index scores on Hopper: tiles of 256 rows, and pages streamed past fewer."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import BLOCK, FP8, make_case
from tests.tolerance import assert_close, score_slack

TILE_ROWS = [256, 16]
UNTOUCHED = 12345.0


def make(dtype, lengths=((70, 8 * BLOCK + 5), (0, 300), (3, 700), (9, 4)), heads=4, **options):
    options.setdefault("table_padding", -1)
    return make_case(
        lengths, hq=heads, hkv=heads, dtype=torch.bfloat16, index_dtype=dtype, **options
    )


def check(scores, case):
    """Blocks before the tokens' own, and nothing else."""
    where = reference.token_positions(
        case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
    )
    before = torch.arange(scores.size(2)) < (where.pos.clamp(min=0) // BLOCK).unsqueeze(1)
    before &= (torch.arange(case.num_tokens) < case.num_real).unsqueeze(1)
    assert bool((scores[:, ~before] == UNTOUCHED).all())
    exact = reference.index_score(*case.index_args, compute_dtype=torch.float64)[:, before]
    baseline = reference.index_score(*case.index_args, compute_dtype=torch.float32)[:, before]
    floor = float(score_slack(case).nan_to_num(0).max()) / 2
    assert_close(scores[:, before], exact, baseline, "scores", floor)


@pytest.mark.parametrize("rows", [256, 64, 32, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
def test_orders(emulator, dtype, rows):
    case = make(dtype)
    check(emulator.index_score(*case.index_args, tile_rows=rows), case)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("rows", TILE_ROWS)
def test_heads(library, rows, heads):
    case = make(torch.bfloat16, heads=heads, strided=heads == 3)
    check(Emulator(library, sms=2).index_score(*case.index_args, tile_rows=rows), case)


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("positive", [0, 2, 5], ids=["all", "every_second", "but_every_fifth"])
def test_negative_scores(library, dtype, rows, positive):
    """Of all tokens, or beside tokens with positive ones; and one with nothing but NaN."""
    case = make(dtype)
    queries = case.index_q.float().abs()
    if positive:
        queries[::positive] *= -1
    queries[7, 1, 100] = torch.nan
    case.index_q.copy_(queries.to(dtype))
    case.index_k_cache.copy_((-case.index_k_cache.float().abs()).to(dtype))
    check(Emulator(library).index_score(*case.index_args, tile_rows=rows), case)


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
def test_nan_and_absent_pages(emulator, dtype, rows):
    case = make(dtype)
    generator = torch.Generator().manual_seed(7)
    for tensor in (case.index_q, case.index_k_cache):
        hit = torch.rand(tensor.shape, generator=generator) < 0.0002
        tensor.copy_(torch.where(hit, torch.nan, tensor.float()).to(dtype))
    case.block_table[0, 2:8:4] = -1
    case.block_table[2, 1] = case.index_k_cache.size(0)
    check(emulator.index_score(*case.index_args, tile_rows=rows), case)
