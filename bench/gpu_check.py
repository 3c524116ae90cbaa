"""`python -m bench.gpu_check --out DIR`: on a GPU machine, the GPU tests and a short benchmark.

Works with libraries built elsewhere, from a checkout that is not installed (PYTHONPATH=.). Leaves
info.txt, tests.log, bench.log and bench.jsonl in DIR, and the log of each sanitizer that was asked
for.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Compare against packages of one version, on the CPU: nothing that a GPU would change.
NOT_HERE = ("tests/oracle",)
NO_TESTS = 5
"""pytest's exit code when it found none"""


def main() -> int:
    """Runs the three steps, each whatever became of the others; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--budget-s", type=float, default=120, help="of the benchmark, seconds")
    parser.add_argument("--peers", default="torch", help="beside ours, see `python -m bench list`")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what pytest collects")
    parser.add_argument("--device", default="cuda", help="cpu to try this out without a GPU")
    parser.add_argument(
        "--workers",
        type=int,
        default=8,
        help="processes of pytest, where pytest-xdist is installed",
    )
    parser.add_argument(
        "--sanitize",
        default="",
        metavar="TOOLS",
        help="tools of compute-sanitizer, such as memcheck,racecheck, over tests/every_kernel.py",
    )
    arguments = parser.parse_args()
    out = arguments.out.resolve()  # the steps run in the checkout
    out.mkdir(parents=True, exist_ok=True)

    python = [sys.executable, "-m"]
    ignored = [f"--ignore={path}" for path in NOT_HERE]
    # Neither cache of pytest's is of use where nothing is kept.
    pytest = ["pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *ignored, *arguments.tests]
    if arguments.workers > 1 and importlib.util.find_spec("xdist"):  # most of a test is the CPU's
        pytest += ["-n", str(arguments.workers)]
    bench = ["bench", "run", "all", "--quick", "--device", arguments.device]
    bench += ["--budget-s", str(arguments.budget_s), "--json", str(out / "bench.jsonl")]
    if arguments.peers:
        bench += ["--peers", arguments.peers]
    codes = {
        "info": _run([*python, "msa_kernels.info"], out / "info.txt"),
        "tests": _run([*python, *pytest], out / "tests.log"),
        "bench": _run([*python, *bench], out / "bench.log"),
    }
    for tool in filter(None, arguments.sanitize.split(",")):
        checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        checked += [*python, "tests.every_kernel", "--device", arguments.device]
        codes[tool] = _run(checked, out / f"{tool}.log")
    if codes["tests"] == NO_TESTS:
        print("no test is marked gpu")
    for step, code in codes.items():
        print(f"{step}: ok" if code == 0 else f"{step}: exit code {code}")
    return int(any(codes.values()))


def _run(command: list[str], log: Path) -> int:
    """Runs a command in the checkout, its output to the terminal and to a file."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    print(f"$ {' '.join(command)}", flush=True)
    began = time.monotonic()
    if not shutil.which(command[0]):
        print(f"  there is no {command[0]} here", flush=True)
        return 127  # as a shell says it
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
        code = process.wait()
    print(f"  {time.monotonic() - began:.0f} s, exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
