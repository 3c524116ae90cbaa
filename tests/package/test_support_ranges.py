"""Which GPUs a build says it runs on, from the architectures it was compiled for."""

import pytest
import torch

from msa_kernels import is_supported
from msa_kernels.support import _runs_on

DEFAULT = "80,90a,100a,120a"


@pytest.mark.parametrize(
    "arch,capability,cuda_archs,runs",
    [
        ("sm80", (7, 5), DEFAULT, False),
        ("sm80", (8, 0), DEFAULT, True),
        ("sm80", (8, 9), DEFAULT, True),
        ("sm80", (9, 0), DEFAULT, True),
        ("sm80", (12, 1), DEFAULT, True),
        ("sm80", (8, 0), "90a,120a", False),
        ("sm80", (10, 0), "90a", True),
        ("sm90", (9, 0), DEFAULT, True),
        ("sm90", (8, 9), DEFAULT, False),
        ("sm90", (10, 0), DEFAULT, False),
    ],
)
def test_ranges(arch, capability, cuda_archs, runs):
    assert _runs_on(arch, capability, cuda_archs) is runs


def test_only_hopper_kernels_are_kept_out_by_force():
    assert not _runs_on("sm90", (9, 0), DEFAULT, portable_forced=True)
    assert _runs_on("sm80", (9, 0), DEFAULT, portable_forced=True)


def test_unknown_device():
    with pytest.raises(ValueError, match=r"msa\.is_supported: device must .*, got 'banana'"):
        is_supported("merge_lse", "banana", torch.float32)
