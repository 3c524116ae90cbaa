"""What a number depends on besides the code: GPU, clocks, driver, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import msa_kernels

ROOT = Path(__file__).parent.parent


def describe(device: torch.device) -> dict[str, Any]:
    """The machine as plain data: gpu, clocks (MHz), power limit (W), driver, versions."""
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "msa_kernels": msa_kernels.__version__,
    }
    if device.type != "cuda":
        return {"gpu": "cpu", **machine}
    if msa_kernels.build_info()["cpu"]["portable_forced"]:
        machine["kernels"] = "the portable ones alone (MSA_FORCE_PORTABLE=1)"
    properties = torch.cuda.get_device_properties(device)
    machine |= {"sms": properties.multi_processor_count, "l2_mb": properties.L2_cache_size >> 20}
    fields = {
        "driver": "driver_version",
        "sm_mhz": "clocks.sm",
        "sm_mhz_max": "clocks.max.sm",
        "mem_mhz": "clocks.mem",
        "power_limit_w": "power.limit",
    }
    answer = _run("nvidia-smi", f"--query-gpu={','.join(fields.values())}", _NVIDIA_SMI_FORMAT)
    if answer:
        first = [x.strip() for x in answer.splitlines()[0].split(",")]
        machine |= dict(zip(fields, first, strict=False))
    return {"gpu": properties.name, **machine}


_NVIDIA_SMI_FORMAT = "--format=csv,noheader,nounits"


def commit() -> str:
    """The commit measured: MSA_BENCH_COMMIT, else the checkout's, else that of the libraries."""
    if given := os.environ.get("MSA_BENCH_COMMIT"):
        return given
    if found := _run("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"):
        changed = _run("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
        return found.strip() + ("+" if changed else "")
    info = msa_kernels.build_info()
    for library in (info["cuda"], info["cpu"]):
        if library and library["git_commit"]:
            return library["git_commit"]
    return "unknown"


def now() -> str:
    """UTC, ISO 8601, seconds."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
