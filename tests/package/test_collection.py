"""pytest finds every test: folders of some names it passes over in silence."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_folder_is_passed_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.parts}
    assert {"build", "package"} <= parts
    assert [part for part in parts if any(fnmatch(part, pattern) for pattern in patterns)] == []
