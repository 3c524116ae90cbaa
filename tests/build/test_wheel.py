"""A wheel from this checkout: what it holds, and that it works away from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("ninja", reason="the build requirements are not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    run = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_tag_knows_no_python_version(wheel):
    assert "-py3-none-linux_" in wheel.name


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"msa_kernels", "bench"}
    assert "msa_kernels/lib/libmsa_ops.so" in names
    assert "msa_kernels/py.typed" in names
    strangers = [
        n for n in names if n.endswith((".h", ".cpp", ".cu", ".cuh", ".inc")) or "test" in n
    ]
    assert strangers == []


def test_installed_wheel_runs_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*command, str(wheel)], check=True)
    code = (
        "import msa_kernels, torch; assert msa_kernels.__file__.startswith({site!r});"
        "out, lse = msa_kernels.merge_lse(torch.ones(2, 3, 4, 128), torch.zeros(2, 3, 4));"
        "assert (out == 1).all(); print('ran')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", code.replace("{site!r}", repr(str(site)))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "ran", run.stderr
