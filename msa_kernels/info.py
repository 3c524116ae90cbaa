"""`python -m msa_kernels.info`: what was compiled, what a call would run here, and why something
is missing."""

import argparse
import json
import os
import platform
import sys

import torch

from . import _load
from .support import build_info, is_supported


def describe() -> dict:
    """The build and this machine as plain data."""
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            devices.append(
                {"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}
            )
    return {
        "build": build_info(),
        "cuda_unavailable_reason": _load.cuda_unavailable_reason,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "devices": devices,
        "runs": runs(),
    }


def runs() -> list[dict]:
    """What a call would run, for every operator and configuration of both builds."""
    rows = []
    info = build_info()
    kernels = info["cpu"]["kernels"] + (info["cuda"]["kernels"] if info["cuda"] else [])
    seen = dict.fromkeys((k["op"], k["dtype"], k["cache_dtype"]) for k in kernels)
    for op, dtype, cache in seen:
        row = {"op": op, "dtype": dtype, "cache_dtype": cache}
        for device in ("cpu", "cuda"):
            cache_dtype = getattr(torch, cache) if cache else None
            _, row[device] = is_supported(op, device, getattr(torch, dtype), cache_dtype)
        rows.append(row)
    return rows


def main() -> None:
    """Prints the description as text, or as JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m msa_kernels.info", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    data = describe()
    if arguments.json:
        print(json.dumps(data, indent=2))
        return
    for name, build in data["build"].items():
        if build is None:
            print(f"{name + ' library':<14}not loaded: {data['cuda_unavailable_reason']}")
            continue
        print(
            f"{name + ' library':<14}msa_kernels {build['version']}, commit {build['git_commit']}, "
            f"{build['compiler']}, torch >= {build['torch_target']} "
            f"(headers {build['torch_headers']})"
        )
        if build["cuda"]:
            print(
                f"{'':<14}CUDA {build['cuda']}, CUTLASS {build['cutlass']}, "
                f"sm {build['cuda_archs']}"
            )
    print(
        f"{'this process':<14}torch {data['torch']}, CUDA {data['torch_cuda']}, "
        f"Python {data['python']}"
    )
    for index, device in enumerate(data["devices"]):
        print(f"{f'cuda:{index}':<14}{device['name']}, compute capability {device['capability']}")
    if not data["devices"]:
        print(f"{'cuda devices':<14}none")
    if data["build"]["cpu"]["portable_forced"]:
        print(f"{'kernels':<14}MSA_FORCE_PORTABLE=1: the portable ones (sm80) alone")
    print("\noperator           dtype          cache          cpu  cuda")
    for row in data["runs"]:
        cuda = row["cuda"]
        if data["build"]["cuda"] is None or not data["devices"]:
            cuda = "-"
        elif cuda not in ("sm80", "sm90"):
            cuda = f"not built ({cuda})"
        cpu = "yes" if row["cpu"] == "cpu" else "no"
        print(f"{row['op']:<19}{row['dtype']:<15}{row['cache_dtype'] or '-':<15}{cpu:<5}{cuda}")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
