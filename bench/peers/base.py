"""What a peer is: somebody else's kernels for the same step, asked for by an operator's name."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ..inputs import Inputs


class CannotRun(Exception):
    """Why a peer is not there, or does not take a shape; the text stands in the row."""


@dataclass
class Call:
    """Something to time."""

    run: Callable[[], Any]
    """the timed call"""
    answer: Callable[[Any], Any] = lambda result: result
    """what `run` returned, as our operator would return it"""
    note: str | None = None
    """what to know about the row"""
    dense: bool = False
    """attends to every token, not to the selection: checked and counted as such"""
    writes_inputs: bool = False
    """the result lies in an input, so that it must not be poisoned"""
    on_host: bool = False
    """its time is the host's: nothing may run on the device meanwhile and hide it"""


class Peer(Protocol):
    """One peer."""

    name: str
    version: str

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """The call that does the step `op` on these inputs. Raises CannotRun with the reason."""
        ...


@contextlib.contextmanager
def stand_ins(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Lets imports within find these modules; what stood there before is put back."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def module(name: str, **members: Any) -> ModuleType:
    """A module of a few objects."""
    made = ModuleType(name)
    made.__path__ = []  # a package, so that submodules can be imported from it
    vars(made).update(members)
    return made


def load_file(name: str, path: Path) -> ModuleType:
    """Imports one file, or the package whose __init__.py it is, under a name of our own."""
    search = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def version_of(package: str, folder: Path) -> str:
    """The version of an unpacked package, from the metadata beside it where it was unpacked too."""
    for found in sorted(folder.glob(f"{package}-*.dist-info")):
        return found.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return "unknown (unpacked without metadata)"


def need_triton() -> ModuleType:
    """The triton module, or CannotRun."""
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise CannotRun(f"needs triton, which does not import: {error}") from error
    return triton
