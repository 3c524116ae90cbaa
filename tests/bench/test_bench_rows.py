"""Rows to JSON and back, means of mixes, verdicts, reports: from made-up rows."""

import dataclasses
import json

import pytest

from bench import cases, compare, report, rows
from bench.__main__ import main
from bench.rows import Row

SHAPE = {"B": 1, "T": 8192, "ctx": 65536, "Hq": 64, "Hkv": 4, "K": 16, "q": 8192}
CEILINGS = {"copy_tbps": 4.0, "read_tbps": 4.0, "gemm_bf16_tflops": 700.0}


def make(
    us: float | None = 100.0, peer_us: float | None = None, spread: float = 0.01, **changes
) -> Row:
    row = Row("sparse_prefill", "prefill", "test", SHAPE, "bfloat16", "uniform", "clean", us=us)
    row.ceilings, row.date, row.bound_by = CEILINGS, "2000-01-01", "compute"
    if us is not None:
        row.p10, row.p90, row.ok = us * (1 - spread), us * (1 + spread), True
        row.tflops, row.tbps, row.peak_share = 3e4 / us, 100 / us, 0.5
    if peer_us is not None:
        row.peer, row.peer_us, row.peer_ok = "vllm", peer_us, True
        row.peer_p10, row.peer_p90 = peer_us * 0.99, peer_us * 1.01
        row.peer_tflops, row.peer_tbps = 3e4 / peer_us, 100 / peer_us
        row.ratio = peer_us / us if us else None
    return dataclasses.replace(row, **changes)


def test_json_round_trip(tmp_path):
    written = [make(), make(123.0, 456.0, weight=3.0), make(None, reason="no kernel")]
    path = tmp_path / "deep" / "r.jsonl"
    rows.append(path, written[:1])
    rows.append(path, written[1:])
    assert [row.to_json() for row in rows.read(path)] == [row.to_json() for row in written]
    assert rows.read(path)[0] == written[0]
    names = set(json.loads(path.read_text().splitlines()[1]))
    asked = "op phase preset shape dtype pattern us p10 p90 tflops tbps peak_share bound_by"
    asked += " peer peer_us ratio ok max_err commit gpu date machine ceilings"
    assert set(asked.split()) <= names


def test_a_line_that_was_cut_costs_no_other(tmp_path):
    path = tmp_path / "r.jsonl"
    rows.append(path, [make(1.0), make(2.0)])
    path.write_bytes(path.read_bytes()[:-200])
    assert rows.read(path) == [make(1.0)]
    rows.append(path, [make(4.0)])
    assert rows.read(path) == [make(1.0), make(4.0)]
    for line in ("nothing", "{}", "[]", "1", '{"op": }'):
        path.write_text(f"{make().to_json()}\n{line}\n")
        with pytest.raises(ValueError, match=r"r\.jsonl, line 2, is no row"):
            rows.read(path)


def test_unknown_fields_of_newer_files_are_left_out():
    line = json.dumps({**json.loads(make().to_json()), "invented_later": 1})
    assert Row.from_json(line) == make()


def test_the_last_row_counts():
    assert rows.latest([make(1.0), make(2.0), make(3.0, 4.0)]) == [make(2.0), make(3.0, 4.0)]


def test_the_newest_row_counts_whatever_its_preset_and_place():
    new = make(2.0, 5.0, preset="b", date="2000-01-03")
    old = make(3.0, 4.0, preset="a", date="2000-01-02")
    for found in ([old, new], [new, old]):
        assert rows.latest(found) == [new]
        assert sorted(r.us for r in rows.latest(found, of_each_preset=True)) == [2.0, 3.0]


def of_mix(ctx: int, us: float | None, peer_us: float | None, weight: float) -> Row:
    row = make(us, peer_us, shape={**SHAPE, "ctx": ctx}, weight=weight, preset="mix")
    row.peer = "vllm"
    return row


def test_weighted_mean():
    (mean,) = rows.weighted_means([of_mix(1, 10.0, 20.0, 3.0), of_mix(2, 50.0, 60.0, 1.0), make()])
    assert (mean.us, mean.peer_us) == (20.0, 30.0)
    assert (mean.ratio, mean.cases, mean.covered) == (1.5, 2, 1.0)


def test_weighted_mean_of_what_both_ran():
    mix = [of_mix(1, 10.0, 20.0, 3.0), of_mix(2, 50.0, None, 1.0), of_mix(3, None, 7.0, 4.0)]
    (mean,) = rows.weighted_means(mix)
    assert (mean.us, mean.peer_us, mean.cases, mean.covered) == (10.0, 20.0, 1, 0.375)
    whole = {"mix": 16.0, "other": 1.0}  # shapes that have no row at all count too
    (mean,) = rows.weighted_means(mix, whole)
    assert mean.covered == 0.1875
    assert cases.mix_weights() == {"prefill-production": 14805, "decode-rollout": 10000}


def test_weighted_mean_of_a_peer_alone():
    mix = [of_mix(1, None, 20.0, 3.0), of_mix(2, None, 60.0, 1.0)]
    (mean,) = rows.weighted_means(mix)
    assert (mean.us, mean.peer_us, mean.ratio) == (None, 30.0, None)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "regression"),
    [
        (make(100.0), make(90.0), "faster", False),
        (make(100.0), make(110.0), "slower", True),
        (make(100.0), make(101.5, spread=0.001), "same", False),  # within what a second run shows
        (make(100.0, spread=0.2), make(110.0, spread=0.2), "same", False),  # within the spread
        (make(100.0), make(None, ok=False), "wrong", True),
        (make(100.0), make(None), "lost", True),
        (make(None), make(100.0), "new", False),
    ],
)
def test_verdicts(old, new, verdict, regression, tmp_path, capsys):
    (found,) = compare.compare([old], [new])
    assert (found.verdict, found.regression) == (verdict, regression)
    files = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for path, row in zip(files, (old, new), strict=True):
        rows.append(path, [row])
    command = ["compare", *map(str, files)]
    assert main(command) == 0
    assert main([*command, "--fail-on-regression"]) == int(regression)
    assert f"1 {verdict}" in capsys.readouterr().out


def test_verdicts_are_of_the_newest_rows():
    old = [make(100.0, 200.0), make(100.0, 300.0, peer="sglang")]
    new = make(90.0, 210.0, date="2000-01-02")
    verdicts = compare.compare(old, [*old, new])  # the peer beside which ours was not run again
    assert [(v.new_us, v.ours) for v in verdicts] == [(90.0, True), (210.0, False), (300.0, False)]


def test_a_slower_peer_is_no_regression():
    verdicts = compare.compare([make(100.0, 200.0)], [make(100.0, 300.0)])
    assert [(v.verdict, v.ours) for v in verdicts] == [("same", True), ("slower", False)]
    assert not any(v.regression for v in verdicts)


def cells_of(line_start: str, text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(line_start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_report(tmp_path):
    found = [
        make(us, us * 2, shape={**SHAPE, "ctx": ctx})
        for us, ctx in ((100.0, 8192), (150.0, 65536), (200.0, 262144))
    ]
    found.append(
        make(None, 50.0, op="select_blocks", pattern="-", reason="no kernel in this build")
    )
    found.append(make(None, None, op="merge_lse", ok=False, reason="WRONG: lse"))
    found.append(of_mix(1, 10.0, 20.0, 3.0))
    path = tmp_path / "r.jsonl"
    rows.append(path, found)
    docs = tmp_path / "docs" / "performance.md"
    assert main(["report", str(path), "--out", str(tmp_path / "out"), "--docs", str(docs)]) == 0
    text = docs.read_text()
    line = cells_of("| B 1 T 8192 ctx 65536 ", text.split("## prefill: `sparse_prefill`")[1])
    assert line[1:6] == ["bfloat16", "uniform", "c", "unknown", "150.0 (148.5-151.5)"]
    assert "300.0 (100 TFLOP/s, 2.00x)" in text
    assert "no kernel in this build" in text and "WRONG" in text and "## Mixes" in text
    pictures = sorted(docs.parent.rglob("*.png"))
    assert len(pictures) == 2 and all(p.stat().st_size > 5000 for p in pictures)
    for picture in pictures:
        assert f"({picture.relative_to(docs.parent).as_posix()})" in text


def test_report_of_several_runs_says_whose_each_number_is():
    first = {"commit": "1111111aaaaa", "date": "2000-01-01"}
    later = {"commit": "2222222bbbbb", "date": "2000-01-02"}
    last = {"commit": "2222222bbbbb", "date": "2000-01-03"}
    found = [
        make(100.0, 200.0, **first),
        make(110.0, 187.0, peer="sglang", **first),
        make(80.0, 176.0, preset="a", **later),
        make(82.0, 41.0, peer="dense", preset="a", **last),
        make(
            90.0, 189.0, preset="b", **first
        ),  # older, though it comes later and in another preset
        make(100.0, 130.0, flush="dirty", **first),
    ]
    text = report.markdown(found)
    line = cells_of("| B 1 T 8192 ctx 65536 Hq 64 Hkv 4 | bfloat16 | uniform | c", text)
    assert line[4:6] == ["2222222", "82.0 (81.2-82.8)"]
    # Each peer beside ours of its own loop, and of its own commit.
    assert "176.0 (170 TFLOP/s, 2.20x of 80.0)" in line
    assert "187.0 (160 TFLOP/s, 1.70x of 110.0 at 1111111)" in line
    assert "41.0 (732 TFLOP/s, 0.50x)" in line
    line = cells_of("| B 1 T 8192 ctx 65536 Hq 64 Hkv 4 | bfloat16 | uniform | d", text)
    assert line[4] == "1111111 old" and "130.0 (231 TFLOP/s, 1.30x)" in line


def test_a_mix_counts_its_own_rows():
    other = make(5.0, 20.0, shape={**SHAPE, "ctx": 1}, preset="other", date="2000-01-02")
    text = report.markdown([of_mix(1, 10.0, 20.0, 3.0), other])
    assert (
        "| mix | `sparse_prefill` | bfloat16 | uniform | c | 10.0 | vllm | 20.0 | 2.00x |" in text
    )
    assert cells_of("| B 1 T 8192 ctx 1 ", text)[5] == "5.0 (5.0-5.0)"


def test_report_marks_a_median_that_says_little():
    steady, unsteady = report.markdown([make(spread=0.1)]), report.markdown([make(spread=0.3)])
    assert "100.0 (70.0-130.0)? |" in unsteady and "- ?: median" in unsteady
    assert "?" not in steady.split("## prefill")[1]
    assert "?" not in report.markdown([make(spread=0.3, graph=True)]).split("## prefill")[1]


def test_report_says_which_kernels_were_forced():
    forced = "the portable ones alone (MSA_FORCE_PORTABLE=1)"
    both = [make(), make(machine={"torch": "2.11.0", "kernels": forced})]
    lines = [line for line in report.markdown(both).splitlines() if "commit" in line]
    assert [forced in line for line in lines].count(True) == 1


def test_report_of_nothing_fails(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text("")
    assert main(["report", str(tmp_path / "r.jsonl")]) == 2
    assert "no rows" in capsys.readouterr().err


def test_report_to_the_terminal(tmp_path, capsys):
    rows.append(tmp_path / "r.jsonl", [make()])
    assert main(["report", str(tmp_path / "r.jsonl")]) == 0
    assert report.markdown([make()]) == capsys.readouterr().out.removesuffix("\n")
