"""`python -m bench.gateway`: the gateway alone under load, what it takes off the worker, and what a
photo's way to the worker costs."""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# One thread a matrix product: the loop stands for a process that has one core to itself.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from . import giveback, load, material, wire


def machine() -> str:
    """Commit, machine kind and versions, for the head of a table."""
    import av
    import numpy
    import PIL

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return (
        f"commit {commit or 'unknown'}, {os.cpu_count()}-core {platform.machine()} CPU, "
        f"Python {platform.python_version()}, Pillow {PIL.__version__}, PyAV {av.__version__}, "
        f"numpy {numpy.__version__}, load average before {os.getloadavg()[0]:.1f}"
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="load, giveback, wire; default: the first two")
    add("--clients", type=int, default=64, help="at a time; default: %(default)s")
    add("--seconds", type=float, default=15.0, help="a scenario or measurement")
    add("--only", help="scenarios of the load with this in their name")
    add(
        "--rate",
        type=float,
        action="append",
        help="images a second beside the worker's loop; repeatable; default: 8",
    )
    add("--decoders", type=int, default=1, help="threads or processes beside the loop")
    add("--rounds", type=int, default=3, help="of each arrangement beside the loop, or transport")
    add("--model", type=Path, help="checkpoint: the loop is the engine; default: a fixed loop")
    add("--device", default="cpu", help="the engine's, cuda in bfloat16; default: %(default)s")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.parts) - {"load", "giveback", "wire"}:
        parser.error(f"PART must be load, giveback or wire, got {', '.join(sorted(unknown))}")
    if "wire" in parsed.parts and not parsed.model:
        parser.error("wire needs a worker, and that --model; got none")
    if parsed.device != "cpu" and not parsed.model:
        parser.error(f"--device is the engine's, which needs --model; got {parsed.device} alone")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tables; 1 if a request was lost."""
    options = parse_arguments(arguments)
    parts = options.parts or ["load", "giveback"]
    print(machine(), flush=True)
    lost = 0
    if "load" in parts:
        with tempfile.TemporaryDirectory() as work:
            outcomes = []
            for outcome in load.run(Path(work), options.clients, options.seconds, options.only):
                outcomes.append(outcome)
                print(f"{outcome.name}: {outcome.ended} requests", file=sys.stderr, flush=True)
        print(f"\n{options.clients} clients, {options.seconds:g} s a scenario\n")
        print(load.table(outcomes), flush=True)
        lost = sum(outcome.lost for outcome in outcomes)
    if "giveback" in parts:
        with tempfile.TemporaryDirectory() as work:
            photo = Path(work) / "photo.jpg"
            photo.write_bytes(material.photo(1080, 1920))
            loop, results = giveback.run(
                photo,
                options.model,
                options.device,
                options.rate or [8.0],
                options.decoders,
                options.seconds,
                options.rounds,
            )
        print(
            f"\n{loop}; {options.decoders} decoders, medians of {options.rounds} rounds of "
            f"{options.seconds:g} s\n"
        )
        print(giveback.table(results), flush=True)
    if "wire" in parts:
        photo = material.photo(1080, 1920)
        results = list(wire.run(photo, options.model, options.seconds, options.rounds))
        print(f"\nleast of {options.rounds} rounds of {options.seconds:g} s\n")
        print(wire.table(results), flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
