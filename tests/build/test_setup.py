"""The build's own decisions: where CUTLASS and nvcc come from, and what it says without them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("msa_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill_cutlass(folder: Path) -> Path:
    header = folder / "include" / "cutlass" / "cutlass.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    return folder


def test_cutlass_dir_overrides(build, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_DIR", str(fill_cutlass(tmp_path / "mine")))
    assert build.find_cutlass() == tmp_path / "mine" / "include"


def test_submodule_comes_before_the_package(build, monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_DIR", raising=False)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    fill_cutlass(tmp_path / "third_party" / "cutlass")
    assert build.find_cutlass() == tmp_path / "third_party" / "cutlass" / "include"


def test_package_serves_an_empty_submodule(build, monkeypatch, tmp_path):
    pytest.importorskip("cutlass_library")
    monkeypatch.delenv("CUTLASS_DIR", raising=False)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert (build.find_cutlass() / "cute" / "tensor.hpp").is_file()


def test_no_cutlass_names_both_ways(build, monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_DIR", raising=False)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        build.find_cutlass()
    assert "git submodule update" in str(error.value)
    assert "pip install nvidia-cutlass==4.2.0.0" in str(error.value)


def test_a_wrong_cutlass_dir_is_not_passed_over(build, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="CUTLASS_DIR"):
        build.find_cutlass()


def test_cuda_without_nvcc(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MSA_BUILD_CUDA", "1")
    with pytest.raises(SystemExit, match="nvcc"):
        build.find_cuda(torch_has_cuda=False)
    monkeypatch.setenv("MSA_BUILD_CUDA", "")
    assert (
        build.find_cuda(torch_has_cuda=True) is None
    )  # still a build, and it says what is missing
    assert "without the CUDA kernels" in capsys.readouterr().err
    monkeypatch.setenv("MSA_BUILD_CUDA", "0")
    assert build.find_cuda(torch_has_cuda=True) is None
    monkeypatch.setenv("MSA_BUILD_CUDA", "yes")
    with pytest.raises(SystemExit, match="MSA_BUILD_CUDA"):
        build.find_cuda(torch_has_cuda=True)


def test_cutlass_pin_is_the_same_everywhere():
    pinned = "nvidia-cutlass==4.2.0.0"
    for name in ("pyproject.toml", "setup.py", "third_party/README.md"):
        assert pinned in (ROOT / name).read_text(), name
    assert "v4.2.0" in (ROOT / "third_party" / "README.md").read_text()
    commit = "59b61c606fe7aa4d33e60d3e6352cbfde98361c3"
    assert commit in (ROOT / "third_party" / "README.md").read_text()
    tree = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--stage", "third_party/cutlass"],
        capture_output=True,
        text=True,
    )
    if tree.returncode == 0 and tree.stdout:
        assert tree.stdout.split()[:2] == ["160000", commit]


def test_help_does_not_need_torch():
    run = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip().splitlines()[-1] == "0.1.0"
