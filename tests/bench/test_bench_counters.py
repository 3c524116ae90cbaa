"""The formulas of FLOPs and bytes against counting one by one, on small ragged batches."""

import pytest

from bench import counters
from bench.inputs import BLOCK, D, Inputs, Shape

SHAPES = [
    Shape((5, 1, 70), (5, 2200, 400), num_q_heads=4, num_kv_heads=2, topk=4),
    Shape((1,), (1,), num_q_heads=2, num_kv_heads=1, topk=16),
    Shape((3, 3), (130, 2100), num_q_heads=4, num_kv_heads=4, topk=16),
]
DTYPES = [("bfloat16", 2, 2), ("float32", 4, 4), ("fp8", 2, 1)]


@pytest.fixture(params=SHAPES, ids=["ragged", "one", "verify"])
def shape(request) -> Shape:
    return request.param


def keys_of(inputs: Inputs) -> list[set[tuple[int, int, int]]]:
    """For each (head, token): the (head, request, key) it attends to."""
    shape, found = inputs.shape, []
    for head in range(shape.num_kv_heads):
        for token in range(shape.num_tokens):
            request, pos = int(inputs.request[token]), int(inputs.pos[token])
            blocks = [b for b in inputs.ids[head, token].tolist() if b >= 0]
            keys = (b * BLOCK + i for b in blocks for i in range(BLOCK))
            found.append({(head, request, key) for key in keys if key <= pos})
    return found


def seen(shape: Shape) -> list[int]:
    """Keys at or before each token."""
    pairs = zip(shape.q_lens, shape.seq_lens, strict=True)
    return [s - q + i + 1 for q, s in pairs for i in range(q)]


@pytest.mark.parametrize(("dtype", "size", "cache_size"), DTYPES)
@pytest.mark.parametrize("pattern", ["uniform", "coherent"])
def test_sparse_attention(shape, pattern, dtype, size, cache_size):
    inputs = Inputs(shape, dtype, pattern)
    keys = keys_of(inputs)
    cost = counters.sparse_attention(inputs)
    group = shape.num_q_heads // shape.num_kv_heads
    assert cost.flops == sum(map(len, keys)) * group * 4 * D
    kv = len(set().union(*keys)) * 2 * D * cache_size
    rows = shape.num_tokens * shape.num_q_heads * D * size
    ids = shape.num_kv_heads * shape.num_tokens * shape.topk * 4
    assert cost.bytes == kv + 2 * rows + ids


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4), ("fp8", 1)])
def test_index(shape, dtype, size):
    inputs = Inputs(shape, dtype)
    heads, tokens = shape.num_kv_heads, shape.num_tokens
    flops = sum(seen(shape)) * heads * D * 2
    keys = sum(shape.seq_lens) * D * size + tokens * heads * D * size
    scores = sum(-(-n // BLOCK) for n in seen(shape)) * heads * 4
    assert counters.select_blocks(inputs) == counters.Cost(
        flops, keys + heads * tokens * shape.topk * 4
    )
    assert counters.index_score(inputs) == counters.Cost(flops, keys + scores)
    assert (
        counters.topk_blocks(inputs).bytes == scores + 4 * tokens + heads * tokens * shape.topk * 4
    )


def test_a_request_without_tokens_is_not_read():
    shape = Shape((0, 2), (5000, 300), num_q_heads=2, num_kv_heads=1)
    assert counters.request_keys(Inputs(shape)) == 300


def test_dense(shape):
    cost = counters.dense_attention(Inputs(shape))
    assert cost.flops == sum(seen(shape)) * shape.num_q_heads * 4 * D
    rows = shape.num_tokens * shape.num_q_heads * D * 2
    assert cost.bytes == sum(shape.seq_lens) * shape.num_kv_heads * 2 * D * 2 + 2 * rows


def test_small_steps(shape):
    inputs = Inputs(shape)
    tokens, heads, entries = shape.num_tokens, shape.num_kv_heads, int((inputs.ids >= 0).sum())
    ids = tokens * heads * shape.topk * 4
    rows = heads * shape.num_requests * shape.max_blocks
    assert counters.kv_block_schedule(inputs).bytes == ids + 4 * entries + 4 * rows
    assert counters.decode_view(inputs).bytes == 2 * ids + 4 * entries + 4 * tokens * heads
    assert counters.write_cache(inputs).bytes == tokens * (2 * heads * D * 4 + 2 * D * 2 + 8)
    merged = counters.merge_lse(inputs)
    assert (
        merged.bytes
        == (inputs.outs.numel() * 2 + inputs.lses.numel() * 4) * (shape.topk + 1) // shape.topk
    )
    assert merged.flops == inputs.outs.numel() * 2


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4), ("fp8", 2)])
def test_pixels(shape, dtype, size):
    inputs = Inputs(shape, dtype)
    written = 4 * shape.num_tokens * 1176 * size
    clip, image = inputs.patches, inputs.image_patches
    assert clip.shape == (4 * shape.num_tokens, 1176)
    assert counters.normalize_patches(inputs).bytes == clip.numel() + written
    assert counters.normalize_patches(inputs, frames=1).bytes == image.numel() + written


def test_what_bounds():
    assert counters.Cost(10**12, 0).floor_us(500, 4) == (2000.0, "compute")
    assert counters.Cost(0, 4 * 10**9).floor_us(500, 4) == (1000.0, "memory")


def test_the_figures_of_a_known_shape():
    """T 8192 at 65536: 532.7 GFLOP; 32 requests of 30 distinct blocks a head: 251 MB."""
    prefill = Inputs(Shape.of(1, 8192, 65536))
    keys = counters.attended_keys(prefill.pos, 16)
    assert round(keys * 64 * D * 4 / 1e9, 1) == 532.7
    verify = Inputs(Shape.of(32, 256, 100_000), pattern="coherent")
    read = counters.distinct_keys(verify.ids, verify.request, verify.pos) * 2 * D * 2
    assert 235e6 < read <= 251.7e6
