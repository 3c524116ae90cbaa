"""The benchmark of what the gateway gives back: each arrangement, rate and device is measured."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("av")
pytest.importorskip("PIL")

from safetensors.torch import save_file

from bench.gateway import giveback, material
from bench.gateway.__main__ import parse_arguments
from examples.m3_serving.config import ModelConfig
from examples.m3_serving.weights import tensor_shapes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def photo(tmp_path, monkeypatch) -> Path:
    """A small one; the benchmark starts its processes as modules of this tree."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "photo.jpg"
    path.write_bytes(material.photo(240, 320))
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A model of two layers in float32."""
    config = {
        "model_type": "minimax_m3_vl_text",
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense"],
        "dense_intermediate_size": 32,
        "index_n_heads": 2,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelConfig.from_dict(config))
    tensors = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_measured(results, rates):
    assert [(one.arrangement, one.rate) for one in results] == [
        ("alone", 0),
        *((name, rate) for rate in rates for name in ("inside", "outside")),
    ]
    assert all(one.tokens_s > 0 and one.step_p99_ms >= one.step_p50_ms for one in results)
    assert results[0].images_s == 0 and all(one.images_s > 0 for one in results[1:])


def test_every_arrangement_is_measured_at_every_rate(photo):
    loop, results = giveback.run(photo, None, "cpu", [10.0, 20.0], 1, 0.5, 1)
    assert loop == "a fixed loop"
    assert_measured(results, [10, 20])
    lines = giveback.table(results).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == 2 + 5 and {len(row) for row in cells} == {7}
    assert [row[1] for row in cells[2:]] == ["0", "10", "10", "20", "20"]
    assert cells[2][4] == "100 %"


def test_the_engine_is_measured_on_each_device(photo, checkpoint, device, require):
    require("sparse_prefill")
    loop, results = giveback.run(photo, checkpoint, device, [10.0], 1, 0.5, 1)
    name = torch.cuda.get_device_name(device) if device == "cuda" else device
    assert loop == f"the engine on model, {name}, torch {torch.__version__}"
    assert_measured(results, [10])


def test_an_engine_begins_anew_with_every_measurement(checkpoint):
    loop = giveback.engine_loop(checkpoint, "cpu")
    for _ in range(2):
        loop.restart()
        assert [loop.step() for _ in range(3)] == [4, 4, 4]


def test_medians_are_of_one_arrangement_and_rate():
    rows = [("alone", 0.0, 3.0), ("inside", 8.0, 1.0), ("alone", 0.0, 5.0), ("inside", 8.0, 9.0)]
    found = giveback.medians([giveback.Result(*row, 0.0, 0.0, 0.0) for row in rows])
    assert [(one.arrangement, one.rate, one.tokens_s) for one in found] == [
        ("alone", 0.0, 4.0),
        ("inside", 8.0, 5.0),
    ]


def test_the_device_is_the_engines(capsys):
    assert parse_arguments(["giveback"]).device == "cpu"
    parsed = parse_arguments(["giveback", "--model", "x", "--device", "cuda", "--rate", "8"])
    assert (parsed.device, parsed.rate) == ("cuda", [8.0])
    with pytest.raises(SystemExit):
        parse_arguments(["giveback", "--device", "cuda"])
    assert "needs --model; got cuda alone" in capsys.readouterr().err
