"""Loads the libraries once and keeps the reason where one cannot be loaded."""

from pathlib import Path

import torch

LIB_DIR = Path(__file__).parent / "lib"
OPS_LIBRARY = LIB_DIR / "libmsa_ops.so"
CUDA_LIBRARY = LIB_DIR / "libmsa_cuda.so"
BUILD_COMMAND = "pip install --no-build-isolation -e ."

cuda_unavailable_reason: str | None = None
"""Why there are no CUDA kernels in this process; None when there are."""

# Keeps the fallback registrations alive.
_cuda_fallback: torch.library.Library | None = None


def load_libraries() -> None:
    """Makes `torch.ops.msa` complete.

    A second copy of a library would end the process, so each is loaded once.

    Raises:
        RuntimeError: the library of schemas and CPU kernels is not there or does not load.
    """
    global cuda_unavailable_reason
    if not hasattr(torch.ops.msa, "build_info"):  # else the host program has loaded it already
        _load(OPS_LIBRARY, f"Build it with `{BUILD_COMMAND}`.")
    if _has_cuda_kernels():
        return
    cuda_unavailable_reason = _load_cuda_library()
    if cuda_unavailable_reason is not None:
        _register_cuda_fallback(cuda_unavailable_reason)


def _load(path: Path, way_out: str) -> None:
    if not path.is_file():
        raise RuntimeError(f"msa_kernels: {path.name} is not built. {way_out}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise RuntimeError(
            f"msa_kernels: {path.name} does not load with torch {torch.__version__}: {error}. "
            f"{way_out}"
        ) from error


def _has_cuda_kernels() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("msa::merge_lse", "CUDA")


def _load_cuda_library() -> str | None:
    """Loads the CUDA kernels; the reason when that is not possible."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA. "
            f"Install a CUDA build of torch, then `MSA_BUILD_CUDA=1 {BUILD_COMMAND}`."
        )
    try:
        _load(CUDA_LIBRARY, f"Build it with `MSA_BUILD_CUDA=1 {BUILD_COMMAND}` (needs nvcc).")
    except RuntimeError as error:
        return str(error)
    return None


def _register_cuda_fallback(reason: str) -> None:
    """Lets every operator say why it has no CUDA kernel; torch would only say that it has none."""
    global _cuda_fallback
    _cuda_fallback = torch.library.Library("msa", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == "msa" and not op.endswith("build_info"):
            _cuda_fallback.impl(op, cuda_fallback(op, reason), "CUDA")


def cuda_fallback(op: str, reason: str):
    """The CUDA implementation of an operator that has none: it raises the reason."""

    def refuse(*args, **kwargs):
        raise RuntimeError(f"msa.{op.partition('.')[0]}: no CUDA kernels are loaded: {reason}")

    return refuse
