"""normalize_patches against the reference and the golden patches: to the bit, on every device."""

import hashlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import dtype_name, same_bits

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(2, 2), (1, 2), (1, 1)]
"""(frames, temporal)"""


def pixels(rows, frames, patch=14, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 3 * frames * patch * patch)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def judge(got, patches, dtype, mean=MEAN, std=STD, **options):
    """Equal bits; the reference runs on the CPU."""
    expected = reference.normalize_patches(patches.cpu(), mean, std, **options).to(dtype)
    assert got.is_contiguous() and same_bits(got.cpu(), expected)


@pytest.mark.parametrize("frames,temporal", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_matches_reference(device, require, dtype, frames, temporal):
    """Numbers of rows around the tiles of the kernel, some of them no multiple of anything."""
    require("normalize_patches", dtype)
    for rows in (1, 2, 3, 4, 6, 7, 8, 14, 15, 97, 256):
        patches = pixels(rows, frames).to(device)
        options = {"temporal": temporal}
        got = msa_kernels.normalize_patches(patches, MEAN, STD, dtype=dtype, **options)
        assert got.shape == (rows, 3 * temporal * 196) and got.dtype == dtype
        judge(got, patches, dtype, **options)


@pytest.mark.parametrize("patch", [4, 6, 16, 30, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_other_patches(device, require, dtype, patch):
    require("normalize_patches", dtype)
    for frames, temporal in SHAPES:
        patches = pixels(5, frames, patch).to(device)
        options = {"patch": patch, "temporal": temporal}
        got = msa_kernels.normalize_patches(patches, MEAN, STD, dtype=dtype, **options)
        judge(got, patches, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_byte_of_every_channel_at_every_place(device, require, dtype):
    """No column, byte or channel takes another's number."""
    require("normalize_patches", dtype)
    patches = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 1176).contiguous()
    got = msa_kernels.normalize_patches(patches.to(device), MEAN, STD, dtype=dtype).cpu()
    for channel in range(3):
        mean = torch.tensor(MEAN[channel]) * 255.0
        std = torch.tensor(STD[channel]) * 255.0
        column = ((torch.arange(256).float() - mean) / std).to(dtype)[:, None]
        part = got[:, 392 * channel : 392 * (channel + 1)]
        assert same_bits(part, column.expand(-1, 392))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_frame_alone_is_a_clip_of_it_twice(device, require, dtype):
    require("normalize_patches", dtype)
    single = pixels(33, 1).to(device)
    twice = single.view(33, 3, 1, 196).expand(-1, -1, 2, -1).reshape(33, 1176)
    got, want = (msa_kernels.normalize_patches(x, MEAN, STD, dtype=dtype) for x in (single, twice))
    assert same_bits(got, want)


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_slices_of_rows_and_outputs(device, require, dtype, frames):
    """Any rows of a batch, into any rows of another; nothing around them is written."""
    require("normalize_patches", dtype)
    patches = pixels(40, frames).to(device)
    for begin, end in ((0, 40), (1, 40), (3, 4), (7, 28), (2, 39)):
        whole = torch.full((60, 1176), -77.0, dtype=dtype, device=device)
        out = whole[5 : 5 + end - begin]
        result = msa_kernels.normalize_patches(patches[begin:end], MEAN, STD, out=out)
        assert result is out
        judge(out, patches[begin:end], dtype)
        assert bool((whole[:5] == -77).all()) and bool((whole[5 + end - begin :] == -77).all())


def test_the_result_is_bfloat16_unless_asked_otherwise(device, require):
    require("normalize_patches", torch.bfloat16)
    patches = pixels(4, 2).to(device)
    assert msa_kernels.normalize_patches(patches, MEAN, STD).dtype == torch.bfloat16
    out = torch.empty(4, 1176, dtype=torch.bfloat16, device=device)
    msa_kernels.normalize_patches(patches, MEAN, STD, dtype=torch.bfloat16, out=out)
    judge(out, patches, torch.bfloat16)


@pytest.mark.parametrize("frames", [1, 2])
def test_no_rows(device, require, frames):
    require("normalize_patches", torch.bfloat16)
    none = torch.empty(0, 588 * frames, dtype=torch.uint8, device=device)
    assert msa_kernels.normalize_patches(none, MEAN, STD).shape == (0, 1176)


per_channel = st.tuples(*[st.floats(0, 1, width=32)] * 3)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mean=per_channel, std=st.tuples(*[st.floats(1e-6, 1)] * 3), seed=st.integers(0, 99))
def test_any_mean_and_std(device, require, mean, std, seed):
    """Means as small as the kernel's arithmetic is exact for."""
    require("normalize_patches", torch.float32)
    mean = tuple(x if x > 1e-20 else 0.0 for x in mean)
    patches = pixels(2, 2, 4, seed).to(device)
    got = msa_kernels.normalize_patches(patches, mean, std, patch=4, dtype=torch.float32)
    judge(got, patches, torch.float32, mean, std, patch=4)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(mean=st.floats(1e-20, 1) | st.just(0.0), std=st.floats(1e-6, 1))
def test_the_products_of_the_gpu_are_the_division(mean, std):
    """The arithmetic of the CUDA kernel, on the host: a rounded quotient to the bit."""
    from tests import _internals

    got = torch.tensor(_internals.normalized_bytes(mean, std))
    offset, scale = (torch.tensor(x, dtype=torch.float32) * 255.0 for x in (mean, std))
    assert same_bits(got, (torch.arange(256).float() - offset) / scale)


def sha(tensor):
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def golden_patches():
    """(uint8 patches with every frame, if of an image, the processor's numbers or None)."""
    from examples.m3_serving.gateway.pixels import PatchWriter
    from tests.examples.gateway.gateway_media import GEOMETRY, GOLDEN, pattern

    for kind in ("images", "videos"):
        for case in GOLDEN[kind]:
            indices = case.get("indices", [0])
            writer = PatchWriter(len(indices), *case["resized_hw"], GEOMETRY)
            for place, index in enumerate(indices):
                writer.put(place, pattern(*case["src_hw"], index))
            same = case.get("sha_u8_pil", case["sha_u8"]) == case["sha_u8"]
            resized = list(case["src_hw"]) != list(case["resized_hw"])
            known = case["sha_f32"] if same and not (kind == "videos" and resized) else None
            yield torch.from_numpy(writer.finish()), kind == "images", known


def test_golden_patches(device, require):
    """The processor's own float32 numbers, and bfloat16 rounded from them; of an image also from
    its first frames alone."""
    require("normalize_patches", torch.float32)
    pytest.importorskip("PIL")
    from tests.examples.gateway.gateway_media import normalise

    compared = 0
    for patches, image, known in golden_patches():
        expected = torch.from_numpy(normalise(patches.numpy()))
        inputs = [patches]
        if image:
            inputs.append(patches.view(-1, 3, 2, 196)[:, :, 0].reshape(-1, 588))
        for part in inputs:
            for dtype in DTYPES:
                got = msa_kernels.normalize_patches(part.to(device), MEAN, STD, dtype=dtype)
                assert same_bits(got.cpu(), expected.to(dtype))
                if known is not None and dtype == torch.float32:
                    assert sha(got) == known
                    compared += 1
    assert compared >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("frames", [1, 2])
def test_in_a_graph_on_the_callers_stream(frames):
    """A replay reads new pixels; nothing synchronises while it is captured."""
    from tests.conftest import no_gpu_reason

    if reason := no_gpu_reason():
        pytest.skip(reason)
    patches = pixels(64, frames).cuda()
    out = torch.empty(64, 1176, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        msa_kernels.normalize_patches(patches, MEAN, STD, out=out)
    for seed in (1, 2):
        patches.copy_(pixels(64, frames, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        judge(out, patches, torch.bfloat16)


@pytest.mark.gpu
def test_more_than_two_to_the_31_numbers():
    """Offsets are 64-bit: the last rows of a result of 2^32 bytes and more are right."""
    from tests.conftest import no_gpu_reason

    if reason := no_gpu_reason():
        pytest.skip(reason)
    rows = 2**31 // 1176 + 4000
    if torch.cuda.mem_get_info()[0] < rows * 1176 * 4:
        pytest.skip("not enough memory for a result of 2^31 numbers")
    for frames in (1, 2):
        patches = torch.zeros(rows, 588 * frames, dtype=torch.uint8, device="cuda")
        patches[-4000:] = pixels(4000, frames).cuda()
        out = msa_kernels.normalize_patches(patches, MEAN, STD)
        judge(out[-4000:], patches[-4000:], torch.bfloat16)
        del out, patches
