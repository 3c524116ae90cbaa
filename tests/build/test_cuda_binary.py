"""What the compiler made of the CUDA kernels, read from the library without a GPU."""

import re
import subprocess
import sysconfig
from functools import lru_cache
from pathlib import Path

import pytest

from msa_kernels._load import CUDA_LIBRARY

PORTABLE = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
HOPPER = ("sm_90a",)
# Kernel symbol -> architectures that it is compiled for, SASS instructions that it exists for.
HOT_KERNELS = {
    "msa_decode_cluster_sm90_kernel": (HOPPER, {"HMMA", "LDGSTS.E", "UCGABAR_ARV", "STAS.128"}),
    "msa_decode_merge_sm80_kernel": (PORTABLE, {"LDG.E.128"}),
    "msa_decode_pair_sm90_kernel": (HOPPER, {"HMMA", "LDGSTS.E"}),
    "msa_decode_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E"}),
    "msa_decode_tile_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG"}),
    "msa_decode_view_sm80_kernel": (PORTABLE, {"SHFL"}),
    "msa_find_candidates_sm90_kernel": (HOPPER, {"VOTE", "ATOMG", "LDG.E.128"}),
    "msa_index_score_fill_sm80_kernel": (PORTABLE, set()),
    "msa_index_score_stream_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E", "LDS.128"}),
    "msa_index_score_stream_sm90_kernel": (HOPPER, {"HMMA", "UBLKCP", "SYNCS", "LDS.128"}),
    "msa_index_score_tile_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E", "LDS.128"}),
    "msa_index_score_tile_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG", "USETMAXREG"}),
    "msa_kv_block_schedule_count_sm80_kernel": (PORTABLE, {"ATOMS"}),
    "msa_kv_block_schedule_fill_sm80_kernel": (PORTABLE, set()),
    "msa_kv_block_schedule_scan_sm80_kernel": (PORTABLE, {"SHFL"}),
    "msa_kv_block_schedule_scatter_sm80_kernel": (PORTABLE, set()),
    "msa_merge_lse_sm80_kernel": (PORTABLE, {"LDGSTS.E"}),
    "msa_normalize_patches_sm80_kernel": (PORTABLE, {"PRMT", "LDS.128"}),
    "msa_rescore_candidates_sm90_kernel": (HOPPER, {"HGMMA", "F2FP.F16.E4M3.UNPACK_B"}),
    "msa_score_bounds_sm90_kernel": (HOPPER, {"QGMMA", "UTMALDG", "USETMAXREG", "VIMNMX3"}),
    "msa_score_factors_sm90_kernel": (HOPPER, {"LDG.E.128"}),
    "msa_settle_rows_sm90_kernel": (HOPPER, {"REDUX", "VOTE"}),
    "msa_sparse_prefill_kv_block_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG", "USETMAXREG"}),
    "msa_sparse_prefill_sm80_kernel": (PORTABLE, {"HMMA.16816.F32.BF16", "LDSM", "LDGSTS.E"}),
    "msa_sparse_prefill_merge_sm90_kernel": (HOPPER, {"LDG.E.EF.128"}),
    "msa_sparse_prefill_query_block_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG", "USETMAXREG"}),
    "msa_split_selection_requests_sm90_kernel": (HOPPER, {"ATOMS"}),
    "msa_split_selection_scatter_sm90_kernel": (HOPPER, set()),
    "msa_split_selection_short_sm90_kernel": (HOPPER, {"ATOMS", "UCGABAR_ARV"}),
    "msa_split_selection_sm90_kernel": (HOPPER, {"ATOMS"}),
    "msa_topk_blocks_sm80_kernel": (PORTABLE, {"VOTE", "SHFL"}),
    "msa_write_cache_sm80_kernel": (PORTABLE, {".E.128"}),
}


def cuobjdump() -> str:
    site = Path(sysconfig.get_path("purelib"))
    found = sorted(site.glob("nvidia/*/bin/cuobjdump"))
    if not found:
        pytest.skip("cuobjdump is not installed (PyPI: nvidia-cuda-cuobjdump)")
    return str(found[0])


@lru_cache
def dump(option: str) -> str:
    if not CUDA_LIBRARY.is_file():
        pytest.skip("libmsa_cuda.so is not built (MSA_BUILD_CUDA=1 make build)")
    run = subprocess.run(
        [cuobjdump(), option, str(CUDA_LIBRARY)], capture_output=True, text=True, check=True
    )
    return run.stdout


def resource_usage() -> list[tuple[str, str, dict[str, int]]]:
    """(architecture, kernel symbol, resources) of every compiled kernel."""
    rows, arch, function = [], "", ""
    for line in dump("--dump-resource-usage").splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            function = match[1]
        elif "REG:" in line:
            usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}
            rows.append((arch, function, usage))
    return rows


@pytest.mark.parametrize("kernel", HOT_KERNELS)
def test_compiled_for_every_architecture(kernel):
    archs = {arch for arch, function, _ in resource_usage() if kernel in function}
    assert archs == set(HOT_KERNELS[kernel][0])


@pytest.mark.parametrize("kernel", HOT_KERNELS)
def test_no_local_memory(kernel):
    rows = [row for row in resource_usage() if kernel in row[1]]
    assert rows
    spilling = [row for row in rows if row[2]["STACK"] or row[2]["LOCAL"]]
    assert spilling == []


@pytest.mark.parametrize("kernel", HOT_KERNELS)
def test_the_instructions_it_exists_for(kernel):
    bodies = re.split(r"\n\s*Function : ", dump("--dump-sass"))
    bodies = [body for body in bodies[1:] if kernel in body.splitlines()[0]]
    archs, instructions = HOT_KERNELS[kernel]
    assert len(bodies) >= len(archs)
    for body in bodies:
        missing = {name for name in instructions if name not in body}
        assert not missing, f"{body.splitlines()[0]} has no {missing}"
        assert not re.search(r"\b(LDL|STL)\b", body), f"{body.splitlines()[0]} uses local memory"


@pytest.mark.parametrize("kernel", ["kv_block", "query_block"])
def test_fp8_caches_are_converted(kernel):
    """One instantiation of each kernel converts e4m3 and multiplies float16; the other neither."""
    name = f"msa_sparse_prefill_{kernel}_sm90_kernel"
    bodies = re.split(r"\n\s*Function : ", dump("--dump-sass"))
    bodies = [body for body in bodies[1:] if name in body.splitlines()[0]]
    converting = ["F2FP.F16.E4M3.UNPACK_B" in body for body in bodies]
    float16 = [bool(re.search(r"HGMMA\.64x128x16\.F32 ", body)) for body in bodies]
    assert sorted(converting) == [False, True] and float16 == converting


def test_every_kernel_is_listed():
    """A new kernel is hot unless someone decides otherwise, here."""
    named = {
        re.search(r"msa_\w+?_sm\d+_kernel", function)[0] for _, function, _ in resource_usage()
    }
    assert named == set(HOT_KERNELS)
