"""`python -m msa_kernels.info`."""

import json
import subprocess
import sys

from msa_kernels import build_info


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "msa_kernels.info", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_text_names_build_and_every_operator():
    text = run()
    build = build_info()["cpu"]
    for word in (build["version"], build["git_commit"], "torch >= 2.11", "cuda library"):
        assert word in text
    for kernel in build["kernels"]:
        assert kernel["op"] in text


def test_json_says_why_something_is_missing():
    data = json.loads(run("--json"))
    assert data["build"]["cpu"]["torch_target"] == "2.11"
    if data["build"]["cuda"] is None:
        assert data["cuda_unavailable_reason"]
    for row in data["runs"]:
        assert row["cpu"] == "cpu" or "no cpu kernel" in row["cpu"]
        assert row["cuda"]


def test_build_info_lists_configurations_once():
    kernels = [tuple(kernel.values()) for kernel in build_info()["cpu"]["kernels"]]
    assert len(kernels) == len(set(kernels))
