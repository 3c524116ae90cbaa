"""The emulated kernels, built once a session."""

import pytest

from tests.emulation.emulator import Emulator, build


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("emulated_kernels"))


@pytest.fixture(params=[0, 1, 2], ids=["in_order", "seed1", "seed2"])
def emulator(library, request) -> Emulator:
    """In order, and in two random ones."""
    return Emulator(library, seed=request.param)
