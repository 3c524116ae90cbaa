"""What the compiler made of the CUDA kernels, read from the library without a GPU."""

import re
import subprocess
import sysconfig
from functools import lru_cache
from pathlib import Path

import pytest

from msa_kernels._load import CUDA_LIBRARY

ROOT = Path(__file__).parents[2]
PORTABLE = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
HOPPER = ("sm_90a",)
# Kernel symbol -> architectures that it is compiled for, SASS instructions that it exists for.
HOT_KERNELS = {
    "msa_decode_cluster_sm90_kernel": (HOPPER, {"HMMA", "LDGSTS.E", "UCGABAR_ARV", "STAS.128"}),
    "msa_decode_merge_sm80_kernel": (PORTABLE, {"LDG.E.128"}),
    "msa_decode_pair_sm90_kernel": (HOPPER, {"HMMA", "LDGSTS.E"}),
    "msa_decode_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E"}),
    "msa_decode_stream_sm90_kernel": (HOPPER, {"HMMA", "LDSM", "UTMALDG", "SYNCS"}),
    "msa_decode_tile_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG"}),
    "msa_decode_view_sm80_kernel": (PORTABLE, {"SHFL"}),
    "msa_find_candidates_sm90_kernel": (HOPPER, {"VOTE", "ATOMG", "LDG.E.128"}),
    "msa_index_score_fill_sm80_kernel": (PORTABLE, set()),
    "msa_index_score_stream_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E", "LDS.128"}),
    "msa_index_score_stream_sm90_kernel": (HOPPER, {"HMMA", "UBLKCP", "SYNCS", "LDS.128"}),
    "msa_index_score_tile_sm80_kernel": (PORTABLE, {"HMMA", "LDGSTS.E", "LDS.128"}),
    "msa_index_score_tile_sm90_kernel": (HOPPER, {"HGMMA", "UTMALDG", "USETMAXREG"}),
    "msa_kv_block_schedule_clear_sm80_kernel": (PORTABLE, set()),
    "msa_kv_block_schedule_count_sm80_kernel": (PORTABLE, {"ATOMS", "LDGSTS.E"}),
    "msa_kv_block_schedule_scan_sm80_kernel": (PORTABLE, {"SHFL"}),
    "msa_kv_block_schedule_scatter_sm80_kernel": (PORTABLE, {"ATOMS", "LDGSTS.E"}),
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
    "msa_topk_blocks_sm80_kernel": (PORTABLE, {"VOTE", "MATCH", "REDUX"}),
    "msa_write_cache_sm80_kernel": (PORTABLE, {".E.128"}),
}

# Launched after all that came before: they wait for nothing. Every other kernel may be launched by
# programmatic dependent launch, and then starts while the kernel before it still writes.
NEVER_DEPENDENT = {
    "msa_kv_block_schedule_clear_sm80_kernel",
    "msa_merge_lse_sm80_kernel",
    "msa_normalize_patches_sm80_kernel",
    "msa_sparse_prefill_sm80_kernel",
    "msa_split_selection_short_sm90_kernel",
    "msa_split_selection_sm90_kernel",
    "msa_write_cache_sm80_kernel",
}
# Kernels with an instantiation for e4m3, which becomes float16 by the hardware's conversion.
CONVERTING_KERNELS = [
    "msa_decode_cluster_sm90_kernel",
    "msa_decode_pair_sm90_kernel",
    "msa_decode_sm80_kernel",
    "msa_decode_stream_sm90_kernel",
    "msa_index_score_stream_sm80_kernel",
    "msa_index_score_stream_sm90_kernel",
    "msa_index_score_tile_sm80_kernel",
    "msa_index_score_tile_sm90_kernel",
    "msa_sparse_prefill_kv_block_sm90_kernel",
    "msa_sparse_prefill_query_block_sm90_kernel",
]
OF_FP8_ALONE = {"msa_decode_stream_sm90_kernel"}


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


@lru_cache
def machine_code() -> list[tuple[str, str, str]]:
    """(architecture, kernel symbol, SASS) of every compiled kernel."""
    rows, arch = [], ""
    for part in re.split(r"\n\s*(?=code for |Function : )", dump("--dump-sass")):
        head, _, body = part.partition("\n")
        if match := re.match(r"code for (\S+)", head):
            arch = match[1]
        elif match := re.match(r"Function : (\S+)", head):
            rows.append((arch, match[1], body))
    return rows


def short_name(function: str) -> str:
    return re.search(r"msa_\w+?_sm\d+_kernel", function)[0]


def version(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


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
    bodies = [(function, body) for _, function, body in machine_code() if kernel in function]
    archs, instructions = HOT_KERNELS[kernel]
    assert len(bodies) >= len(archs)
    for function, body in bodies:
        missing = {name for name in instructions if name not in body}
        assert not missing, f"{function} has no {missing}"
        assert not re.search(r"\b(LDL|STL)\b", body), f"{function} uses local memory"


@pytest.mark.parametrize("kernel", CONVERTING_KERNELS)
def test_fp8_is_converted(kernel):
    """Instantiations for e4m3 convert it and multiply float16; the others do neither."""
    found = set()
    for arch, function, body in machine_code():
        if kernel not in function or version(arch) < 90:  # before, by integer arithmetic
            continue
        fp8 = "__nv_fp8_e4m3" in function or "DTypeE2" in function  # DType::kFloat8E4M3
        fp8 = fp8 or kernel in OF_FP8_ALONE
        found.add(fp8)
        assert ("F2FP.F16.E4M3.UNPACK_B" in body) == fp8, function
        assert bool(re.search(r"\bHG?MMA\.[\dx.]+F32 ", body)) == fp8, function
    assert found == ({True} if kernel in OF_FP8_ALONE else {False, True})


def dependent_launches() -> set[str]:
    """Kernels that a dependent launch in the sources names, if only in its message."""
    names = set()
    for path in (ROOT / "csrc").rglob("*.cu"):
        for call in re.findall(r"\blaunch_(?:dependent|portable)\b[^;]*;", path.read_text()):
            names.update(re.findall(r"msa_\w+_kernel", call))
    return names


def test_dependent_kernels_wait():
    """Without its wait such a kernel reads what the one before it has not yet written: a race."""
    named = {short_name(function) for _, function, _ in machine_code()}
    assert "msa_topk_blocks_sm80_kernel" in dependent_launches() <= named - NEVER_DEPENDENT
    waiting = [row for row in machine_code() if version(row[0]) >= 90]
    waiting = [row for row in waiting if short_name(row[1]) not in NEVER_DEPENDENT]
    without = [(arch, name) for arch, name, body in waiting if not re.search(r"\bACQBULK\b", body)]
    assert waiting and not without


def test_every_kernel_is_listed():
    """A new kernel is hot unless someone decides otherwise, here."""
    assert {short_name(function) for _, function, _ in resource_usage()} == set(HOT_KERNELS)
