"""The gateway's benchmark runs, loses nothing, and says so in tables."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("av")

from bench.gateway import load, material, wire
from bench.gateway.__main__ import main
from bench.gateway.processes import use_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    """The benchmark starts its processes as modules of this tree."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("only", "code"), [("5 dies", "worker_lost"), ("5 stalls", "worker_timeout")]
)
def test_load_tells_every_error_and_loses_no_request(tmp_path, only, code):
    outcomes = list(load.run(tmp_path, 8, 1.5, only))
    assert outcomes
    for one in outcomes:
        assert one.lost == 0 and one.latencies and one.own_cpu_s > 0
        assert set(one.errors) == {code}
        assert one.media == 0 or one.children_cpu_s > 0
    table = rows_of(load.table(outcomes))
    assert len(table) == len(outcomes) + 1 and {len(row) for row in table} == {len(table[0])}


def test_a_request_without_answer_or_error_is_lost_and_fails_the_benchmark(monkeypatch, capsys):
    async def broken(*arguments):
        raise ValueError("no end of the stream")

    monkeypatch.setattr(load, "_ask", broken)
    assert (
        main(["load", "--clients", "1", "--seconds", "0.1", "--only", "text, 1 worker in 5 dies"])
        == 1
    )
    assert any(
        row[0].startswith("text") and row[7] != "0" for row in rows_of(capsys.readouterr().out)
    )


def test_quantiles_and_counts():
    one = load.Outcome("x", 2.0, [0.1 * i for i in range(1, 101)], Counter(a=2), 1)
    assert one.ended == 103
    assert one.quantile(0.5) == pytest.approx(5.1) and one.quantile(0.99) == pytest.approx(10.0)


def test_use_counts_children_and_those_that_ended():
    script = (
        "import subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-c', 'sum(range(20_000_000))'])\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input(); input()'], stdin=-1)\n"
        "child.stdin.write(b'x\\n' + b' ' * 200_000); child.stdin.flush()\n"  # it reads: it runs
        "print('x', flush=True); sys.stdin.readline(); child.kill()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        use = use_of(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert use.children_cpu_s > 0.1 and use.children_bytes > 1 << 20 and use.own_bytes > 1 << 20


def test_a_photos_way_to_the_worker_is_measured(media_checkpoint):
    results = list(wire.run(material.photo(240, 320), media_checkpoint, 0.2, 2))
    assert [one.transport for one in results] == [*wire.TRANSPORTS] * 2
    for one in results:
        assert one.num_bytes == 252 * 308 * 3
        assert min(one.decoded_ms, one.sent_ms) > 0 and one.worker_ms >= 0
    table = rows_of(wire.table(results))
    assert [row[:2] for row in table[1:]] == [[name, "232,848"] for name in wire.TRANSPORTS]


@pytest.mark.parametrize("arguments", [["everything"], ["wire"]])
def test_arguments_are_checked(arguments):
    with pytest.raises(SystemExit):
        main(arguments)
