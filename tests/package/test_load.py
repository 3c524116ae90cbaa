"""What a user reads when a library is missing."""

import os
import subprocess
import sys

import pytest
import torch

from msa_kernels import _load, build_info, is_supported


def test_missing_library_is_a_runtime_error_with_the_way_out(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"libmsa_ops.so is not built. Build it with `pip install"
    ):
        _load._load(tmp_path / "libmsa_ops.so", f"Build it with `{_load.BUILD_COMMAND}`.")


def test_unloadable_library_says_why(tmp_path):
    broken = tmp_path / "libmsa_ops.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(RuntimeError, match="does not load with torch"):
        _load._load(broken, "Build it.")


def test_import_without_the_library(tmp_path):
    """`import msa_kernels` itself fails, by name and with the command, not later at the first
    call."""
    package = tmp_path / "msa_kernels"
    subprocess.run(["cp", "-r", str(_load.LIB_DIR.parent), str(package)], check=True)
    for library in (package / "lib").glob("*.so"):
        library.unlink()
    run = subprocess.run(
        [sys.executable, "-c", "import msa_kernels"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: msa_kernels: libmsa_ops.so is not built.")
    assert _load.BUILD_COMMAND in last


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_reason_for_no_cuda_kernels_on_a_cpu_torch():
    assert "build without CUDA" in _load.cuda_unavailable_reason
    assert is_supported("merge_lse", "cuda") == (False, _load.cuda_unavailable_reason)
    assert build_info()["cuda"] is None
    with pytest.raises(
        RuntimeError, match=r"msa\.merge_lse: no CUDA kernels are loaded: .*MSA_BUILD_CUDA=1"
    ):
        _load.cuda_fallback("merge_lse.out", _load.cuda_unavailable_reason)()


def test_loading_again_changes_nothing():
    _load.load_libraries()
    assert torch.ops.msa.build_info()


@pytest.mark.parametrize("value,forced", [(None, False), ("", False), ("0", False), ("1", True)])
def test_portable_kernels_can_be_forced_for_a_process(value, forced):
    run = in_process("import msa_kernels.info as i; i.main()", value)
    assert run.returncode == 0, run.stderr
    assert ("MSA_FORCE_PORTABLE=1: the portable ones (sm80) alone" in run.stdout) == forced


def test_a_mistyped_force_is_refused():
    run = in_process("import msa_kernels; msa_kernels.build_info()", "yes")
    assert run.returncode != 0
    assert (
        "RuntimeError: msa_kernels: MSA_FORCE_PORTABLE must be 0, 1 or unset, got 'yes'"
        in (run.stderr.strip().splitlines()[-1])
    )


def in_process(code: str, forced: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "MSA_FORCE_PORTABLE"}
    if forced is not None:
        environment["MSA_FORCE_PORTABLE"] = forced
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_is_supported_answers():
    assert is_supported("sparse_prefill", "cpu", torch.float32) == (True, "cpu")
    assert is_supported("sparse_prefill", "cpu", torch.bfloat16, torch.float8_e4m3fn) == (
        True,
        "cpu",
    )
    supported, reason = is_supported("sparse_prefill", "cpu", torch.float16)
    assert not supported and "float16" in reason and "bfloat16" in reason
    assert not is_supported("sparse_prefill", "meta")[0]
    with pytest.raises(ValueError, match="sparse_attention"):
        is_supported("sparse_attention")
