"""The command line and the demo, run in this process."""

import pytest
import torch

from examples.m3_serving import Engine, demo, demo_checkpoint, demo_media
from examples.m3_serving.__main__ import ByteTokenizer, FileTokenizer, load_tokenizer, main


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, " ".join(captured.err.split())


@pytest.fixture
def expected(make_engine) -> str:
    (request,) = make_engine().generate([list(b"Hello")], max_new_tokens=8)
    return ByteTokenizer().decode(request.generated)


def test_prompts_and_files_are_served(capsys, checkpoints, tmp_path, expected):
    file = tmp_path / "prompt.txt"
    file.write_text("Another one", encoding="utf-8")
    options = ("--prompt", "Hello", "--prompt-file", file, "--max-new-tokens", 8)
    status, out, err = run(capsys, "--model", checkpoints["released"], *options)
    assert status == 0
    assert expected in out
    assert "request 0: 5 prompt tokens, 0 from the cache, 8 generated, ended by length" in err
    assert "request 1: 11 prompt tokens" in err


def test_stream_prints_the_same_text(capsys, checkpoints, expected):
    options = ("--prompt", "Hello", "--max-new-tokens", 8, "--stream")
    status, out, _ = run(capsys, "--model", checkpoints["text"], *options)
    assert status == 0
    assert out.rstrip("\n") == expected.rstrip("\n")


def test_seeds_and_options_reach_the_engine(capsys, checkpoints):
    model = ("--model", checkpoints["text"], "--prompt", "Hello", "--max-new-tokens", 8)
    drawn = ("--temperature", 1.5, "--top-p", 0.9, "--step-tokens", 2, "--cache-tokens", 128)
    outs = [run(capsys, *model, *drawn, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]
    every_id = [part for token in range(258) for part in ("--stop-id", token)]
    assert "1 generated, ended by stop" in run(capsys, *model, *every_id)[2]
    assert run(capsys, *model, "--dtype", "bfloat16")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-new-tokens", 0), "max_new_tokens must be at least 1, got 0"),
        (("--top-p", 2), "top_p must be above 0 and at most 1, got 2.0"),
        (("--max-new-tokens", 5000), "must be at most 4096 tokens"),
        (("--cache-tokens", 128, "--max-new-tokens", 200), "the cache of 1 pages of 128 tokens"),
        (("--prompt-file", "missing.txt"), "missing.txt"),
    ],
)
def test_what_is_refused_is_one_line_and_status_2(capsys, checkpoints, arguments, message):
    model = ("--model", checkpoints["text"], "--prompt", "Hello")
    status, out, err = run(capsys, *model, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one --prompt or --prompt-file is needed"),
        (("--prompt", "a", "--prompt", "b", "--stream"), "--stream prints one answer, got 2"),
    ],
)
def test_options_that_do_not_go_together(capsys, checkpoints, arguments, message):
    with pytest.raises(SystemExit):
        main(["--model", str(checkpoints["text"]), *arguments])
    assert message in capsys.readouterr().err


def test_bytes_are_tokens():
    tokenizer, text = ByteTokenizer(), "a é 漢 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    piece = tokenizer.incremental()
    assert "".join(piece(token) for token in [*tokenizer.encode(text), 256]) == text


def test_a_checkpoints_tokenizer_is_used(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(tmp_path, 200_000), "two words, 漢"
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    piece = tokenizer.incremental()
    assert "".join(piece(token) for token in tokenizer.encode(text)) == text


def test_no_tokenizer_and_no_byte_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold tokenizer.json, .* vocab_size 200064"):
        load_tokenizer(tmp_path, 200_064)


def test_the_demo_fails_where_selection_changes_nothing(monkeypatch, tmp_path, capsys):
    """A short run of the first part: equal tokens, but with two blocks all are attended."""
    monkeypatch.setattr(demo_checkpoint, "DEMO_FOLDER", tmp_path)
    monkeypatch.setattr(demo_media, "Servers", lambda stack, folder: None)
    monkeypatch.setattr(demo_media, "run", lambda servers, model, console: [])
    monkeypatch.setattr(demo, "PROMPT_TOKENS", {"bisect": 140, "textwrap": 60})
    monkeypatch.setattr(demo, "NEW_TOKENS", 3)
    assert demo.main() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "3 requests" not in out
    assert "selection: attending to all blocks must change the longest answer" in out
    assert "as in transformers" not in out
    folders = list(tmp_path.iterdir())
    demo_checkpoint.make_checkpoint()
    assert list(tmp_path.iterdir()) == folders  # made once


def test_the_demo_names_the_first_difference(make_engine, model):
    engine: Engine = make_engine()
    (request,) = engine.generate([[1, 2, 3]], max_new_tokens=4)
    right = request.generated
    wrong = [*right[:2], right[2] + 1, right[3]]
    margins = torch.tensor([1.0, 2.0, 0.25, 3.0])
    _, failures = demo.check_and_tabulate(engine, {"x": request}, {"x": (right, margins)})
    assert failures == []
    _, failures = demo.check_and_tabulate(engine, {"x": request}, {"x": (wrong, margins)})
    assert failures == [
        f"x: token 2 of the answer must be {wrong[2]} as in transformers (logit margin 2.50e-01), "
        f"got {right[2]}"
    ]
    _, failures = demo.check_and_tabulate(engine, {"x": request}, {"x": (right[:3], margins[:3])})
    assert "token 3 of the answer must be the end" in failures[0]
