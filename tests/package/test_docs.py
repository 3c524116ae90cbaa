"""The documents say only what is true: their Python runs, their links and file names exist."""

import re
from pathlib import Path

import pytest

from msa_kernels import build_info

ROOT = Path(__file__).parents[2]
IGNORED = {"build", "cutlass"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in IGNORED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)

# A block elsewhere may name the reader's own folders.
RUNNABLE = [path for path in DOCUMENTS if path.parent == ROOT or path.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(document, capsys):
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        exec(compile(block, str(document), "exec"), {})
        promised = re.findall(r"^print\(.*?#.*?: (torch\.Size\(.*?\))$", block, re.MULTILINE)
        printed = capsys.readouterr().out
        for result in promised:
            assert result in printed


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_readme_matrix_is_the_build():
    table = re.findall(r"^\| `(\w+)` \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(table) == {kernel["op"] for kernel in build_info()["cpu"]["kernels"]}


def test_kernel_files_are_read_in_one_sitting():
    """CONTRIBUTING.md: at most 600 lines."""
    files = [f for kind in ("cuh", "cu") for f in (ROOT / "csrc").rglob(f"*.{kind}")]
    long = {f.name: n for f in files if (n := len(f.read_text("utf-8").splitlines())) > 600}
    assert files and not long
