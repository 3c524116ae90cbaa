"""`python -m bench`: how fast each operator is, and what one would use instead."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import cases, compare, machine, profiling, report, rows
from .inputs import DTYPES, LAYOUTS, Inputs, Shape
from .operators import OPERATORS
from .patterns import PATTERNS
from .peers import ENVIRONMENT, NAMES
from .progress import progress
from .runner import Options, Run
from .timing import FLUSHES

_OF_TABLE = "table"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"msa-bench: {error}", file=sys.stderr)
        return 2


def _list_of(*choices: str):
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        for word in words:
            if choices and word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
        return words

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="msa-bench", description=__doc__)
    commands = parser.add_subparsers(required=True)

    it = commands.add_parser("list", help="operators, presets and peers")
    it.set_defaults(command=_list)

    it = commands.add_parser("run", help="measure")
    it.set_defaults(command=_run)
    it.add_argument("ops", nargs="+", metavar="OP", help="operators, or prefill, decode, all")
    it.add_argument("--preset", type=_list_of(), default=[], help="models and shape sets, see list")
    it.add_argument("--dtype", type=_list_of(*DTYPES), help="instead of the preset's")
    it.add_argument("--pattern", type=_list_of(*PATTERNS), help="instead of the preset's")
    it.add_argument(
        "--peers",
        type=_list_of(*NAMES, _OF_TABLE),
        default=[],
        help=f"{', '.join(NAMES)}; {_OF_TABLE}: those that each table of a preset names",
    )
    it.add_argument("--peer-dir", type=Path, help=f"folder of unpacked files; also {ENVIRONMENT}")
    it.add_argument("--json", type=Path, metavar="FILE", help="append rows to FILE, as they come")
    it.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    it.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    it.add_argument("--flush", type=_list_of(*FLUSHES), help="on a GPU dirty,clean if not given")
    it.add_argument(
        "--layout", choices=LAYOUTS, default="interleaved", help="of our K and V caches"
    )
    it.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="block tables with columns for so many tokens, as an engine has them",
    )
    it.add_argument("--no-refcheck", action="store_true", help="time without looking at results")
    it.add_argument("--budget-s", type=float, metavar="SECONDS", help="stop starting cases after")
    it.add_argument("--target-ms", type=float, help="time to measure each contender for")
    it.add_argument("--debug", action="store_true", help="print where a contender failed")

    it = commands.add_parser("profile", help="call one operator on one shape, for a profiler")
    it.set_defaults(command=_profile)
    it.add_argument("op", metavar="OP", choices=OPERATORS)
    it.add_argument("requests", type=int, metavar="B", help="requests")
    it.add_argument("tokens", type=int, metavar="T", help="query tokens of all requests together")
    it.add_argument("ctx", type=int, metavar="CTX", help="tokens in the cache, of each request")
    it.add_argument("--model", choices=cases.models(), default="m3-tp1", help="heads of a rank")
    it.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    it.add_argument("--pattern", choices=PATTERNS, default="uniform")
    it.add_argument("--flush", choices=FLUSHES, default="clean", help="the L2 before each call")
    it.add_argument("--calls", type=int, default=1, help="calls that the profiler sees")
    it.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    it.add_argument("--layout", choices=LAYOUTS, default="interleaved")
    it.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS")

    it = commands.add_parser("ncu", help="a table of what ncu --page raw --csv wrote to a file")
    it.set_defaults(command=_ncu)
    it.add_argument("file", type=Path)

    it = commands.add_parser("compare", help="a verdict for each row of two files")
    it.set_defaults(command=_compare)
    it.add_argument("old", type=Path)
    it.add_argument("new", type=Path)
    it.add_argument("--fail-on-regression", action="store_true", help="exit code 1")

    it = commands.add_parser("report", help="Markdown tables and pictures of a file")
    it.set_defaults(command=_report)
    it.add_argument("file", type=Path, nargs="+")
    it.add_argument("--out", type=Path, help="folder to write report.md and pictures to")
    it.add_argument("--docs", type=Path, metavar="PATH", help="Markdown file, pictures beside it")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    print("operators")
    for name, operator in OPERATORS.items():
        print(f"  {name:<26}{'+'.join(operator.phases):<16}{operator.about}")
    print("\nmodels")
    for name, heads in cases.models().items():
        print(f"  {name:<26}{', '.join(f'{k} {v}' for k, v in heads.items())}")
    print("\nshape sets")
    for name, entry in cases.shape_sets().items():
        print(f"  {name:<26}{entry['about']}")
    print(f"\npeers\n  {', '.join(NAMES)}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    device = _device(arguments)
    cpu = device.type == "cpu"
    presets = arguments.preset
    if arguments.quick and not set(presets) & set(cases.shape_sets()):
        presets = [*presets, "quick"]
    # A CPU does not do real shapes in reasonable time: it runs the same cases made small.
    todo = cases.expand(
        arguments.ops,
        presets,
        dtypes=arguments.dtype,
        patterns=arguments.pattern,
        max_model_len=arguments.max_model_len,
        shrink=cpu,
    )
    named = [name for name in arguments.peers if name != _OF_TABLE]
    for i, case in enumerate(todo):
        own = case.peers if _OF_TABLE in arguments.peers else ()
        todo[i] = dataclasses.replace(case, peers=tuple(dict.fromkeys((*own, *named))))
    if not todo:
        raise ValueError("nothing to measure: no operator asked for is in the presets asked for")
    flushes = ["none"] if cpu else arguments.flush or ["dirty", "clean"]
    target_ms = arguments.target_ms or (5.0 if cpu else 40.0 if arguments.quick else 120.0)
    options = Options(
        device=device,
        flushes=flushes,
        peers=list(dict.fromkeys(name for case in todo for name in case.peers)),
        peer_dir=arguments.peer_dir,
        refcheck=not arguments.no_refcheck,
        layout=arguments.layout,
        target_ms=target_ms,
        budget_s=arguments.budget_s,
        debug=arguments.debug,
    )
    measured: list[rows.Row] = []
    with progress(len(todo)) as show:
        run = Run(options, show.say)
        run.start({case.dtype for case in todo})
        _print_head(run, show.say)
        for case, made in run.rows(todo):
            if arguments.json:
                rows.append(arguments.json, made)
            measured += made
            show.advance(f"{_describe(case, made)}\n    took {run.last_s:.1f} s")
    for mean in rows.weighted_means(measured, cases.mix_weights()):
        print(_describe_mean(mean))
    for case in run.skipped:
        print(f"not run, time was out: {case}")
    wrong = [row for row in measured if row.ok is False]
    for row in wrong:
        print(f"WRONG: {row.op} {row.shape} {row.dtype} {row.pattern}: {row.reason}")
    return 1 if wrong else 0


def _print_head(run: Run, say) -> None:
    facts = " ".join(f"{k} {v}" for k, v in run.machine.items() if v is not None)
    say(f"{facts}; commit {run.commit}; {machine.now()}")
    say("ceilings: " + ", ".join(f"{k} {v:.4g}" for k, v in run.ceilings.items()))
    for name, peer in run.peers.items():
        say(f"peer {name} {peer.version}")
    for name, reason in run.missing.items():
        say(f"peer {name} is not there: {reason}")


def _describe(case: cases.Case, made: Sequence[rows.Row]) -> str:
    parts = []
    for flush in dict.fromkeys(row.flush for row in made):
        group = [row for row in made if row.flush == flush]
        words = [flush, f"ours {_time(group[0].us, group[0].ok, group[0].reason)}"]
        if group[0].us is not None:
            words.append(f"({group[0].peak_share:.0%} of {group[0].bound_by})")
        for row in group:
            if row.peer:
                ratio = f" {row.ratio:.2f}x" if row.ratio else ""
                words.append(
                    f"{row.peer} {_time(row.peer_us, row.peer_ok, row.peer_reason)}{ratio}"
                )
        parts.append(" ".join(words))
    return f"{case}\n    " + "\n    ".join(parts)


def _time(us: float | None, ok: bool | None, reason: str | None) -> str:
    if us is not None:
        return f"{us:.1f} us"
    if ok is False:
        return reason or "WRONG"
    return f"- ({reason})"


def _describe_mean(mean: rows.WeightedMean) -> str:
    ours = "-" if mean.us is None else f"{mean.us:.1f} us"
    what = f"{mean.preset} {mean.op} {mean.dtype} {mean.pattern} {mean.flush}"
    line = f"weighted mean {what}: ours {ours}"
    if mean.peer_us is not None:
        ratio = f", {mean.ratio:.2f}x" if mean.ratio else ""
        line += f", {mean.peer} {mean.peer_us:.1f} us{ratio}"
    return f"{line} ({mean.cases} shapes, {mean.covered:.0%} of the weight)"


def _profile(arguments: argparse.Namespace) -> int:
    device = _device(arguments)
    numbers = (arguments.requests, arguments.tokens, arguments.ctx)
    shape = Shape.of(*numbers, **cases.models()[arguments.model])
    shape = dataclasses.replace(shape, max_model_len=arguments.max_model_len)
    if device.type == "cpu":
        shape = shape.shrunk()
    operator = OPERATORS[arguments.op]
    pattern, layout = arguments.pattern, arguments.layout
    inputs = Inputs(shape, arguments.dtype, pattern, device, layout=layout)
    check = profiling.call(operator, inputs, flush=arguments.flush, calls=arguments.calls)
    cost = operator.cost(inputs)
    letters = " ".join(f"{k} {v}" for k, v in shape.to_json().items())
    print(f"{arguments.op} {letters} {arguments.dtype}{f' {pattern}' * operator.patterned}")
    print(f"{cost.flops:.4g} useful FLOP, {cost.bytes:.4g} bytes at least")
    print(f"right, error {check.error:.1e}; calls for the profiler: {arguments.calls}")
    return 0


def _ncu(arguments: argparse.Namespace) -> int:
    print(profiling.kernels(arguments.file))
    return 0


def _device(arguments: argparse.Namespace) -> torch.device:
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; --device cpu runs small shapes anywhere")
    if device.type == "cpu":
        torch.set_num_threads(1)  # small shapes: more threads cost more than they bring
    return device


def _compare(arguments: argparse.Namespace) -> int:
    old, new = rows.read(arguments.old), rows.read(arguments.new)
    gpus = [sorted({row.gpu for row in part}) for part in (old, new)]
    if gpus[0] != gpus[1]:
        print(f"measured on different machines: {gpus[0]} and {gpus[1]}")
    verdicts = compare.compare(old, new)
    print(compare.render(verdicts))
    return int(arguments.fail_on_regression and any(v.regression for v in verdicts))


SEE_ALSO = (
    "How to measure, and how to profile: [bench](../bench/README.md). What the rows mean for each "
    "kernel: the logs in [the index](index.md). The gateway's load, and what it gives back to "
    "generation, are tables of their own (`python -m bench.gateway`): "
    "[gateway](gateway.md#measured)."
)
"""beside the project's own page of results"""


def _report(arguments: argparse.Namespace) -> int:
    found = [row for path in arguments.file for row in rows.read(path)]
    if not found:
        raise ValueError("no rows in the file")
    if not (arguments.out or arguments.docs):
        print(report.markdown(found))
        return 0
    written = []
    if arguments.out:
        written += report.write(found, arguments.out)
    if arguments.docs:
        written += report.write(
            found, arguments.docs.parent, arguments.docs.name, "Performance", SEE_ALSO
        )
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
