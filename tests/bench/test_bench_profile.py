"""Calls for a profiler, on the CPU, and the table of what ncu wrote."""

import contextlib
import dataclasses

import pytest
import torch

from bench import profiling
from bench.__main__ import main
from bench.inputs import Inputs, Shape
from bench.operators import OPERATORS

SMALL = Shape((6, 1), (2300, 400), num_q_heads=4, num_kv_heads=2)


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_calls_for_a_profiler(op, capsys):
    assert main(["profile", op, "8", "8", "65536", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{op} B 3 T 3 ctx 2500 ") and "useful FLOP" in shown
    assert ("uniform" in shown) == OPERATORS[op].patterned


@pytest.mark.parametrize("calls", [1, 3])
def test_only_the_calls_asked_for_are_in_regions(calls):
    seen = []

    @contextlib.contextmanager
    def region():
        seen.append("start")
        yield
        seen.append("stop")

    def ours(inputs):
        call = OPERATORS["sparse_decode"].ours(inputs)
        return dataclasses.replace(call, run=lambda: (seen.append("call"), call.run())[1])

    operator = dataclasses.replace(OPERATORS["sparse_decode"], ours=ours)
    check = profiling.call(operator, Inputs(SMALL), calls=calls, region=region)
    assert check.ok and seen == ["call"] + ["start", "call", "stop"] * calls


def test_a_wrong_result_is_not_profiled(capsys, monkeypatch):
    operator = OPERATORS["topk_blocks"]
    wrong = dataclasses.replace(operator, check=lambda *_: profiling.Check(False, 1.0, "ids"))
    monkeypatch.setitem(OPERATORS, "topk_blocks", wrong)
    assert main(["profile", "topk_blocks", "1", "1", "300", "--device", "cpu"]) == 2
    assert "WRONG: ids" in capsys.readouterr().err


@pytest.mark.parametrize("numbers", [(0, 0, 1), (2, 1, 300), (1, 301, 300)])
def test_impossible_shapes_are_refused(numbers, capsys):
    assert main(["profile", "sparse_decode", *map(str, numbers), "--device", "cpu"]) == 2
    got = "got B {}, T {}, ctx {}".format(*numbers)
    assert got in capsys.readouterr().err


METRICS = (profiling._TIME, *profiling._SHARES.values())
HEAD = '"ID","Kernel Name","Grid Size",' + ",".join(f'"{metric}"' for metric in METRICS)
SPLIT = "void msa::step3_remap::msa_split_selection_sm90_kernel<(int)16, 1>(msa::Params)"


def write(path, *lines: str):
    path.write_text("\n".join(["==PROF== Connected to process 7", *lines, "==PROF== Done", ""]))
    return path


def test_kernels_of_ncu(tmp_path, capsys):
    path = write(
        tmp_path / "ncu.csv",
        HEAD,
        '"","","","us","%","%","%","%"',
        f'"0","{SPLIT}","(132, 1, 1)","45.24","0","12.31","n/a","3.5"',
        '"1","void at::fill<float>(int)","(1, 1, 1)","1,372.5","57.1","40.4","76.2","59.9"',
    )
    assert main(["ncu", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| kernel | us | tensor pipe | issue slots | L2 | HBM |",
        "| --- | --- | --- | --- | --- | --- |",
        "| msa_split_selection_sm90_kernel | 45.2 | 0 % | 12 % | - | 4 % |",
        "| at::fill | 1372.5 | 57 % | 40 % | 76 % | 60 % |",
    ]


@pytest.mark.parametrize(("unit", "us"), [("nsecond", "2.0"), ("ms", "2000000.0")])
def test_units_of_ncu_and_metrics_that_are_not_there(unit, us, tmp_path):
    head = f'"ID","Kernel Name","{profiling._TIME}"'
    path = write(tmp_path / "ncu.csv", head, f'"","","{unit}"', '"0","msa_x_kernel","2,000"')
    assert profiling.kernels(path).splitlines()[2:] == [f"| msa_x_kernel | {us} | - | - | - | - |"]


@pytest.mark.parametrize("lines", [(), (HEAD,), ('"ID","Kernel Name"', '"",""', '"0","k"')])
def test_a_file_without_launches_is_refused(lines, tmp_path, capsys):
    path = write(tmp_path / "ncu.csv", *lines)
    assert main(["ncu", str(path)]) == 2
    assert "must hold what ncu --page raw --csv prints" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(capsys):
    words = ["profile", "sparse_prefill", "1", "300", "4096", "--pattern", "coherent"]
    assert main([*words, "--calls", "2", "--device", "cuda"]) == 0
    assert "calls for the profiler: 2" in capsys.readouterr().out
