"""The libraries need torch's stable C interface alone, and no Python."""

import re
import shutil
import subprocess

import pytest

from msa_kernels._load import CUDA_LIBRARY, OPS_LIBRARY

UNSTABLE = re.compile(r"\b(c10|at|torch)::")
PYTHON = re.compile(r"\bU _?Py[A-Z_]")


def undefined_symbols(library) -> list[str]:
    if not library.is_file():
        pytest.skip(f"{library.name} is not built (MSA_BUILD_CUDA=1 make build)")
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    run = subprocess.run(
        ["nm", "-D", "-C", "--undefined-only", str(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


@pytest.mark.parametrize("library", [OPS_LIBRARY, CUDA_LIBRARY], ids=lambda path: path.name)
def test_no_unstable_torch_symbol(library):
    symbols = undefined_symbols(library)
    assert any("aoti_torch_" in line for line in symbols), "nm shows nothing of torch at all"
    assert [line for line in symbols if UNSTABLE.search(line)] == []


@pytest.mark.parametrize("library", [OPS_LIBRARY, CUDA_LIBRARY], ids=lambda path: path.name)
def test_no_python_symbol(library):
    assert [line for line in undefined_symbols(library) if PYTHON.search(line)] == []


def test_the_audit_can_fail():
    for line in (
        "U c10::Error::what() const",
        "U at::empty(long)",
        "U torch::Library::def(char const*)",
    ):
        assert UNSTABLE.search(line)
    assert not UNSTABLE.search("U torch_call_dispatcher")
    assert PYTHON.search("                 U PyObject_Call")
