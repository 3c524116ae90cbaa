"""What is built and what a call would run, asked from the libraries themselves."""

import json
from functools import lru_cache
from typing import Any

import torch

from . import _load


def _runs_on(
    arch: str, capability: tuple[int, int], cuda_archs: str, portable_forced: bool = False
) -> bool:
    """Whether the kernels of a folder run on a compute capability (major, minor).

    sm90 kernels are compiled for 9.0 alone, and kept from running by MSA_FORCE_PORTABLE=1; sm80
    ones for each of `cuda_archs` ("80,90a,..."), and as PTX of the lowest, which the driver
    compiles for any later GPU.
    """
    if arch == "sm90":
        return capability == (9, 0) and not portable_forced
    lowest = min(int(name.rstrip("af")) for name in cuda_archs.split(","))
    return capability[0] * 10 + capability[1] >= lowest


@lru_cache
def build_info() -> dict[str, Any]:
    """What the loaded libraries contain.

    Returns:
        {"cpu": info, "cuda": info or None}; info has version, git_commit, compiler, torch_target,
        torch_headers, cuda, cutlass, cuda_archs, portable_forced (whether MSA_FORCE_PORTABLE=1
        keeps this process to the sm80 kernels) and kernels, a list of {op, arch, dtype,
        cache_dtype}.
    """
    cpu = json.loads(torch.ops.msa.build_info())
    if _load.cuda_unavailable_reason is not None:
        return {"cpu": cpu, "cuda": None}
    return {"cpu": cpu, "cuda": json.loads(torch.ops.msa.cuda_build_info())}


def is_supported(
    op: str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> tuple[bool, str]:
    """Whether a call of an operator would run, and on which kernel folder, or why not.

    Args:
        op: operator name, for example "sparse_prefill".
        device: "cpu", "cuda" (the current device) or "cuda:1".
        dtype: of q, index_q, k, the parts of a merge, the ids of a remap or view, or the result of
            normalize_patches.
        cache_dtype: of the caches; None: the same as `dtype`. Ignored by operators without a cache.

    Returns:
        (True, "cpu" | "sm80" | "sm90") or (False, reason).

    Raises:
        ValueError: no operator has that name, or torch knows no such device.
    """
    info = build_info()
    ops = dict.fromkeys(kernel["op"] for kernel in info["cpu"]["kernels"])
    if op not in ops:
        raise ValueError(f"msa.is_supported: op must be one of {', '.join(ops)}, got {op!r}")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"msa.is_supported: device must be one that torch knows, got {device!r}"
        ) from error
    if device.type not in ("cpu", "cuda"):
        return False, f"msa_kernels runs on cpu and cuda devices, not on {device.type}"
    if device.type == "cuda" and info["cuda"] is None:
        return False, str(_load.cuda_unavailable_reason)
    if device.type == "cuda" and not torch.cuda.is_available():
        return False, "torch finds no CUDA device"
    build = info[device.type]
    kernels = [k for k in build["kernels"] if k["op"] == op]
    if not kernels:
        return False, f"no {device.type} kernel of {op} is in this build"
    names = [str(d).removeprefix("torch.") for d in (dtype, cache_dtype or dtype)]
    fitting = [
        k for k in kernels if k["dtype"] == names[0] and k["cache_dtype"] in (None, names[1])
    ]
    if not fitting:
        built = ", ".join(dict.fromkeys(f"{k['dtype']}/{k['cache_dtype'] or '-'}" for k in kernels))
        return False, f"no {device.type} kernel of {op} for {'/'.join(names)}; built: {built}"
    if device.type == "cpu":
        return True, "cpu"
    capability = torch.cuda.get_device_capability(device)
    for kernel in reversed(fitting):  # later lines of a list are for newer architectures
        if _runs_on(kernel["arch"], capability, build["cuda_archs"], build["portable_forced"]):
            return True, kernel["arch"]
    return False, f"no kernel of {op} runs on compute capability {capability[0]}.{capability[1]}"
