"""The selections that are measured with have the properties that their names promise."""

import itertools

import pytest
import torch

from bench.inputs import Inputs, Shape
from bench.patterns import GROUP, PATTERNS, draw

LONG = Shape((300,), (100_000,), num_q_heads=8, num_kv_heads=2)
RAGGED = Shape((5, 1, 130, 40), (5, 4000, 1300, 2060), num_q_heads=8, num_kv_heads=2)


def selected(shape: Shape, pattern: str) -> tuple[Inputs, torch.Tensor]:
    inputs = Inputs(shape, pattern=pattern)
    return inputs, inputs.ids


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", [LONG, RAGGED], ids=["long", "ragged"])
def test_rows_are_legal_selections(shape, pattern):
    inputs, ids = selected(shape, pattern)
    assert ids.dtype == torch.int32 and ids.shape == (2, shape.num_tokens, 16)
    for head, token in itertools.product(range(2), range(shape.num_tokens)):
        row, visible = ids[head, token].tolist(), int(inputs.visible[token])
        count = min(16, visible)
        assert row[count:] == [-1] * (16 - count)
        assert row[:count] == sorted(set(row[:count]))  # distinct, ascending
        assert row[count - 1] == visible - 1  # the own block, which is the last visible one
        assert row[0] >= 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_seed_decides(pattern):
    first, again = selected(RAGGED, pattern)[1], selected(RAGGED, pattern)[1]
    assert torch.equal(first, again)


def distinct(ids: torch.Tensor, tokens: range) -> int:
    return len(set(ids[0, list(tokens)].flatten().tolist()))


def test_coherent_neighbours_share():
    inputs, ids = selected(LONG, "coherent")
    group = inputs.pos // GROUP
    for first in range(0, 293, 4):
        if len(group[first : first + 8].unique()) == 1:
            # own, first, 12 in common, 2 of each token's own, which rarely meet among 780 blocks
            assert 20 <= distinct(ids, range(first, first + 4)) <= 22
            assert 26 <= distinct(ids, range(first, first + 8)) <= 30
    assert (ids[..., 0] == 0).all()


def test_coherent_common_blocks_are_of_the_group():
    inputs, ids = selected(LONG, "coherent")
    for value in (inputs.pos // GROUP).unique()[1:-1].tolist():
        rows = ids[1, inputs.pos // GROUP == value].tolist()
        assert len(set.intersection(*map(set, rows))) == 14


def test_shared_is_the_same_for_64_and_not_for_all():
    inputs, ids = selected(LONG, "shared")
    rows = {int(g): ids[0, inputs.pos // GROUP == g] for g in (inputs.pos // GROUP).unique()}
    assert all((row == row[0]).all() for row in rows.values())
    assert len({tuple(row[0].tolist()) for row in rows.values()}) == len(rows)
    assert not torch.equal(ids[0], ids[1])


def test_uniform_is_uniform():
    shape = Shape((1,) * 4000, (128 * 41 - 5,) * 4000, num_q_heads=1, num_kv_heads=1)
    ids = selected(shape, "uniform")[1]
    counts = torch.bincount(ids.flatten().long(), minlength=41)
    assert counts[40] == 4000
    expected = 4000 * 15 / 40
    assert ((counts[:40] - expected).abs() < 6 * expected**0.5).all()


def test_drawing_all_there_is():
    total = torch.tensor([0, 1, 3, 10])
    rng = torch.Generator().manual_seed(0)
    rows = draw(total, total.clamp(max=5), 5, rng).sort(dim=-1).values
    assert rows[2, :3].tolist() == [0, 1, 2]
    assert len(set(rows[3].tolist())) == 5 and rows[3].max() < 10
    assert (rows[0] == 2**31 - 1).all()
