"""Every operator and overload under torch.library.opcheck and under torch.compile.

On ordinary and on strided inputs: a fake that hands on its input's strides, or an output that
aliases an input, is only seen on the latter.
"""

import pytest
import torch

import msa_kernels
from tests.inputs import FP8, D, copied_caches, guarded, make_case, same_bits

ops = torch.ops.msa


def step(strided, **options):
    return make_case(
        [(3, 300), (1, 2180), (0, 5)], dtype=torch.bfloat16, strided=strided, **options
    )


def output(shape, dtype, strided, rows=False):
    if strided:
        return guarded(shape, dtype, rows=rows)[0]
    return torch.zeros(shape, dtype=dtype)


def calls(strided):
    """(name, overload, args, kwargs) of every operator and overload."""
    case = step(strided)
    fp8 = step(strided, cache_dtype=FP8)
    heads, tokens, width = 2, case.num_tokens, case.block_table.size(1)
    scores = msa_kernels.index_score(*case.index_args)
    if strided:
        scores = scores.transpose(0, 1).contiguous().transpose(0, 1)
    out = output(case.q.shape, torch.bfloat16, strided, rows=True)
    lse = output(case.q.shape[:2], torch.float32, strided)
    ids = output((heads, tokens, 16), torch.int32, strided)
    paged = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    by_row = (*paged[:3], case.block_table[1:2].expand(tokens, -1), case.visible * 100)
    cu = {"cu_seqlens_q": case.cu_seqlens_q}
    outs = output((3, tokens, 4, D), torch.float32, strided, rows=True).normal_()
    lses = output((3, tokens, 4), torch.float32, strided).normal_()
    merged = output((tokens, 4, D), torch.float32, strided, rows=True)
    merged_lse = output((tokens, 4), torch.float32, strided)
    remap = (case.ids, case.cu_seqlens_q, case.seq_lens, width)
    yield "index_score", ops.index_score.default, case.index_args, {}
    scores_out = {"scores": output((heads, tokens, width), torch.float32, strided)}
    yield "index_score.out", ops.index_score.out, case.index_args, scores_out
    yield "topk_blocks", ops.topk_blocks.default, (scores, case.visible, 16), {}
    yield "topk_blocks.out", ops.topk_blocks.out, (scores, case.visible, 16), {"ids": ids}
    yield "select_blocks", ops.select_blocks.default, (*case.index_args, 16), {}
    yield "select_blocks.out", ops.select_blocks.out, (*case.index_args, 16), {"ids": ids}
    yield "kv_block_schedule", ops.kv_block_schedule.default, remap, {}
    yield "kv_block_schedule, 3 an item", ops.kv_block_schedule.default, (*remap, 3), {}
    view = (case.ids, *case.batch, case.k_cache.size(0), 2, 1)
    page_table = output((tokens * heads, case.ids.size(2)), torch.int32, strided)
    view_out = {
        "page_table": page_table,
        "kv_lens": output((tokens * heads,), torch.int32, strided),
    }
    yield "decode_view", ops.decode_view.default, view, {}
    yield "decode_view.out", ops.decode_view.out, view, view_out
    for name in ("sparse_prefill", "sparse_decode"):
        op = getattr(ops, name)
        yield name, op.default, case.attend_args, {}
        yield f"{name} with LSE", op.default, case.attend_args, {"return_lse": True}
        yield f"{name}, FP8", op.default, fp8.attend_args, fp8.scales
        yield f"{name}.out", op.out, case.attend_args, {"output": out, "lse": lse}
        yield f"{name}.out, no LSE", op.out, case.attend_args, {"output": out}
    yield "paged_decode", ops.paged_decode.default, paged, {**cu, "return_lse": True}
    yield "paged_decode by row", ops.paged_decode.default, by_row, {}
    yield "paged_decode.out", ops.paged_decode.out, paged, {**cu, "output": out, "lse": lse}
    yield "merge_lse", ops.merge_lse.default, (outs, lses), {}
    yield "merge_lse.out", ops.merge_lse.out, (outs, lses), {"output": merged, "lse": merged_lse}
    yield "merge_lse.parts", ops.merge_lse.parts, (list(outs), list(lses)), {}
    pixels = torch.randint(0, 256, (tokens + 1, 588), dtype=torch.uint8)
    pixels = pixels[1:] if strided else pixels[:-1].clone()  # [1:]: not aligned to 8 bytes
    media = (pixels, [0.5, 0.4, 0.3], [0.3, 0.2, 0.1])
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(tokens, 1176, dtype=dtype)
        one = {"temporal": 1, "dtype": dtype}
        yield f"normalize_patches, {dtype}", ops.normalize_patches.default, media, {"dtype": dtype}
        yield f"normalize_patches, 1, {dtype}", ops.normalize_patches.default, media, one
        yield f"normalize_patches.out, {dtype}", ops.normalize_patches.out, media, {"output": out}
    for name, x in (("write_cache", case), ("write_cache, FP8", fp8)):
        new = copied_caches(x, "zero")
        args = (x.k, x.v, x.index_k, x.slot_mapping, new.k_cache, new.v_cache, new.index_k_cache)
        yield name, ops.write_cache.default, args, x.scales


OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
NAMES = [name for name, *_ in calls(False)]


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, strided):
    (call,) = (rest for this, *rest in calls(strided) if this == name)
    overload, args, kwargs = call
    # The schema test compares with allclose, which PyTorch has not for FP8 on a CPU.
    fp8 = any(isinstance(x, torch.Tensor) and x.dtype == FP8 for x in args)
    tests = [t for t in OPCHECK_TESTS if not (fp8 and t == "test_schema")]
    torch.library.opcheck(overload, args, kwargs, test_utils=tests)


def test_every_overload_is_checked():
    checked = {str(overload) for _, overload, *_ in calls(False)}
    there = {
        f"{name.replace('::', '.')}"
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("msa::") and not name.endswith("build_info")
    }
    there = {name if name.count(".") == 2 else f"{name}.default" for name in there}
    assert there == checked


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_fake_says_what_the_kernel_returns(name, strided):
    """Shape, dtype and strides of every result, on meta tensors and for real."""
    (call,) = (rest for this, *rest in calls(strided) if this == name)
    overload, args, kwargs = call

    def flat(result):
        return result if isinstance(result, (tuple, list)) else (result,)

    def meta(x):
        if isinstance(x, list):
            return [meta(y) for y in x]
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    real = flat(overload(*args, **kwargs))
    fake = flat(overload(*map(meta, args), **{k: meta(v) for k, v in kwargs.items()}))
    for got, want in zip(fake, real, strict=True):
        if want is None:
            continue
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_compile_each_operator(name, strided):
    (call,) = (rest for this, *rest in calls(strided) if this == name)
    overload, args, kwargs = call
    want = overload(*args, **kwargs)
    written = {k: v.clone() for k, v in kwargs.items() if k in ("output", "lse", "ids", "scores")}

    def run(args, kwargs):
        return overload(*args, **kwargs)

    for value in written:
        kwargs[value].zero_()
    got = compiled(run)(args, kwargs)
    for key, value in written.items():
        assert same_bits(kwargs[key], value)
    if want is not None:
        many = isinstance(want, (tuple, list))
        for a, b in zip(got if many else (got,), want if many else (want,), strict=True):
            assert same_bits(a, b) and a.stride() == b.stride()


def public_calls(case):
    """(name, call without arguments) of the public functions, as a model would call them."""
    tokens = case.q.size(0)
    out = torch.empty(tokens, 2 * case.q.size(1), D, dtype=case.q.dtype)[:, ::2]  # strided
    lse = torch.empty(tokens, case.q.size(1))
    parts = case.q.float().expand(3, *case.q.shape), torch.zeros(3, *case.q.shape[:2])
    visible = msa_kernels.visible_blocks(case.cu_seqlens_q, case.seq_lens, tokens)
    yield "index_score", lambda: msa_kernels.index_score(*case.index_args)
    yield "select_blocks", lambda: msa_kernels.select_blocks(*case.index_args)
    yield (
        "topk_blocks",
        lambda: msa_kernels.topk_blocks(msa_kernels.index_score(*case.index_args), visible),
    )
    yield (
        "kv_block_schedule",
        lambda: tuple(
            msa_kernels.kv_block_schedule(case.ids, case.cu_seqlens_q, case.seq_lens, 64)
        ),
    )
    yield (
        "decode_view",
        lambda: tuple(msa_kernels.decode_view(case.ids, *case.batch, case.k_cache, case.v_cache)),
    )
    rows = tokens * case.ids.size(0)
    table, lens = torch.empty(rows, 2 * case.ids.size(2)).int()[:, ::2], torch.empty(rows).int()
    yield (
        "decode_view, out",
        lambda: tuple(
            msa_kernels.decode_view(
                *(case.ids, *case.batch, case.k_cache, case.v_cache),
                page_table=table,
                kv_lens=lens,
            )
        ),
    )
    for name in ("sparse_prefill", "sparse_decode"):
        function = getattr(msa_kernels, name)
        yield name, lambda f=function: f(*case.attend_args, scale=0.1, return_lse=True)
        yield f"{name}, out", lambda f=function: f(*case.attend_args, out=out, lse=lse)
    yield (
        "paged_decode",
        lambda: msa_kernels.paged_decode(
            case.q,
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.seq_lens,
            cu_seqlens_q=case.cu_seqlens_q,
        ),
    )
    yield "merge_lse", lambda: msa_kernels.merge_lse(*parts)
    yield (
        "merge_lse of separate parts",
        lambda: msa_kernels.merge_lse(list(parts[0].contiguous()), list(parts[1])),
    )
    yield (
        "visible_blocks",
        lambda: msa_kernels.visible_blocks(case.cu_seqlens_q, case.seq_lens, tokens),
    )
    pixels = torch.zeros(tokens, 588, dtype=torch.uint8) + torch.arange(588) % 256
    media = (pixels.byte(), (0.5, 0.4, 0.3), (0.3, 0.2, 0.1))
    yield "normalize_patches", lambda: msa_kernels.normalize_patches(*media)
    written = torch.zeros(tokens, 1176)
    yield "normalize_patches, out", lambda: msa_kernels.normalize_patches(*media, out=written)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("name", [name for name, _ in public_calls(make_case("mixed"))])
def test_compile_each_public_function(name, layout):
    """fullgraph and dynamic: the Python around the operators must be traceable too."""
    for batch in ("mixed", "verify"):
        call = dict(public_calls(make_case(batch, layout=layout)))[name]
        want = [x.clone() for x in torch.utils._pytree.tree_leaves(call())]
        got = torch.utils._pytree.tree_leaves(compiled(call)())
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b)


def msa_step(case, caches, out=None):
    return msa_kernels.msa_attention(
        case.q,
        case.k,
        case.v,
        case.index_q,
        case.index_k,
        msa_kernels.PagedCache(
            caches.k_cache, caches.v_cache, caches.index_k_cache, case.k_scale, case.v_scale
        ),
        msa_kernels.Batch(case.block_table, case.cu_seqlens_q, case.seq_lens, case.slot_mapping),
        out=out,
    )


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_compile_msa_attention(cache_dtype):
    """One graph for batches of every size, caches written inside it."""
    run = compiled(msa_step)
    for lengths in ([(3, 300), (1, 2180)], [(40, 2100), (7, 7), (2, 129)], [(5, 800)]):
        case = make_case(lengths, dtype=torch.bfloat16, cache_dtype=cache_dtype, strided=True)
        got_caches, want_caches = copied_caches(case), copied_caches(case)
        for caches in (got_caches, want_caches):  # the step must write its tokens itself
            wiped = caches.k_cache.view(torch.uint8) if cache_dtype == FP8 else caches.k_cache
            last = case.slot_mapping[case.num_real - 1]
            wiped[last // 128, :, last % 128] = 0
        want = msa_step(case, want_caches)
        assert same_bits(run(case, got_caches), want)
        for a, b in zip(got_caches.pools, want_caches.pools, strict=True):
            assert same_bits(a, b)


def test_compile_dense_attention():
    def run(case):
        cache = msa_kernels.PagedCache(case.k_cache, case.v_cache)
        batch = msa_kernels.Batch(
            case.block_table, case.cu_seqlens_q, case.seq_lens, case.slot_mapping
        )
        return msa_kernels.dense_attention(case.q, case.k, case.v, cache, batch)

    graph = compiled(run)
    for lengths in ([(3, 300), (1, 2180)], [(40, 500), (2, 129)]):
        case = make_case(lengths, dtype=torch.bfloat16)
        assert same_bits(graph(case), run(case))


def test_compile_visible_blocks():
    run = compiled(msa_kernels.visible_blocks)
    for lengths in ([(3, 300), (1, 2180)], [(0, 0), (7, 7), (2, 129)]):
        case = make_case(lengths)
        args = (case.cu_seqlens_q, case.seq_lens, case.num_tokens)
        assert same_bits(run(*args), case.visible)
