"""Host-side C++ that no operator shows: messages, checks of absent devices, planning."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

internals = pytest.importorskip(
    "tests._internals",
    reason="tests/_internals is not built (MSA_BUILD_TEST_INTERNALS=1 make build)",
)


def tensor(name="q", dtype="bfloat16", sizes=(4, 16, 128), strides=None, **options):
    if strides is None:
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8}[dtype]
    return internals.TensorInfo(name, dtype, size, list(sizes), list(strides), **options)


def message(call, *arguments) -> str:
    with pytest.raises(ValueError) as error:
        call(*arguments)
    return str(error.value)


check = internals.Checker("sparse_prefill")


def test_describe():
    assert tensor().describe() == "bfloat16 [4, 16, 128] on cpu"
    assert tensor(device_index=1).describe() == "bfloat16 [4, 16, 128] on cuda:1"
    assert tensor(dtype="float16", sizes=()).describe() == "float16 [] on cpu"


def test_messages_name_operator_argument_expected_got():
    assert message(check.shape, tensor(), "[T, Hq, D]", [-1, 8, 128]) == (
        "msa.sparse_prefill: q must be [T, Hq, D] = [*, 8, 128], got [4, 16, 128]"
    )
    assert message(check.same_device, tensor("ids", device_index=1), tensor(device_index=0)) == (
        "msa.sparse_prefill: ids must be on cuda:0, the device of q, got cuda:1"
    )
    assert message(check.same_device, tensor("ids"), tensor(device_index=0)) == (
        "msa.sparse_prefill: ids must be on cuda:0, the device of q, got cpu"
    )
    assert message(check.in_range, "topk", 33, 1, 32) == (
        "msa.sparse_prefill: topk must be from 1 to 32, got 33"
    )


def test_alignment_is_judged_in_bytes():
    check.aligned_rows(tensor(strides=(2048 + 8, 128, 1)))  # 8 bfloat16 are 16 bytes
    text = message(check.aligned_rows, tensor(strides=(2048 + 4, 128, 1)))
    assert text == (
        "msa.sparse_prefill: stride 0 of q must be a multiple of 16 bytes, "
        "got 2052 elements of 2 bytes"
    )
    check.aligned_rows(tensor(dtype="float32", strides=(2048 + 4, 128, 1)))
    assert "stride 1" in message(check.aligned_rows, tensor(strides=(2048, 132, 1)))
    assert "last dimension of q" in message(check.aligned_rows, tensor(strides=(1, 4, 64)))
    assert "8 bytes past" in message(check.aligned_rows, tensor(address=8))


def test_strides_of_single_elements_do_not_matter():
    check.aligned_rows(tensor(sizes=(1, 1, 128), strides=(3, 5, 1)))
    check.no_overlap(tensor(sizes=(1, 1, 128), strides=(0, 0, 1)))
    check.aligned_rows(tensor(sizes=(0, 16, 128), strides=(7, 7, 7), address=4))


def test_overlap():
    assert "stride 0 in dimension 1" in message(check.no_overlap, tensor(strides=(128, 0, 1)))


@given(data=st.data())
def test_memory_of_both(data):
    """Against the sets of bytes that two tensors have."""

    def any_tensor(name):
        dims = data.draw(st.integers(0, 3))
        sizes = data.draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
        strides = data.draw(st.lists(st.integers(0, 20), min_size=dims, max_size=dims))
        dtype, size = data.draw(st.sampled_from([("float32", 4), ("uint8", 1), ("int64", 8)]))
        address = 4096 + data.draw(st.integers(0, 300))
        offsets = {address}
        for count, stride in zip(sizes, strides, strict=True):
            offsets = {place + i * stride * size for place in offsets for i in range(count)}
        used = {place + byte for place in offsets for byte in range(size)}
        return tensor(name, dtype, sizes, strides, address=address), used

    out, written = any_tensor("out")
    ids, read = any_tensor("ids")
    if written & read:
        assert message(check.apart, out, ids) == (
            "msa.sparse_prefill: out must be in memory that ids does not use, got memory of both"
        )
    else:
        check.apart(out, ids)


def test_memory_of_both_in_large_tensors():
    """Told by a few steps, however many elements there are; or taken."""
    page = 4 * 128 * 256  # elements of a page of 4 heads, K and V side by side
    sizes, strides = (2**20, 4, 128, 128), (page, 128 * 256, 256, 1)
    k = tensor("k_cache", sizes=sizes, strides=strides, address=2**20)
    for distance, apart in [(256, True), (0, False), (254, False), (2 * page, False)]:
        v = tensor("v_cache", sizes=sizes, strides=strides, address=2**20 + distance)
        if apart:
            check.apart(v, k)
        else:
            assert "k_cache does not use" in message(check.apart, v, k)
    # Elements with even and with odd places never meet, which takes as long as there are rows.
    even = tensor("out", "float32", (10**9, 4), (10, 2), address=2**20)
    check.apart(even, tensor("q", "float32", (10**9, 4), (26, 2), address=2**20 + 4))


def test_checks_do_not_need_the_device():
    outs = tensor("outs", sizes=(2, 3, 4, 128), device_index=7)
    internals.check_merge_lse(outs, tensor("lses", "float32", (2, 3, 4), device_index=7))
    text = message(
        internals.check_merge_lse, outs, tensor("lses", "float32", (2, 3, 4), device_index=6)
    )
    assert "lses must be on cuda:7" in text
    huge = tensor("outs", sizes=(1, 2**27, 16, 128), device_index=7)
    lses = tensor("lses", "float32", (1, 2**27, 16), device_index=7)
    assert "T * H of outs must be from 0 to 2147483647, got 2147483648" in message(
        internals.check_merge_lse, huge, lses
    )


def test_not_built_says_what_is_and_the_way_out():
    with pytest.raises(RuntimeError) as error:
        internals.throw_not_built("sparse_prefill", "float16", "float8_e4m3fn")
    text = str(error.value)
    assert text.startswith(
        "msa.sparse_prefill: no CPU kernel is built for other with a float8_e4m3fn cache"
    )
    assert "float32, bfloat16, float32 with a float8_e4m3fn cache" in text
    assert "python -m msa_kernels.info" in text
    assert internals.built_configs_text("no_such_op") == "nothing"


def test_configurations_are_listed_once():
    rows = internals.built_configs()
    assert len(rows) == len(set(rows)) > 10


@given(
    first=st.integers(0, 50),
    q_len=st.integers(0, 700),
    cached=st.integers(-300, 3000),
    window=st.tuples(st.integers(0, 400), st.integers(0, 800)),
    max_blocks=st.one_of(st.integers(0, 4), st.integers(0, 40)),
    log_tile=st.integers(0, 8),
    own=st.booleans(),
    cost=st.integers(0, 3),
)
def test_units_of_a_scoring_launch(first, q_len, cached, window, max_blocks, log_tile, own, cost):
    """The closed forms of the cut against counting: each token's blocks, in order, in one tile."""
    begin, end, seq_len = window[0], sum(window), cached + q_len
    cut = (begin, end, max_blocks, log_tile, own, cost if max_blocks else 0)
    plan = internals.score_plan(*cut, first, first + q_len, seq_len)
    first_token, num_tokens, first_pos, tiles, units, tile_of_unit = plan
    wanted = {}  # token -> position, of those in the window that see something
    for i in range(q_len):
        if begin <= first + i < end and cached + i >= 0:
            wanted[first + i] = cached + i
    assert list(wanted) == list(range(first_token, first_token + num_tokens))
    if wanted:
        assert first_pos == wanted[first_token]
    owners, counted, token = [], 0, first_token
    for tile, (tokens, blocks, before) in enumerate(tiles):
        assert before == counted and 1 <= tokens <= 1 << log_tile
        last = wanted[token + tokens - 1]
        assert blocks == min(last // 128 + own, max_blocks)
        owners += [tile] * (blocks + cut[-1])
        counted += blocks + cut[-1]
        token += tokens
    assert token == first_token + num_tokens and units == counted
    assert tile_of_unit == owners[:5000]


@given(st.integers(0, 5000), st.integers(1, 300))
def test_items_cover_a_row_evenly(num_pairs, limit):
    items = internals.row_items(num_pairs, limit)
    if num_pairs == 0:
        assert items == 0
        return
    begins = [internals.item_begin(num_pairs, items, i) for i in range(items + 1)]
    lengths = [b - a for a, b in pairwise(begins)]
    assert begins[0] == 0 and begins[-1] == num_pairs
    assert max(lengths) <= limit and min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1
    assert items == -(-num_pairs // limit)  # no more items than the limit asks for


@given(st.lists(st.integers(0, 400), max_size=60), st.integers(1, 100))
def test_work_items_of_any_selection_fit(row_pairs, limit):
    items = sum(internals.row_items(n, limit) for n in row_pairs)
    assert items <= internals.max_work_items(len(row_pairs), sum(row_pairs), limit)


@given(
    num_tokens=st.integers(1, 100_000),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    group_size=st.sampled_from([1, 2, 4, 8, 16]),
    topk=st.integers(1, 32),
    budget_mib=st.sampled_from([1, 16, 256, 1024]),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=50),
    invariant=st.booleans(),
)
def test_rounds_hold_any_selection(
    num_tokens, num_kv_heads, group_size, topk, budget_mib, shares, invariant
):
    """Chunks fill the slots one after another, each as full as its share: no round overflows."""
    slot_bytes, budget = group_size * 264, budget_mib << 20
    sizes = internals.prefill_sizes(
        num_tokens, num_kv_heads, group_size, topk, 2, 256, 0, slot_bytes, budget, invariant
    )
    tile_slots = sizes["tile_tokens"] * topk
    chunk_slots = sizes["chunk_tiles"] * tile_slots
    assert sizes["tiles"] * sizes["tile_tokens"] >= num_tokens
    assert sizes["chunks"] * sizes["chunk_tiles"] >= sizes["tiles"]
    assert (sizes["chunks"] - 1) * sizes["chunk_tiles"] < sizes["tiles"]
    assert sizes["chunk_tiles"] == 1 or chunk_slots <= 3072
    assert sizes["slots"] * slot_bytes <= max(budget, 4 * chunk_slots * slot_bytes)
    assert not (invariant and sizes["query_major"])
    assert not sizes["short_call"] or (sizes["rounds"] == 1 and not sizes["query_major"])
    next_slot = 0
    for chunk in range(min(num_kv_heads * sizes["chunks"], 20_000)):
        used = int(chunk_slots * shares[chunk % len(shares)])
        round_, first = divmod(next_slot, sizes["round_slots"])
        assert round_ < sizes["rounds"]
        if used <= num_kv_heads * num_tokens * topk - next_slot:
            assert first + used <= sizes["slots"]
            next_slot += used
    # All of it left over, in chunks that the last one does not fill.
    assert sizes["rounds"] * sizes["round_slots"] >= num_kv_heads * num_tokens * topk


def test_a_tile_fits_its_table():
    """At most two thirds full: probes stay short, and always end."""
    for group_size in (1, 2, 4, 8, 16):
        for topk in range(1, 33):
            sizes = internals.prefill_sizes(5000, 4, group_size, topk, 1, 100, 0, 1, 1 << 30, False)
            entries, places = sizes["tile_tokens"] * topk, sizes["tile_places"]
            assert 3 * entries <= 2 * places and places & (places - 1) == 0
            assert places < 0x8000, "a place and the mark of a duplicate share 16 bits"


def test_sizes_of_m3():
    """M3 on one GPU: 8,192 tokens leave up to 2 GiB of partial results, in rounds of under 1 GiB;
    few tokens have no query-major tiles."""
    sizes = internals.prefill_sizes(8192, 4, 16, 16, 1, 512, 0, 16 * 264, 1 << 30, False)
    assert sizes["tile_tokens"] == 12 and sizes["group_tokens"] == 4 and sizes["tiles"] == 683
    assert sizes["rounds"] == 3 and sizes["round_slots"] == -(-8192 * 64 // 3)
    assert sizes["max_queries_per_item"] == 96
    assert sizes["query_major"] and not sizes["short_call"]
    for tokens, query_major, short in ((171, False, True), (252, False, True), (253, True, False)):
        sizes = internals.prefill_sizes(tokens, 4, 16, 16, 1, 512, 0, 16 * 264, 1 << 30, False)
        assert (sizes["query_major"], sizes["short_call"]) == (query_major, short)


@pytest.mark.parametrize("pages", [512, 10**6, 33_000_000, (2**31 - 2) // 64])
def test_the_rows_of_all_rounds_can_be_numbered(pages):
    """The scan counts them in 32 bits; a table so wide gets fewer rounds, of more slots."""
    sizes = internals.prefill_sizes(70_000, 4, 16, 16, 16, pages, 0, 16 * 264, 1 << 30, False)
    assert 4 * 16 * pages * sizes["rounds"] < 2**32 - 512
    assert sizes["rounds"] * sizes["round_slots"] >= 4 * 70_000 * 16
    assert sizes["rounds"] == 1 or sizes["slots"] > sizes["round_slots"]


def test_tiles_of_requests():
    """Where a table is no wider than K blocks, or the hint says that no request is longer; each
    request may end in a part of a tile."""
    for pages, hint, invariant, by_request in (
        (16, 0, False, True),
        (17, 0, False, False),
        (16, 0, True, False),
        (8192, 2048, False, True),
        (8192, 2049, False, False),
        (16, 5000, False, True),
    ):
        sizes = internals.prefill_sizes(
            2000, 4, 16, 16, 3, pages, hint, 16 * 264, 1 << 30, invariant
        )
        assert sizes["by_request"] == by_request
        assert not by_request or sizes["tiles"] >= 2000 // 12 + 3


@given(
    num_tokens=st.integers(0, 5000),
    num_requests=st.integers(0, 600),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    group_size=st.sampled_from([1, 2, 4, 8, 16]),
    topk=st.integers(1, 32),
)
def test_draft_tokens_are_cut_evenly(num_tokens, num_requests, num_kv_heads, group_size, topk):
    """Into as few tiles a request as its tokens need, only where they fill rounds of 132 SMs: of
    two groups, or where those do not, of one."""
    groups, tokens = internals.draft_tile_tokens(
        num_tokens, num_requests, num_kv_heads, group_size, topk
    )
    each = max(1, num_tokens // max(1, num_requests))
    evenly = {}  # groups: tokens of a tile
    for of_tile in (1, 2):
        most = min(of_tile * 64 // group_size, of_tile * 128 // topk)
        request_tiles = -(-each // most)
        tiles = request_tiles * num_requests * num_kv_heads
        if tiles > 0 and 10 * tiles >= 9 * (-(-tiles // 132) * 132):
            evenly[of_tile] = -(-each // request_tiles)
    if group_size < 8 or each < 3 or not evenly:
        assert tokens == 0
        return
    assert groups == max(evenly)
    assert tokens == evenly[groups] and groups * 128 >= tokens * topk


def test_blocks_that_a_group_shares_in_part_are_marked():
    mark = 1 << 31
    for tokens, tile_tokens, marked in (
        (0b1111_1111_1111, 12, False),
        (0b0000_1111_0000, 12, False),
        (0b0111_1111_1111, 12, True),
        (0b0000_0000_0001, 12, True),
        (0b1111_0010_0000, 12, True),
        (0b11_1111, 6, False),  # the second group has two tokens
        (0b01_0000, 6, True),
        (0b1, 1, False),
    ):
        assert internals.marked_if_partly(tokens, tile_tokens, 4) == tokens | mark * marked
    assert internals.marked_if_partly(0xFF, 24, 8) == 0xFF
    assert internals.marked_if_partly(0x7F, 24, 8) == 0x7F | mark
