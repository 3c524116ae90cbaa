"""The reference against loops over single tokens, and the helpers that read lengths and ids.

The loops are written from the contract alone, one key after the other in FP64, and share no code
with
the reference: what both get wrong, they get wrong twice.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import debug, reference
from tests.inputs import BATCHES, FP8, SELECTIONS, D, make_case, sparse_view


def tokens_of(case):
    """(row, request, pos) of every row with a position at or past 0."""
    row = 0
    for request, (q_len, seq_len) in enumerate(case.lengths):
        for i in range(q_len):
            pos = seq_len - q_len + i
            if pos >= 0:
                yield row, request, pos
            row += 1


def number(cache, page, head, offset, scale):
    x = cache[page, head, offset].double()
    return x if scale is None else x * scale[head].double()


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
def test_attention(selection, cache_dtype):
    lengths = [(2, 130), (0, 0), (3, 2), (1, 700), (1, 1)]
    case = make_case(
        lengths, hq=4, hkv=2, topk=3, selection=selection, cache_dtype=cache_dtype, strided=True
    )
    case.block_table[3, 2] = case.k_cache.size(0)
    out, lse = reference.sparse_attention(
        *case.attend_args, **case.scales, compute_dtype=torch.float64
    )
    want = torch.zeros_like(out)
    want_lse = torch.full_like(lse, -math.inf)
    for row, request, pos in tokens_of(case):
        visible = pos // 128 + 1
        for q_head in range(4):
            head, logits, values = q_head // 2, [], []
            for entry in case.ids[head, row, : min(3, visible)].tolist():
                page = int(case.block_table[request, entry]) if 0 <= entry < visible else -1
                if not 0 <= page < case.k_cache.size(0):
                    continue
                for token in range(entry * 128, min(entry * 128 + 128, pos + 1)):
                    k = number(case.k_cache, page, head, token % 128, case.k_scale)
                    logits.append(float(case.q[row, q_head].double() @ k) / math.sqrt(D))
                    values.append(number(case.v_cache, page, head, token % 128, case.v_scale))
            if logits:
                x = torch.tensor(logits, dtype=torch.float64)
                want[row, q_head] = torch.softmax(x, 0) @ torch.stack(values)
                want_lse[row, q_head] = x.logsumexp(0)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", ["overfull", "one", "nothing"])
def test_scores(batch):
    case = make_case(BATCHES[batch] or [(0, 0)])
    scores = reference.index_score(*case.index_args, compute_dtype=torch.float64)
    want = torch.full_like(scores, -math.inf)
    for row, request, pos in tokens_of(case):
        for head in range(2):
            for token in range(pos + 1):
                page = int(case.block_table[request, token // 128])
                key = case.index_k_cache[page, token % 128].double()
                product = case.index_q[row, head].double() @ key
                want[head, row, token // 128] = max(want[head, row, token // 128], product)
    torch.testing.assert_close(scores, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_topk(data):
    """Selection as a sort of (class, -score, id) tuples."""
    special = st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])
    row = data.draw(st.lists(special, min_size=1, max_size=30))
    visible = data.draw(st.integers(0, len(row)))
    topk = data.draw(st.integers(1, 20))
    init = data.draw(st.integers(0, topk))
    local = data.draw(st.integers(0, topk - init))

    def place(block):
        if block < init or block >= visible - local:
            return 0, 0, block
        score = row[block]
        return (2, 0, block) if math.isnan(score) else (1, -score, block)

    chosen = sorted(sorted(range(visible), key=place)[:topk])
    ids = reference.topk_blocks(
        torch.tensor([[row]]),
        torch.tensor([visible], dtype=torch.int32),
        topk,
        init_blocks=init,
        local_blocks=local,
    )
    assert ids.flatten().tolist() == chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_schedule_and_view(selection):
    case = make_case(
        [(2, 130), (0, 0), (3, 2), (5, 700)], topk=4, selection=selection, hq=2, strided=True
    )
    requests, width = len(case.lengths), case.block_table.size(1)
    rows = [[] for _ in range(2 * requests * width)]
    table = torch.zeros(case.num_tokens * 2, 4, dtype=torch.int32)
    lens = torch.zeros(case.num_tokens * 2, dtype=torch.int32)
    for row, request, pos in tokens_of(case):
        for head in range(2):
            visible = pos // 128 + 1
            entries = case.ids[head, row].tolist()[: min(4, visible)]
            kept = [(b, k) for k, b in enumerate(entries) if 0 <= b < visible]
            for block, k in kept:
                rows[(head * requests + request) * width + block].append(row * 4 + k)
            for column, (block, _) in enumerate(sorted(kept)):
                page = int(case.block_table[request, block])
                table[row * 2 + head, column] = page * 10 + head * 3
            if kept:
                last = max(kept)[0]
                lens[row * 2 + head] = 128 * (len(kept) - 1) + min(128, pos + 1 - 128 * last)
    row_ptr, pairs, items, count = reference.kv_block_schedule(
        case.ids, case.cu_seqlens_q, case.seq_lens, width, 2
    )
    flat = [pair for row in rows for pair in sorted(row)]
    assert row_ptr.tolist() == [0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()]
    assert pairs.tolist() == flat + [-1] * (pairs.numel() - len(flat))
    covered = [pairs[p] for _, begin, end in items[:count] for p in range(int(begin), int(end))]
    assert covered == flat
    got = reference.decode_view(case.ids, *case.batch, case.k_cache.size(0), 10, 3)
    assert torch.equal(got[0], table) and torch.equal(got[1], lens)


def test_merge_is_attention_over_all_keys():
    case = make_case("chunks", hq=4)
    whole, lse = reference.sparse_attention(*case.attend_args, compute_dtype=torch.float64)
    owner = torch.arange(16) % 3
    parts = [
        reference.sparse_attention(
            *case.with_(ids=case.ids.masked_fill(owner != part, -1)).attend_args,
            compute_dtype=torch.float64,
        )
        for part in range(3)
    ]
    outs, lses = zip(*parts, strict=True)
    outs = [out.masked_fill(x[..., None] == -math.inf, math.nan) for out, x in parts]
    merged, merged_lse = reference.merge_lse(outs, lses, compute_dtype=torch.float64)
    torch.testing.assert_close(merged, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", BATCHES)
def test_visible_blocks(device, batch):
    case = make_case(batch, device=device)
    for max_blocks in (None, 0, 3, 1000):
        for lengths in (
            (case.cu_seqlens_q, case.seq_lens),
            (sparse_view(case.cu_seqlens_q), sparse_view(case.seq_lens)),
            (case.cu_seqlens_q.long(), case.seq_lens.long()),
        ):
            got = msa_kernels.visible_blocks(*lengths, case.num_tokens, max_blocks)
            want = reference.token_positions(*lengths, case.num_tokens, max_blocks).visible
            assert got.dtype == torch.int32 and torch.equal(got.long(), want)
    want = torch.zeros(case.num_tokens, dtype=torch.int64)
    for row, _, pos in tokens_of(case):
        want[row] = pos // 128 + 1
    got = msa_kernels.visible_blocks(case.cu_seqlens_q, case.seq_lens, case.num_tokens)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize(
    "change,text",
    [
        (dict(cu_seqlens_q=torch.zeros(3)), "cu_seqlens_q must be an int32 vector, got"),
        (dict(cu_seqlens_q=torch.zeros(5, dtype=torch.int32)), r"\[B \+ 1\] = \[3\], got \[5\]"),
        (dict(seq_lens=torch.zeros(2, 1, dtype=torch.int32)), "seq_lens must be .* vector, got"),
        (dict(num_tokens=-1), "num_tokens must be at least 0, got -1"),
        (dict(max_blocks=-1), "max_blocks must be at least 0, got -1"),
        (
            dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device="meta")),
            "device of seq_lens, cpu, got meta",
        ),
    ],
)
def test_visible_blocks_refuses(change, text):
    lengths = dict(
        cu_seqlens_q=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        num_tokens=4,
    )
    with pytest.raises(ValueError, match=rf"^msa\.visible_blocks: .*{text}"):
        msa_kernels.visible_blocks(**(lengths | change))


def test_check_ids(device):
    """What the operators select passes; each kind of fault is named with its place."""
    case = make_case("long", device=device)
    lengths = (case.cu_seqlens_q, case.seq_lens)
    debug.check_ids(reference.select_blocks(*case.index_args), *lengths)
    debug.check_ids(case.ids.flip(-1).long(), *lengths)  # unsorted is fine
    for value, text in ((41, r"\[0, 41\).*got 41"), (-1, "got -1"), (2**31 - 1, "got 2147483647")):
        ids = case.ids.clone()
        ids[1, 0, 3] = value
        where = rf"^msa\.check_ids: ids must .*expected.*{text}.*\[head 1, token 0\]"
        with pytest.raises(ValueError, match=where):
            debug.check_ids(ids, *lengths)
    ids = case.ids.clone()
    ids[0, 5, 7] = ids[0, 5, 2]
    message = rf"got {int(ids[0, 5, 2])} twice at \[head 0, token 5\]"
    with pytest.raises(ValueError, match=message):
        debug.check_ids(ids, *lengths)
    with pytest.raises(ValueError, match="ids must be int32 or int64"):
        debug.check_ids(ids.float(), *lengths)


def test_check_ids_looks_at_what_counts_only():
    case = make_case("mixed", selection="garbage_tail")
    debug.check_ids(case.ids, case.cu_seqlens_q, case.seq_lens)
    few = make_case([(1, 300)], padding_rows=0)
    few.ids[0, 0, 3:] = few.ids[0, 0, 0]
    debug.check_ids(few.ids, few.cu_seqlens_q, few.seq_lens)


def test_check_block_table(device):
    case = make_case("mixed", device=device)
    pages = case.k_cache.size(0)
    debug.check_block_table(case.block_table, case.seq_lens, pages)
    for value in (-1, pages, 2**31 - 1):
        table = case.block_table.clone()
        table[4, 16] = value
        where = rf"^msa\.check_block_table: .*got {value} at \[request 4, block 16\]"
        with pytest.raises(ValueError, match=where):
            debug.check_block_table(table, case.seq_lens, pages)
    with pytest.raises(ValueError, match=r"expected 0 to 1280 tokens, got 2052 at \[request 4\]"):
        debug.check_block_table(case.block_table[:, :10], case.seq_lens, pages)
    with pytest.raises(ValueError, match="block_table must be int32"):
        debug.check_block_table(case.block_table.long(), case.seq_lens, pages)
    with pytest.raises(ValueError, match="seq_lens must be"):
        debug.check_block_table(case.block_table, case.seq_lens[:2], pages)
