"""What the emulated machine notices of kernels that break its rules."""

import pytest

from tests.emulation.emulator import Emulator


def test_a_sound_kernel(emulator):
    assert emulator.break_rule("none") == 0


@pytest.mark.parametrize(
    "rule,message",
    [
        ("an arrival is missing", "hangs: 64 lanes wait for a transaction barrier"),
        ("an arrival too many", "arrives at a transaction barrier too often"),
        ("no init", "a transaction barrier was not initialised"),
        ("other collectives", "lanes of a warp are in different collectives"),
        ("other thread counts", "a named barrier is met with different thread counts"),
        ("no copy", "a transaction barrier is left with announced bytes"),
        ("no wait for a product", "ends with products or copies that it did not wait for"),
    ],
)
def test_broken_kernels(emulator, rule, message):
    with pytest.raises(RuntimeError, match=f"break_rule_kernel {message}"):
        emulator.break_rule(rule)


def test_copies_are_late_in_some_order(library):
    read = {Emulator(library, seed).break_rule("no wait for a copy") for seed in range(16)}
    assert read == {0, 4}
