"""The emulated kernels, built once a session."""

import re
import shutil
from pathlib import Path

import pytest

from tests.emulation.emulator import CSRC, Emulator, build


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("emulated_kernels"))


@pytest.fixture(scope="session")
def library_of_small_rounds(tmp_path_factory, library):
    """Of sparse_prefill with memory for the partial results of four chunks, and an L2 that holds
    fewer: what only calls of many tokens meet."""
    csrc = tmp_path_factory.mktemp("csrc")
    shutil.copytree(CSRC, csrc, dirs_exist_ok=True)
    name = "step4_attend/sm90/prefill_inst.cu"
    text = (csrc / name).read_text()
    for constant, value in (("kPartialBytesBudget", 1), ("kKeptPartialBytes", 1 << 16)):
        text, count = re.subn(rf"(constexpr int64_t {constant} =)[^;]*;", rf"\1 {value};", text)
        assert count == 1
    (csrc / name).write_text(text)
    others = set(Path(library._name).parent.glob("*.o"))
    others -= set(Path(library._name).parent.glob("sm90_prefill_inst.o"))
    return build(tmp_path_factory.mktemp("small_rounds"), csrc, [CSRC / name], others)


@pytest.fixture(params=[0, 1, 2], ids=["in_order", "seed1", "seed2"])
def emulator(library, request) -> Emulator:
    """In order, and in two random ones."""
    return Emulator(library, seed=request.param)
