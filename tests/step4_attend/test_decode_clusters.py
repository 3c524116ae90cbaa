"""sparse_decode calls that leave SMs to spare: Hopper cuts their rows in parts that merge in
clusters, by as many CTAs as there are SMs, or two CTAs an SM."""

import pytest
import torch

import msa_kernels
from tests.conftest import no_gpu_reason
from tests.inputs import FP8, dtype_name, make_case, same_bits, with_duplicates, with_holes
from tests.tolerance import assert_attention

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)


def run(case):
    return msa_kernels.sparse_decode(*case.attend_args, **case.scales, return_lse=True)


def check(case):
    out, lse = run(case)
    assert_attention(case, out, lse)
    again, again_lse = run(case)
    assert same_bits(again, out) and same_bits(again_lse, lse)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4), (4, 4), (16, 1)])
@pytest.mark.parametrize("requests", [1, 4, 6, 7, 8, 9, 10, 13, 24, 32])
def test_number_of_units(requests, hq, hkv, cache_dtype):
    lengths = [(1, 1 + 1777 * (r + 3) % 9000) for r in range(requests)]
    options = {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "device": "cuda"}
    case = make_case(lengths, hq=hq, hkv=hkv, padding_rows=0, **options)
    check(case)
    if requests in (7, 8):
        check(case.with_(ids=with_holes(case.ids.clone())))
        check(case.with_(ids=with_duplicates(case.ids.clone())))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
@pytest.mark.parametrize("topk", [1, 3, 5, 8, 31, 32])
def test_number_of_blocks(topk, cache_dtype):
    lengths = [(1, 40 * 128 + 700 * r) for r in range(8)]
    options = {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "device": "cuda"}
    check(make_case(lengths, hq=64, hkv=4, topk=topk, padding_rows=0, poison="inf", **options))
