"""write_cache against the reference: the very bytes of the pools, and not one more."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BLOCK,
    DTYPES,
    FP8,
    LAYOUTS,
    D,
    copied_caches,
    dtype_name,
    make_case,
    packed,
    same_bits,
    sparse_view,
)


def write(function, case, **scales):
    """Writes the case's new tokens into caches of poison; returns the pools."""
    case = copied_caches(case, "nan")
    tokens = (case.k, case.v, case.index_k, case.slot_mapping)
    function(*tokens, case.k_cache, case.v_cache, case.index_k_cache, **(scales or case.scales))
    return case.pools


def assert_same_pools(case, **scales):
    actual = write(msa_kernels.write_cache, case, **scales)
    expected = write(reference.write_cache, case, **scales)
    for pool, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert same_bits(got, want), f"pool {pool} differs"


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_matches_reference(device, require, dtypes, layout, strided):
    require("write_cache", *dtypes)
    for batch in ("chunks", "mixed", "overfull", "nothing"):
        assert_same_pools(
            make_case(
                batch,
                dtype=dtypes[0],
                cache_dtype=dtypes[1],
                layout=layout,
                strided=strided,
                device=device,
            )
        )


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_slots_that_are_skipped(device, require, dtypes):
    """Slot -1, slots past the pool and slots whose page or offset wraps leave every byte alone."""
    require("write_cache", *dtypes)
    case = make_case(
        "chunks", dtype=dtypes[0], cache_dtype=dtypes[1], padding_rows=0, device=device
    )
    slots = case.k_cache.size(0) * BLOCK
    outside = [-1, slots, -BLOCK, slots + 5, 2**31, 2**32 + 5, 2**40, -(2**31), -(2**63), 2**63 - 1]
    inside = [5, 7, slots - 1, 0]
    mapping = torch.full((case.num_tokens,), -1, dtype=torch.int64)
    mapping[: len(outside)] = torch.tensor(outside)
    mapping[20 : 20 + len(inside)] = torch.tensor(inside)
    case = case.with_(slot_mapping=mapping.to(device))
    assert_same_pools(case)

    written = copied_caches(case, "nan")
    tokens = (case.k, case.v, case.index_k, case.slot_mapping)
    caches = (written.k_cache, written.v_cache, written.index_k_cache)
    msa_kernels.write_cache(*tokens, *caches, **case.scales)
    for cache in caches:
        elements = cache.float().isfinite().sum()
        assert int(elements) == len(inside) * cache.numel() // (slots or 1)


@pytest.mark.parametrize("form", ["number", "one", "per_head", "per_head_strided", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_scale_forms(device, require, dtype, form):
    require("write_cache", dtype, FP8)
    case = make_case("chunks", hkv=4, dtype=dtype, cache_dtype=FP8, device=device)
    if form == "none":
        scales = dict(k_scale=None, v_scale=None)
    elif form == "number":
        scales = dict(k_scale=0.37, v_scale=3)
    elif form == "one":
        scales = dict(k_scale=case.k_scale[:1], v_scale=case.v_scale[2:3])
    elif form == "per_head":
        scales = case.scales
    else:
        scales = {name: sparse_view(scale) for name, scale in case.scales.items()}
    assert_same_pools(case, **scales)


@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-6, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_fp8_rounding(device, require, dtype, scale):
    """Ties to even between neighbours, subnormals, saturation at 448, signed zero, Inf and NaN."""
    require("write_cache", dtype, FP8)
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([between * (1 - 2**-7), between * (1 + 2**-7)])
    wild = torch.tensor([448, 449, 463.9, 464, 465, 480, 1e4, 3e38, float("inf"), 2**-11, 1e-30, 0])
    x = torch.cat([numbers, between, near, wild])
    x = torch.cat([x, -x, torch.tensor([float("nan")])]) * scale
    x = torch.nn.functional.pad(x, (0, -x.numel() % D)).view(-1, 1, D).to(dtype).to(device)
    slots = torch.arange(len(x), device=device)
    caches = {}
    for function in (msa_kernels.write_cache, reference.write_cache):
        k_cache, v_cache = (torch.zeros(1, 1, BLOCK, D, device=device).to(FP8) for _ in range(2))
        function(x, x, None, slots, k_cache, v_cache, None, k_scale=scale)
        caches[function] = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    actual, expected = caches.values()
    for got, want in zip(actual, expected, strict=True):
        # A NaN is a NaN with either sign.
        got, want = (c.where((c & 0x7F) != 0x7F, 0x7F) for c in (got, want))
        different = (got != want).nonzero()
        assert not len(different), f"{len(different)} bytes, first at {different[0].tolist()}"


@pytest.mark.parametrize("index_dtype", [torch.float32, torch.bfloat16, FP8], ids=dtype_name)
def test_index_dtype_is_its_own(device, require, index_dtype):
    """The index cache may hold another dtype than K and V; FP8 index keys are copied as they
    are."""
    require("write_cache", torch.bfloat16, torch.bfloat16)
    assert_same_pools(
        make_case("chunks", dtype=torch.bfloat16, index_dtype=index_dtype, device=device)
    )


def test_without_an_index(device, require):
    require("write_cache")
    case = copied_caches(make_case("chunks", device=device), "nan")
    before = case.pools[-1].clone()
    msa_kernels.write_cache(
        case.k, case.v, None, case.slot_mapping, case.k_cache, case.v_cache, None
    )
    expected = copied_caches(case, "nan")
    reference.write_cache(
        case.k, case.v, None, case.slot_mapping, expected.k_cache, expected.v_cache, None
    )
    for got, want in zip(case.pools, expected.pools, strict=True):
        assert same_bits(got, want)
    assert same_bits(case.pools[-1], before)


def test_keeps_the_bits_of_every_number(device, require):
    """Caches that are not FP8 are copies: NaN payloads, -0, denormals and Inf included."""
    for dtype, ints in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        require("write_cache", dtype, dtype)
        step = 1 if dtype == torch.bfloat16 else 65537
        rows = torch.arange(128 * D, dtype=torch.int64) * 2 * step - 2**31
        k = (rows.to(torch.int32).to(ints)).view(dtype).view(128, 1, D).to(device)
        cache = torch.zeros(2, 1, BLOCK, D, dtype=dtype, device=device)
        other = torch.zeros_like(cache)
        slots = torch.arange(128, device=device) + BLOCK
        msa_kernels.write_cache(k, k, None, slots, cache, other, None)
        for written in (cache, other):
            assert same_bits(written[1, 0], k[:, 0])
            assert not bool(written[0].any())


def test_more_heads_and_wide_rows(device, require):
    require("write_cache", torch.bfloat16, torch.bfloat16)
    for hkv in (1, 3, 8):
        case = make_case("chunks", hq=hkv, hkv=hkv, dtype=torch.bfloat16, device=device)
        k, v, _ = packed(case.k, case.v, case.q)
        assert_same_pools(case.with_(k=k, v=v))
