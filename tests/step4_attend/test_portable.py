"""On Hopper, the tests of what has kernels of its own there, again with the portable ones."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import no_gpu_reason

ROOT = Path(__file__).parent.parent.parent
STEPS = ("tests/step1_score", "tests/step2_select", "tests/step4_attend")


@pytest.mark.gpu
@pytest.mark.slow
def test_portable_kernels_on_hopper():
    """Which kernels run is settled once a process: another one takes the portable ones."""
    if reason := no_gpu_reason():
        pytest.skip(reason)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU: all tests here have run the portable kernels")
    if os.environ.get("MSA_FORCE_PORTABLE") == "1":
        pytest.skip("MSA_FORCE_PORTABLE=1: all tests here run the portable kernels")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # most of a test is the CPU's
        command += ["-n", "4"]
    # What says that this process is one of xdist's does not hold for that one.
    outer = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(
        [*command, *STEPS],
        cwd=ROOT,
        env={**outer, "MSA_FORCE_PORTABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
