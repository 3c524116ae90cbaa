"""On Hopper, the tests of this folder again with the portable kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import no_gpu_reason

ROOT = Path(__file__).parent.parent.parent


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
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*pytest_command, str(Path(__file__).parent)],
        cwd=ROOT,
        env={**os.environ, "MSA_FORCE_PORTABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
