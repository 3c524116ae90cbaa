"""The documents say only what is true: their Python runs, their commands can be given, what they
name is there."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from bench import report, rows
from bench.__main__ import SEE_ALSO
from msa_kernels import build_info

ROOT = Path(__file__).parents[2]
IGNORED = {ROOT / "build", ROOT / "third_party" / "cutlass"}


def kept(folder: Path) -> list[Path]:
    """The files under a folder, without what is built, hidden or somebody else's."""
    there = [p for p in folder.iterdir() if p not in IGNORED and not p.name.startswith(".")]
    return [file for p in there for file in (kept(p) if p.is_dir() else [p])]


FILES = kept(ROOT)
DOCUMENTS = sorted(path for path in FILES if path.suffix == ".md")

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


class Parsed(BaseException):
    """Instead of what a command would go on to do."""


def commands(document: Path) -> list[tuple[str, list[str]]]:
    """(module, arguments) of each `python -m` in the blocks that are no Python."""
    blocks = re.findall(r"```(?!python)\w*\n(.*?)```", document.read_text(), re.DOTALL)
    text = re.sub(r"\\\n|[\[\]]", "", "\n".join(blocks))  # one line each, brackets of options away
    found = re.findall(r"\bpython3? -m (.*)", text)
    words = [shlex.split(line, comments=True) for line in found]
    return [(module, arguments) for module, *arguments in words]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_can_be_given(document, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self, *words):
        parse(self, *words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    for module, arguments in commands(document):
        assert importlib.util.find_spec(module), module
        if arguments:
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(Parsed):
                runpy.run_module(module, run_name="__main__")
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", "".join(CODE.findall(document.read_text()))):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target


CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
OF_A_CHECKPOINT = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document):
    """By their path in the repository, or the end of it, which the text around completes."""
    there = {"/" + path.relative_to(ROOT).as_posix() for path in FILES}
    name = re.compile(r"`([\w./-]+\.(?:py|cpp|cuh?|h|inc|md|jsonl?|proto|toml))`")
    for named in set(name.findall(document.read_text())) - OF_A_CHECKPOINT:
        assert any(path.endswith("/" + named) for path in there), named


def test_performance_is_what_the_rows_say():
    """docs/performance.md is generated; `python -m bench report` draws its pictures too."""
    found = rows.read(ROOT / "bench" / "results" / "h200.jsonl")
    made = report.markdown(found, (), "Performance", SEE_ALSO)
    written, pictures = (ROOT / "docs" / "performance.md").read_text().split("\n## Pictures\n")
    assert written == made
    drawn = {f"performance/{path.name}" for path in (ROOT / "docs" / "performance").iterdir()}
    assert set(re.findall(r"\]\((.*?)\)", pictures)) == drawn


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text()):
        if "://" not in target:
            file = document.parent / target if target else document
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), anchor


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_readme_matrix_is_the_build():
    table = re.findall(r"^\| `(\w+)` \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(table) == {kernel["op"] for kernel in build_info()["cpu"]["kernels"]}


def test_kernel_files_are_read_in_one_sitting():
    """CONTRIBUTING.md: at most 600 lines."""
    files = [f for kind in ("cuh", "cu") for f in (ROOT / "csrc").rglob(f"*.{kind}")]
    long = {f.name: n for f in files if (n := len(f.read_text("utf-8").splitlines())) > 600}
    assert files and not long
