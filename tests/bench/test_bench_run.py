"""The command line on the CPU, with the same cases made small."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from bench import cases, check, rows, runner
from bench.__main__ import main
from bench.inputs import DTYPES, LAYOUTS, Inputs, Shape
from bench.operators import OPERATORS
from bench.peers import NAMES

SMALL = Shape((6, 1), (2300, 400), num_q_heads=4, num_kv_heads=2)


def run(*words: str, tmp_path) -> tuple[int, list[rows.Row]]:
    path = tmp_path / "r.jsonl"
    code = main(["run", *words, "--device", "cpu", "--target-ms", "1", "--json", str(path)])
    return code, rows.read(path) if path.exists() else []


def test_list(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in (*OPERATORS, *cases.models(), *cases.shape_sets(), "flashinfer"):
        assert name in shown


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_runs(op, tmp_path):
    code, found = run(op, "--quick", tmp_path=tmp_path)
    assert code == 0
    assert [row.phase for row in found] == list(OPERATORS[op].phases)
    for row in found:
        assert row.op == op and row.ok is True and row.us > 0 and row.p10 <= row.us <= row.p90
        assert row.max_err < 1e-2 and row.peak_share > 0 and row.flush == "none"


@pytest.mark.parametrize("preset", ["operators", "decode-sweep", "fp8-caches"])
def test_presets_run_from_start_to_end(preset, tmp_path):
    code, found = run("all", "--preset", preset, "--peers", "table", tmp_path=tmp_path)
    asked = cases.expand(["all"], [preset], shrink=True)
    assert code == 0 and {(row.op, row.phase, row.dtype, row.pattern) for row in found} == {
        (case.op, case.phase, case.dtype, case.pattern) for case in asked
    }
    assert all(row.ok and row.us > 0 for row in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, tmp_path):
    ops = ("select_blocks", "sparse_decode", "write_cache", "decode_step")
    code, found = run(*ops, "decode", "--quick", "--dtype", dtype, tmp_path=tmp_path)
    assert code == 0 and all(row.ok and row.dtype == dtype for row in found)


def test_peers_stand_beside_ours(tmp_path):
    words = ("select_blocks", "sparse_prefill", "sparse_decode", "merge_lse", "--quick")
    code, found = run(*words, "--peers", "torch,dense,flashinfer", tmp_path=tmp_path)
    assert code == 0
    by_peer = {(row.op, row.phase, row.peer): row for row in found}
    for op, phase in (("sparse_prefill", "prefill"), ("sparse_decode", "decode")):
        for peer in ("torch", "dense"):
            row = by_peer[op, phase, peer]
            assert row.peer_ok and row.peer_us > 0, row.peer_reason
            assert row.ratio == pytest.approx(row.peer_us / row.us, rel=1e-3)
    assert by_peer["select_blocks", "prefill", "torch"].peer_ok
    assert by_peer["merge_lse", "decode", "torch"].peer_ok
    assert by_peer["merge_lse", "decode", "dense"].peer_us is None
    assert "not installed" in by_peer["merge_lse", "decode", "flashinfer"].peer_reason


def test_a_production_mix_has_weights(tmp_path, capsys):
    code, found = run("select_blocks", "--preset", "prefill-production", tmp_path=tmp_path)
    assert code == 0
    strata = cases.shape_sets()["prefill-production"]["strata"]
    assert sum(row.weight for row in found) == sum(weight for *_, weight, _ in strata) == 14805
    assert "weighted mean prefill-production select_blocks" in capsys.readouterr().out


def break_it(monkeypatch, op: str, spoil) -> None:
    operator = OPERATORS[op]

    def ours(inputs):
        call = operator.ours(inputs)
        return dataclasses.replace(call, run=lambda: spoil(call.run()))

    monkeypatch.setitem(OPERATORS, op, dataclasses.replace(operator, ours=ours))


def to_nan(out):
    out[-1] = float("nan")
    return out


def swap_block(ids):
    row = ids[0, 0].tolist()
    ids[0, 0, 0] = next(b for b in range(100) if b not in row)
    return ids


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("sparse_prefill", lambda out: out * 1.05),
        ("sparse_decode", to_nan),
        ("select_blocks", swap_block),
        ("merge_lse", lambda pair: (pair[0], pair[1] + 0.01)),
        ("write_cache", lambda nothing: nothing),  # spoilt below: it does not write
        ("kv_block_schedule", lambda it: (it[0], it[1].flip(0), *it[2:])),
    ],
)
def test_a_wrong_operator_is_reported_and_not_timed(op, spoil, monkeypatch, tmp_path, capsys):
    break_it(monkeypatch, op, spoil)
    if op == "write_cache":
        idle = dataclasses.replace(OPERATORS[op].ours(Inputs(SMALL)), run=lambda: None)
        broken = dataclasses.replace(OPERATORS[op], ours=lambda inputs: idle)
        monkeypatch.setitem(OPERATORS, op, broken)
    code, found = run(op, "--quick", "--peers", "torch", tmp_path=tmp_path)
    assert code == 1
    for row in found:
        assert row.ok is False and row.us is None and row.reason.startswith("WRONG")
    assert f"WRONG: {op}" in capsys.readouterr().out
    code, found = run(op, "--quick", "--no-refcheck", tmp_path=tmp_path)
    assert code == 0 and found[-1].ok is None and found[-1].us > 0


def test_a_failing_operator_is_a_row(monkeypatch, tmp_path):
    def fail(result):
        raise RuntimeError("no such luck\nsecond line")

    break_it(monkeypatch, "merge_lse", fail)
    code, found = run("merge_lse", "decode", "--quick", tmp_path=tmp_path)
    assert code == 0
    row = next(row for row in found if row.op == "merge_lse")
    assert (row.us, row.reason) == (None, "RuntimeError: no such luck")


def test_a_case_that_cannot_be_timed_does_not_end_the_run(monkeypatch, tmp_path, capsys):
    measure = runner.Clock.measure

    def fail_once(self, calls, seed=0):
        if "ours" in calls:
            monkeypatch.setattr(runner.Clock, "measure", measure)
            raise torch.OutOfMemoryError("no room")
        return measure(self, calls, seed)

    monkeypatch.setattr(runner.Clock, "measure", fail_once)
    words = ("topk_blocks", "--quick", "--peers", "torch")
    code, (failed, timed) = run(*words, tmp_path=tmp_path)
    assert code == 0 and timed.us > 0 and timed.peer_us > 0
    assert (failed.phase, failed.us, failed.reason) == ("prefill", None, "out of memory")
    assert "none ours - (out of memory)" in capsys.readouterr().out


def test_a_lost_context_ends_the_run_and_keeps_its_rows(monkeypatch, tmp_path, capsys):
    whole = runner.Run.run

    def lose(self, case):
        if case.phase == "decode":
            raise runner.ContextLost("the CUDA context is lost: told so")
        return whole(self, case)

    monkeypatch.setattr(runner.Run, "run", lose)
    code, (kept,) = run("topk_blocks", "--quick", tmp_path=tmp_path)
    assert code == 2 and kept.us > 0 and "told so" in capsys.readouterr().err


def test_an_operator_that_is_not_built_leaves_the_peers(monkeypatch, tmp_path):
    operator = OPERATORS["select_blocks"]
    monkeypatch.setattr(
        runner.OPERATORS["select_blocks"].__class__,
        "supported",
        lambda self, inputs: (False, "not in this build"),
    )
    assert not operator.supported(Inputs(SMALL))[0]
    code, found = run("select_blocks", "--quick", "--peers", "torch", tmp_path=tmp_path)
    assert code == 0
    for row in found:
        assert (row.us, row.ok, row.reason) == (None, None, "not in this build")
        assert row.peer_us > 0 and row.peer_ok and row.ratio is None and row.rounds > 0


def test_time_is_out(tmp_path, capsys):
    code, found = run("topk_blocks", "--quick", "--budget-s", "0", tmp_path=tmp_path)
    assert code == 0 and not found
    shown = capsys.readouterr().out
    assert "not run, time was out: prefill topk_blocks" in shown
    assert "not run, time was out: decode topk_blocks" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("run", "no_such_op"),
        ("run", "all", "--preset", "no-such-preset"),
        ("run", "write_cache", "--preset", "peers-prefill"),
    ],
)
def test_bad_words_name_what_there_is(words, capsys):
    assert main([*words, "--device", "cpu"]) == 2
    assert "msa-bench:" in capsys.readouterr().err


def test_expansion():
    names = cases.operators_of(["prefill"])
    assert "sparse_prefill" in names and "sparse_decode" not in names
    only = cases.expand(["sparse_decode"], ["m3-tp8", "batch-sweep"])
    assert [c.shape.num_requests for c in only] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {(c.shape.num_q_heads, c.shape.num_kv_heads) for c in only} == {(8, 1)}
    assert {c.phase for c in cases.expand(["decode"], ["standard"])} == {"decode"}
    both = cases.expand(["all"], ["peers-verify"], dtypes=["fp8"], patterns=["shared"])
    assert {(c.dtype, c.pattern) for c in both} == {("fp8", "shared"), ("fp8", "-")}
    wide = cases.expand(["select_blocks"], ["standard"], max_model_len=1 << 20)
    assert all(c.shape.max_blocks == 8192 and c.shape.to_json()["table"] == 1 << 20 for c in wide)
    rollout = cases.expand(["sparse_decode"], ["decode-rollout"])
    weighted = [case for case in rollout if case.weight]
    assert len(weighted) == 28 and rollout[0].weight == 1260
    assert len(rollout) == 28 + 12 and {case.shape.q_len for case in rollout} == {8}


def test_the_operators_preset_has_every_operator():
    every = cases.expand(["all"], ["operators"])
    phases = {(case.op, case.phase) for case in every}
    assert {op for op, _ in phases} == set(OPERATORS)
    both = {op for op, operator in OPERATORS.items() if len(operator.phases) == 2}
    assert {(op, phase) for op in both for phase in cases.PHASES} <= phases
    rows_and_blocks = {
        (case.shape.num_kv_heads * case.shape.num_tokens, case.shape.max_blocks)
        for case in every
        if case.op == "topk_blocks"
    }
    assert rows_and_blocks == {(128, 8192), (32768, 512)}
    assert len(every) == 26


def test_the_decode_sweep_covers_each_axis():
    sweep = cases.expand(["all"], ["decode-sweep"])
    assert len(sweep) == len(set(sweep)) == 204 and not any(case.peers for case in sweep)
    for dtype in ("bfloat16", "fp8"):
        for op in ("select_blocks", "sparse_decode"):
            of = [case for case in sweep if (case.op, case.dtype) == (op, dtype)]
            shapes = [case.shape for case in of]
            whole = [s for s in shapes if (s.num_kv_heads, s.q_len) == (4, 1)]
            batches = {s.num_requests for s in whole if s.ctx == 65536}
            contexts = {s.ctx for s in whole if s.num_requests == 8}
            assert batches == {1 << i for i in range(9)}
            assert contexts == {1024 << i for i in range(11)}
            assert {s.q_len for s in shapes} == {1, 4, 8}
        attention = [case for case in sweep if (case.op, case.dtype) == ("sparse_decode", dtype)]
        heads = {(case.shape.num_q_heads, case.shape.num_kv_heads) for case in attention}
        assert heads == {(64, 4), (16, 1), (8, 1)}
        drafts = {(case.pattern, case.shape.q_len) for case in attention} - {("uniform", 1)}
        assert drafts == {(p, q) for p in ("uniform", "coherent", "shared") for q in (4, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_numbers(layout):
    inputs = Inputs(SMALL, "fp8")
    k, v = inputs.kv()
    other_k, other_v = inputs.kv(layout)
    assert torch.equal(k.view(torch.uint8), other_k.view(torch.uint8))
    assert torch.equal(v.view(torch.uint8), other_v.view(torch.uint8))
    assert k.shape == (inputs.num_pages, 2, 128, 128)


def test_inputs_are_what_the_contract_says():
    inputs = Inputs(SMALL)
    assert inputs.cu_seqlens_q.tolist() == [0, 6, 7]
    assert inputs.pos.tolist() == [2294, 2295, 2296, 2297, 2298, 2299, 399]
    assert inputs.visible.tolist() == [18] * 6 + [4]
    live = inputs.block_table[inputs.block_table >= 0]
    assert live.numel() == 18 + 4 == len(set(live.tolist()))
    page = inputs.block_table[1, 3].item()
    assert inputs.slot_mapping[6].item() == page * 128 + 399 % 128


def test_near_ties_pass_and_others_do_not():
    scores = torch.tensor([[[5.0, 4.0, 4.0 - 1e-6, 1.0]]])
    visible = torch.tensor([4])
    slack = torch.full((1, 1), 1e-5)
    tied, wrong = torch.tensor([[[0, 2, 3]]]), torch.tensor([[[1, 2, 3]]])
    assert check.chosen(tied, scores, visible, slack) == check.Check(True, 1.0)
    assert not check.chosen(tied, scores, visible, slack * 0).ok
    assert not check.chosen(wrong, scores, visible, slack).ok
    assert not check.chosen(torch.tensor([[[0, 0, 3]]]), scores, visible, slack).ok
    assert not check.chosen(torch.tensor([[[0, 1, 2]]]), scores, visible, slack).ok


def test_each_table_beside_its_own_peers(monkeypatch, tmp_path):
    monkeypatch.delenv("MSA_BENCH_PEER_DIR", raising=False)
    table = {"phase": "decode", "model": "m3-tp4", "cases": [[1, 1, 300]]}
    tables = [{**table, "ops": ["sparse_decode"], "peers": ["torch", "vllm"]}]
    tables += [{**table, "ops": ["topk_blocks"]}]
    monkeypatch.setattr(cases, "shape_sets", lambda: {"made": {"tables": tables}})
    for words, expected in (
        ("table", {"sparse_decode": ["torch", "vllm"], "topk_blocks": [None]}),
        ("table,dense", {"sparse_decode": ["torch", "vllm", "dense"], "topk_blocks": ["dense"]}),
        ("dense", {"sparse_decode": ["dense"], "topk_blocks": ["dense"]}),
    ):
        path = tmp_path / words
        path.mkdir()
        code, found = run("all", "--preset", "made", "--peers", words, tmp_path=path)
        by_op = {op: [row.peer for row in found if row.op == op] for op in expected}
        assert code == 0 and by_op == expected


def test_presets_name_peers_that_there_are():
    named = [case.peers for name in cases.shape_sets() for case in cases.expand(["all"], [name])]
    assert {peer for peers in named for peer in peers} <= set(NAMES)
    assert all(case.peers for case in cases.expand(["all"], ["peers-prefill", "decode-rollout"]))


def test_runs_without_rich(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    code, _ = run("topk_blocks", "--quick", tmp_path=tmp_path)
    assert code == 0 and "[2/2] decode topk_blocks" in capsys.readouterr().out


def test_gpu_check_leaves_its_files(tmp_path):
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$@"\ntest "$2" = memcheck\n')
    tool.chmod(0o755)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.gpu_check", "--out", str(out), "--device", "cpu"]
    command += ["--budget-s", "0", "--peers", "", "--tests", "tests/step5_merge"]
    root = cases.FOLDER.parent.parent
    for path, racecheck in ((f"{tool.parent}:{os.environ['PATH']}", 1), (str(tmp_path), 127)):
        done = subprocess.run(
            [*command, "--sanitize", "memcheck,racecheck"],
            cwd=root,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "info: ok" in done.stdout and "bench: ok" in done.stdout, done.stdout + done.stderr
        assert f"racecheck: exit code {racecheck}" in done.stdout and done.returncode == 1
        assert ("memcheck: ok" in done.stdout) == (racecheck == 1)
    for name in ("info.txt", "tests.log", "bench.log"):
        assert (out / name).stat().st_size > 0
    assert "tests.every_kernel --device cpu" in (out / "memcheck.log").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(tmp_path):
    path = tmp_path / "r.jsonl"
    words = ["run", "select_blocks", "sparse_prefill", "sparse_decode", "merge_lse", "--quick"]
    words += ["--device", "cuda", "--target-ms", "2", "--peers", "torch,dense", "--json", str(path)]
    assert main(words) == 0
    found = rows.read(path)
    assert {row.flush for row in found} == {"dirty", "clean"}
    timed = [row for row in found if row.peer == "torch"]
    assert timed and all(row.peer_ok and row.peer_us > 0 for row in timed), timed
    assert all(row.graph == (row.phase == "decode") for row in timed)
    dense = [row for row in found if row.peer == "dense" and row.op.startswith("sparse")]
    assert dense and all(row.peer_ok for row in dense), dense
    assert {"read_tbps", "sdpa_bf16_tflops", "empty_graph_us"} <= set(found[0].ceilings)
