"""topk_blocks against the reference: exact, on every kind of score that broke a top-k somewhere."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import guarded, same_bits, sparse_view
from tests.tolerance import assert_ids

INF, NAN = float("inf"), float("nan")


def check(scores, visible, topk=16, **rule):
    """Operator equal to reference, and the row properties themselves; returns the ids."""
    ids = msa_kernels.topk_blocks(scores, visible, topk, **rule)
    assert_ids(ids, reference.topk_blocks(scores, visible, topk, **rule))
    visible = visible.long().clamp(0, scores.size(-1))
    count = visible.clamp(max=topk)
    entry = torch.arange(topk, device=ids.device)
    valid = (entry < count[:, None]).expand_as(ids)
    assert bool((ids[~valid] == -1).all())
    assert bool(((ids >= 0) & (ids < visible[:, None]))[valid].all())
    rising = (ids[..., 1:] > ids[..., :-1]) | ~valid[..., 1:]
    assert bool(rising.all()), "ids are not strictly ascending"
    return ids


def rows(*values, device="cpu"):
    """Scores [1, T, blocks] of rows of any length, and their visible counts."""
    width = max(map(len, values))
    scores = torch.full((1, len(values), width), NAN)
    for row, numbers in enumerate(values):
        scores[0, row, : len(numbers)] = torch.tensor(numbers)
    visible = torch.tensor([len(numbers) for numbers in values], dtype=torch.int32)
    return scores.to(device), visible.to(device)


@pytest.mark.parametrize("topk", [1, 2, 8, 15, 16, 17, 31, 32])
def test_counts_around_topk(device, require, topk):
    """0 to 40 visible blocks in one batch; what lies past the visible count wins if it is read."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(topk)
    for bait in (NAN, INF):
        scores = torch.randn(3, 41, 45, generator=generator)
        visible = torch.arange(41, dtype=torch.int32)
        scores.masked_fill_(torch.arange(45) >= visible[:, None], bait)
        check(scores.to(device), visible.to(device), topk)


@pytest.mark.parametrize("blocks", [1023, 1025, 4096, 4097, 8191, 8192, 8193, 16384, 16385, 20000])
def test_many_blocks(device, require, blocks):
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(blocks)
    scores = torch.randn(2, 4, blocks, generator=generator)
    scores[0, 0] = scores[0, 0].sort().values  # the best at the end
    scores[0, 1] = scores[0, 1].sort(descending=True).values  # the best at the start
    visible = torch.tensor([blocks, blocks, 300, blocks - 1], dtype=torch.int32)
    for topk in (16, 32):
        check(scores.to(device), visible.to(device), topk)


@pytest.mark.parametrize("blocks", [1025, 2048, 2049, 4096, 4097])
def test_many_rows_of_many_blocks(device, require, blocks):
    """As many rows as a prefill has, where another kernel may take them."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(blocks)
    rows = 50 if device == "cpu" else 2100  # a CPU has one kernel, and no time
    scores = torch.randint(-300, 301, (1, rows, blocks), generator=generator).float()
    scores[0, ::7] = 3.0
    scores[0, 1::7, ::2] = NAN
    visible = torch.randint(0, blocks + 1, (rows,), generator=generator).int()
    check(scores.to(device), visible.to(device))


@pytest.mark.parametrize("blocks", [17, 1024, 8192, 16385])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, INF, -INF, NAN])
def test_all_equal(device, require, value, blocks):
    """Ties: the lower ids, and the forced last block."""
    require("topk_blocks", torch.float32)
    scores, visible = rows([value] * blocks, device=device)
    ids = check(scores, visible)
    assert ids[0, 0].tolist() == [*range(15), blocks - 1]


def test_ties_at_the_threshold(device, require):
    """15 larger scores and 5,000 equal ones: the free places go to the lowest of the equals."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(0)
    scores = torch.full((2, 3, 5015), 0.25)
    for head in range(2):
        for token in range(3):
            better = torch.randperm(5014, generator=generator)[: 12 + token]
            scores[head, token, better] = torch.rand(len(better), generator=generator) + 1
    visible = torch.full((3,), 5015, dtype=torch.int32)
    check(scores.to(device), visible.to(device))


@pytest.mark.parametrize("count", [1, 2, 17, 63, 64])
def test_nan_ranks_below_everything(device, require, count):
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(4, 64, 64, generator=generator)
    scores[1] = -INF  # even below -inf
    scores[2, :, ::3] = -INF
    for token in range(64):
        scores[:, token, torch.randperm(64, generator=generator)[:count]] = NAN
    scores[3] = scores[3].where(~scores[3].isnan(), -NAN)
    visible = torch.arange(1, 65, dtype=torch.int32)
    check(scores.to(device), visible.to(device))
    ids = check(scores[1:2, -1:].to(device), visible[-1:].to(device))
    numbers = (~scores[1, -1].isnan()).nonzero()[:, 0].tolist()
    assert set(numbers[:15]) <= set(ids.flatten().tolist())


def test_special_numbers(device, require):
    """Signed zeros are equal; denormals, halves' largest, float's largest and infinities are
    ordered."""
    require("topk_blocks", torch.float32)
    tiny = 1.4e-45
    kinds = [0.0, -0.0, tiny, -tiny, 1e-38, 65504.0, -65504.0, 3.4e38, -3.4e38, INF, -INF, NAN]
    generator = torch.Generator().manual_seed(5)
    scores = torch.tensor(kinds)[torch.randint(len(kinds), (4, 200, 50), generator=generator)]
    visible = torch.randint(0, 51, (200,), generator=generator).int()
    for topk in (1, 8, 16):
        check(scores.to(device), visible.to(device), topk)
    ids = check(*rows([-0.0, 0.0, -0.0, 0.0, -1.0], device=device), 3)
    assert ids.flatten().tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    "init,local", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3), (0, 16), (16, 0), (8, 8), (15, 1)]
)
def test_forced_blocks(device, require, init, local):
    """The first and the last blocks are in, whatever their score; where they overlap, once."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(init * 31 + local)
    scores = torch.randn(2, 60, 60, generator=generator)
    forced_low = scores.clone()
    forced_low[..., :init] = -INF
    for token in range(60):
        forced_low[:, token, max(0, token + 1 - local) : token + 1] = NAN
    visible = torch.arange(1, 61, dtype=torch.int32)
    for values in (scores, forced_low):
        ids = check(
            values.to(device), visible.to(device), init_blocks=init, local_blocks=local
        ).cpu()
        for token in (20, 59):
            chosen = set(ids[0, token].tolist())
            assert set(range(init)) <= chosen
            assert set(range(token + 1 - local, token + 1)) <= chosen


def test_strided_scores_and_counts(device, require):
    """Head-major, token-major and sliced scores give the same ids, into a strided output too."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(9)
    scores = torch.randn(3, 20, 50, generator=generator).to(device)
    visible = torch.randint(0, 51, (20,), generator=generator).int().to(device)
    expected = check(scores, visible)
    token_major = scores.transpose(0, 1).contiguous().transpose(0, 1)
    last_strided = scores.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (token_major, last_strided, sparse_view(scores), scores.expand(3, 20, 50)):
        assert same_bits(msa_kernels.topk_blocks(view, sparse_view(visible)), expected)
    out, untouched = guarded(expected.shape, torch.int32, device)
    assert msa_kernels.topk_blocks(scores, visible, out=out) is out
    untouched()
    assert same_bits(out, expected)


def test_counts_out_of_range(device, require):
    """More visible blocks than scores: those there are. Negative: none."""
    require("topk_blocks", torch.float32)
    scores = torch.randn(1, 4, 20, generator=torch.Generator().manual_seed(1)).to(device)
    visible = torch.tensor([21, 2**31 - 1, -1, -(2**31)], dtype=torch.int32, device=device)
    check(scores, visible)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty(device, require, shape):
    require("topk_blocks", torch.float32)
    ids = msa_kernels.topk_blocks(
        torch.zeros(shape, device=device),
        torch.full(shape[1:2], 3, dtype=torch.int32, device=device),
    )
    assert ids.shape == (*shape[:2], 16) and bool((ids == -1).all())


def test_inputs_that_the_kernel_before_writes(device, require):
    """Scores and counts are read after whoever writes them, however close the launches are."""
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(8)
    choices = torch.randn(30, 2, 64, 700, generator=generator).to(device)
    counts = torch.randint(0, 701, (30, 64), generator=generator).int().to(device)
    scores, visible = torch.zeros_like(choices[0]), torch.zeros_like(counts[0])

    def steps():
        results = []
        for choice, count in zip(choices, counts, strict=True):
            torch.add(choice, 0, out=scores)  # kernels, where a copy might be none
            torch.add(count, 0, out=visible)
            results.append(msa_kernels.topk_blocks(scores, visible))
        return results

    if device == "cpu":
        results = steps()
    else:
        steps()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = steps()
        for _ in range(5):
            graph.replay()
    for ids, choice, count in zip(results, choices, counts, strict=True):
        assert_ids(ids, reference.topk_blocks(choice, count))


def test_row_does_not_depend_on_its_place(device, require):
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-4, 5, (1, 1, 700), generator=generator).float()
    many = torch.randn(3, 257, 700, generator=generator)
    places = [(0, 0), (1, 100), (2, 256)]
    for head, token in places:
        many[head, token] = scores[0, 0]
    visible = torch.full((257,), 699, dtype=torch.int32)
    alone = msa_kernels.topk_blocks(scores.to(device), visible[:1].to(device))
    together = msa_kernels.topk_blocks(many.to(device), visible.to(device))
    for head, token in places:
        assert same_bits(together[head, token], alone[0, 0])


def test_hundred_runs_give_the_same_bits(device, require):
    require("topk_blocks", torch.float32)
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (4, 16, 2000), generator=generator).float().to(device)
    visible = torch.full((16,), 2000, dtype=torch.int32, device=device)
    first = check(scores, visible)
    for _ in range(99):
        assert same_bits(msa_kernels.topk_blocks(scores, visible), first)


SCORES = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]), st.floats(width=32))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_row(device, require, data):
    require("topk_blocks", torch.float32)
    topk = data.draw(st.integers(1, 32))
    init = data.draw(st.integers(0, topk))
    local = data.draw(st.integers(0, topk - init))
    values = data.draw(st.lists(st.lists(SCORES, min_size=1, max_size=70), min_size=1, max_size=4))
    scores, visible = rows(*values, device=device)
    check(scores, visible, topk, init_blocks=init, local_blocks=local)
