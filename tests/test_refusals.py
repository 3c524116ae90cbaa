"""What every operator refuses: by name, with what it expects and what it got, before any write.

Each row of the tables spoils one argument of a call that is right otherwise. The error must be a
ValueError that begins "msa.<op>: ", names the argument, says what it must be and what it got; and
every tensor of the call keeps its bits.
"""

import re

import pytest
import torch

import msa_kernels
from tests.inputs import BLOCK, FP8, D, make_case, same_bits

INT32, INT64 = torch.int32, torch.int64


def attend_call(**changes):
    case = make_case([(3, 300), (2, 700)], dtype=torch.bfloat16, **changes)
    names = ("q", "k_cache", "v_cache", "ids", "block_table", "cu_seqlens_q", "seq_lens")
    call = dict(zip(names, case.attend_args, strict=True))
    call |= case.scales
    call["out"] = torch.full_like(case.q, -7)
    call["lse"] = torch.full(case.q.shape[:2], -7.0)
    return call


def paged_call(**changes):
    call = attend_call(**changes)
    call["page_table"], call["kv_lens"] = call.pop("block_table"), call.pop("seq_lens")
    del call["ids"]
    return call


def index_call():
    case = make_case([(3, 300), (2, 700)], dtype=torch.bfloat16)
    names = ("index_q", "index_k_cache", "block_table", "cu_seqlens_q", "seq_lens")
    return dict(zip(names, case.index_args, strict=True))


def score_call():
    call = index_call()
    tokens, heads = call["index_q"].shape[:2]
    return call | {"out": torch.full((heads, tokens, call["block_table"].size(1)), -7.0)}


def select_call():
    call = index_call()
    tokens, heads = call["index_q"].shape[:2]
    out = torch.full((heads, tokens, 16), -7, dtype=INT32)
    return call | {"topk": 16, "init_blocks": 0, "local_blocks": 1, "out": out}


def topk_call():
    return {
        "scores": torch.randn(2, 5, 20),
        "visible_blocks": torch.full((5,), 20, dtype=INT32),
        "topk": 16,
        "init_blocks": 0,
        "local_blocks": 1,
        "out": torch.full((2, 5, 16), -7, dtype=INT32),
    }


def write_call(**changes):
    case = make_case([(3, 300), (2, 700)], dtype=torch.bfloat16, **changes)
    return {
        "k": case.k,
        "v": case.v,
        "index_k": case.index_k,
        "slot_mapping": case.slot_mapping,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "index_k_cache": case.index_k_cache,
        **case.scales,
    }


def schedule_call():
    call = attend_call()
    names = ("ids", "cu_seqlens_q", "seq_lens")
    return {n: call[n] for n in names} | {"max_blocks": 8, "max_queries_per_item": 64}


def view_call():
    call = attend_call()
    names = ("ids", "block_table", "cu_seqlens_q", "seq_lens", "k_cache", "v_cache")
    rows = call["ids"].size(0) * call["ids"].size(1)
    return {name: call[name] for name in names} | {
        "page_table": torch.full((rows, call["ids"].size(2)), -7, dtype=INT32),
        "kv_lens": torch.full((rows,), -7, dtype=INT32),
    }


def merge_call():
    return {
        "outs": torch.randn(3, 5, 4, D),
        "lses": torch.randn(3, 5, 4),
        "out": torch.full((5, 4, D), -7.0),
        "lse": torch.full((5, 4), -7.0),
    }


def parts_call():
    call = merge_call()
    return {"outs": list(call["outs"]), "lses": list(call["lses"])}


def media_call():
    return {
        "patches": torch.full((6, 2 * 588), 9, dtype=torch.uint8),
        "mean": [0.5, 0.4, 0.3],
        "std": [0.3, 0.2, 0.1],
        "patch": 14,
        "temporal": 2,
        "out": torch.full((6, 2 * 588), -7.0),
    }


def media_dtype_call():
    return {**media_call(), "dtype": torch.float32, "out": None}


def fp8_attend_call():
    return attend_call(cache_dtype=FP8)


def fp8_write_call():
    return write_call(cache_dtype=FP8)


# How to spoil a tensor.


def to(dtype):
    """Another dtype, and the same bytes where the sizes match: what must not be reinterpreted."""

    def spoil(x):
        if x.element_size() == torch.empty(0, dtype=dtype).element_size():
            return x.view(dtype)
        return torch.zeros(x.shape, dtype=dtype)

    return spoil


def bytes_of(dtype):
    return lambda x: x.to(FP8).view(dtype)


def gapped(x):
    """A last dimension that is not contiguous."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.size(-1), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def crooked(dim):
    """A stride of `dim` that is no multiple of 16 bytes."""

    def spoil(x):
        sizes = list(x.shape)
        strides = [x.size(-1) * 4] * x.dim()
        for d in range(x.dim() - 2, -1, -1):
            strides[d] = strides[d + 1] * sizes[d + 1] if d < x.dim() - 2 else sizes[-1] * 2
        strides[-1] = 1
        strides[dim] += 1
        storage = torch.zeros(sum(n * s for n, s in zip(sizes, strides, strict=True)) + 1)
        return storage.to(x.dtype).as_strided(sizes, strides)

    return spoil


def shifted(x):
    """An address that is no multiple of 16 bytes."""
    storage = torch.zeros(x.numel() + 8, dtype=x.dtype)
    return storage[1 : 1 + x.numel()].view(x.shape)


def longer(dim):
    return lambda x: torch.cat([x, x.narrow(dim, 0, 1)], dim=dim)


def shorter(dim):
    return lambda x: x.narrow(dim, 0, x.size(dim) - 1)


def flat(x):
    return x.flatten()


def deeper(x):
    return x[None]


def overlapping(x):
    """Written twice at the same place: stride 0."""
    return x[:1].expand(x.shape)


def cache_of(page, dim):
    return lambda x: torch.zeros(*x.shape[:-2], page, dim, dtype=x.dtype)


def one_head(x):
    return x[:, :1]


def number(value):
    return lambda _: value


NOT_CACHES = [
    (bytes_of(torch.uint8), "got uint8"),
    (bytes_of(torch.float8_e5m2), "got float8_e5m2"),
    (bytes_of(torch.float8_e4m3fnuz), "got float8_e4m3fnuz"),
    (bytes_of(torch.int8), "got int8"),
    (to(torch.float16), "got float16"),
    (to(torch.float32), "got float32"),
    (to(torch.float64), "got float64"),
]

ATTEND = [
    ("q", to(torch.float16), "float32 or bfloat16.*got float16"),
    ("q", to(torch.float64), "got float64"),
    ("q", bytes_of(FP8), "got float8_e4m3fn"),
    ("q", flat, r"\[T, Hq, D\]"),
    ("q", deeper, r"\[T, Hq, D\]"),
    ("q", lambda x: x[..., :64], r"128.*got \[8, 8, 64\]"),
    ("q", gapped, "contiguous.*got stride 2"),
    ("q", crooked(0), "multiple of 16 bytes"),
    ("q", crooked(1), "multiple of 16 bytes"),
    ("q", shifted, "aligned to 16 bytes"),
    ("G = Hq / Hkv", ("q", lambda x: x[:, :6]), "1, 2, 4, 8 or 16.*got Hq = 6"),
    ("G = Hq / Hkv", ("q", lambda x: x[:, :1]), "got Hq = 1"),
    ("G = Hq / Hkv", ("q", lambda x: x.repeat(1, 8, 1)), "got Hq = 64"),
    ("G = Hq / Hkv", ("q", lambda x: x[:, :7]), "got Hq = 7"),
    *[("k_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("k_cache", flat, r"\[pages, Hkv, 128, D\]"),
    ("k_cache", lambda x: x[:, 0], r"\[pages, Hkv, 128, D\]"),
    ("k_cache", cache_of(64, D), r"128.*got \[\d+, 2, 64, 128\]"),
    ("k_cache", cache_of(16, D), r"128.*got \[\d+, 2, 16, 128\]"),
    ("k_cache", cache_of(256, D), r"128.*got \[\d+, 2, 256, 128\]"),
    ("k_cache", cache_of(BLOCK, 64), r"128.*got \[\d+, 2, 128, 64\]"),
    ("k_cache", cache_of(BLOCK, 192), r"128.*got \[\d+, 2, 128, 192\]"),
    ("k_cache", gapped, "contiguous.*got stride 2"),
    ("k_cache", crooked(0), "multiple of 16 bytes"),
    ("k_cache", crooked(1), "multiple of 16 bytes"),
    ("k_cache", crooked(2), "multiple of 16 bytes"),
    ("k_cache", shifted, "aligned to 16 bytes"),
    *[("v_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("v_cache", lambda x: x.to(FP8), "dtype of k_cache.*got float8_e4m3fn"),
    ("v_cache", one_head, r"\[pages, Hkv, 128, D\]"),
    ("v_cache", longer(0), r"\[pages, Hkv, 128, D\]"),
    ("v_cache", cache_of(64, D), r"got \[\d+, 2, 64, 128\]"),
    ("v_cache", gapped, "contiguous.*got stride 2"),
    ("v_cache", crooked(2), "multiple of 16 bytes"),
    ("v_cache", shifted, "aligned to 16 bytes"),
    ("k_scale", number(0.5), "None beside a bfloat16 k_cache"),
    ("k_scale", number(torch.ones(1)), "None beside a bfloat16 k_cache"),
    ("v_scale", number(torch.ones(2)), "None beside a bfloat16 v_cache"),
    ("out", to(torch.float16), "dtype of q.*got float16"),
    ("out", to(torch.float32), "dtype of q.*got float32"),
    ("out", shorter(0), r"\[T, Hq, D\]"),
    ("out", shorter(1), r"\[T, Hq, D\]"),
    ("out", flat, r"\[T, Hq, D\]"),
    ("out", gapped, "contiguous.*got stride 2"),
    ("out", crooked(0), "multiple of 16 bytes"),
    ("out", shifted, "aligned to 16 bytes"),
    ("out", overlapping, "without overlap"),
    ("lse", to(torch.float64), "float32.*got float64"),
    ("lse", to(torch.bfloat16), "float32.*got bfloat16"),
    ("lse", shorter(0), r"\[T, Hq\]"),
    ("lse", flat, r"\[T, Hq\]"),
    ("lse", overlapping, "without overlap"),
]

BATCH = [
    ("block_table", to(INT64), "int32.*got int64"),
    ("block_table", to(torch.float32), "int32.*got float32"),
    ("block_table", flat, r"\[B, max_pages\]"),
    ("block_table", longer(0), r"\[B, max_pages\]"),
    ("cu_seqlens_q", to(INT64), "int32.*got int64"),
    ("cu_seqlens_q", shorter(0), r"\[B \+ 1\]"),
    ("cu_seqlens_q", longer(0), r"\[B \+ 1\]"),
    ("cu_seqlens_q", deeper, r"\[B \+ 1\]"),
    ("seq_lens", to(INT64), "int32.*got int64"),
    ("seq_lens", deeper, r"\[B\]"),
]

IDS = [
    ("ids", to(torch.int16), "int32 or int64.*got int16"),
    ("ids", to(torch.uint32), "int32 or int64.*got (?i:uint32)"),
    ("ids", to(torch.float32), "int32 or int64.*got float32"),
    ("ids", flat, r"\[Hkv, T, K\]"),
    ("K, the last dimension of ids", ("ids", lambda x: x[..., :0]), "1 to 32.*got 0"),
    ("K, the last dimension of ids", ("ids", lambda x: x.repeat(1, 1, 3)[..., :33]), "got 33"),
]

IDS_OF_Q = [
    ("ids", lambda x: x.transpose(0, 1), r"\[Hkv, T, K\]"),
    ("ids", lambda x: x[:1], r"\[Hkv, T, K\]"),
    ("ids", shorter(1), r"\[Hkv, T, K\]"),
]

SCALES = [
    ("k_scale", to(torch.float64), "float32.*got float64"),
    ("k_scale", to(torch.bfloat16), "float32.*got bfloat16"),
    ("k_scale", longer(0), r"1 element or \[Hkv\] = \[2\].*got \[3\]"),
    ("k_scale", deeper, r"1 element or \[Hkv\]"),
    ("v_scale", longer(0), r"got \[3\]"),
    ("v_scale", to(torch.float64), "float32.*got float64"),
]

INDEX = [
    ("index_q", to(torch.float16), "float32 or bfloat16 or float8_e4m3fn.*got float16"),
    ("index_q", bytes_of(torch.float8_e5m2), "got float8_e5m2"),
    ("index_q", flat, r"\[T, Hi, Di\]"),
    ("index_q", lambda x: x[..., :64], r"got \[8, 2, 64\]"),
    ("index_q", gapped, "contiguous.*got stride 2"),
    ("index_q", crooked(0), "multiple of 16 bytes"),
    ("index_q", shifted, "aligned to 16 bytes"),
    *[("index_k_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("index_k_cache", lambda x: x.to(FP8), "dtype of index_q.*got float8_e4m3fn"),
    ("index_k_cache", lambda x: x[:, None], r"\[pages, 128, Di\]"),
    ("index_k_cache", cache_of(64, D), r"got \[\d+, 64, 128\]"),
    ("index_k_cache", cache_of(BLOCK, 64), r"got \[\d+, 128, 64\]"),
    ("index_k_cache", gapped, "contiguous.*got stride 2"),
    ("index_k_cache", crooked(0), "multiple of 16 bytes"),
    ("index_k_cache", crooked(1), "multiple of 16 bytes"),
    ("index_k_cache", shifted, "aligned to 16 bytes"),
]

RULE = [
    ("topk", number(0), "1 to 32.*got 0"),
    ("topk", number(33), "1 to 32.*got 33"),
    ("topk", number(-1), "1 to 32.*got -1"),
    ("topk", number(2**40), "1 to 32"),
    ("init_blocks", number(-1), "got -1"),
    ("init_blocks", number(17), "got 17"),
    ("local_blocks", number(-1), "got -1"),
    ("local_blocks", number(17), "got 17"),
    ("init_blocks + local_blocks", ("init_blocks", number(16)), "topk = 16.*got 17"),
]

IDS_OUT = [
    ("ids", ("out", to(INT64)), "int32.*got int64"),
    ("ids", ("out", shorter(2)), r"\[Hi, T, K\]"),
    ("ids", ("out", shorter(1)), r"\[Hi, T, K\]"),
    ("ids", ("out", lambda x: x.transpose(0, 1)), r"\[Hi, T, K\]"),
    ("ids", ("out", overlapping), "without overlap"),
]

SCORES_OUT = [
    ("scores", ("out", to(torch.bfloat16)), "float32.*got bfloat16"),
    ("scores", ("out", shorter(2)), r"\[Hi, T, max_pages\]"),
    ("scores", ("out", flat), r"\[Hi, T, max_pages\]"),
    ("scores", ("out", overlapping), "without overlap"),
]

TOPK = [
    ("scores", to(torch.bfloat16), "float32.*got bfloat16"),
    ("scores", to(torch.float64), "float32.*got float64"),
    ("scores", flat, r"\[Hi, T, blocks\]"),
    ("visible_blocks", to(INT64), "int32.*got int64"),
    ("visible_blocks", shorter(0), r"\[T\]"),
    ("visible_blocks", deeper, r"\[T\]"),
]

WRITE = [
    ("k", to(torch.float16), "float32 or bfloat16.*got float16"),
    ("k", bytes_of(FP8), "got float8_e4m3fn"),
    ("k", flat, r"\[T, Hkv, D\]"),
    ("k", gapped, "contiguous.*got stride 2"),
    ("k", crooked(0), "multiple of 16 bytes"),
    ("k", shifted, "aligned to 16 bytes"),
    ("v", to(torch.float16), "dtype of k.*got float16"),
    ("v", to(torch.float32), "dtype of k.*got float32"),
    ("v", shorter(0), r"\[T, Hkv, D\]"),
    ("v", shorter(1), r"\[T, Hkv, D\]"),
    ("v", gapped, "contiguous.*got stride 2"),
    ("index_k", to(torch.float16), "got float16"),
    ("index_k", shorter(0), r"\[T, Di\]"),
    ("index_k", lambda x: x[:, None], r"\[T, Di\]"),
    ("index_k", gapped, "contiguous.*got stride 2"),
    ("index_k_cache", number(None), "got None"),
    ("index_k_cache", ("index_k", number(None)), "None"),
    ("slot_mapping", to(INT32), "int64.*got int32"),
    ("slot_mapping", shorter(0), r"\[T\]"),
    ("slot_mapping", deeper, r"\[T\]"),
    *[("k_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("k_cache", one_head, r"\[pages, Hkv, 128, D\]"),
    ("k_cache", cache_of(64, D), r"got \[\d+, 2, 64, 128\]"),
    ("k_cache", cache_of(BLOCK, 64), r"got \[\d+, 2, 128, 64\]"),
    ("k_cache", gapped, "contiguous.*got stride 2"),
    ("k_cache", crooked(2), "multiple of 16 bytes"),
    ("k_cache", overlapping, "without overlap"),
    *[("v_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("v_cache", lambda x: x.to(FP8), "dtype of k_cache"),
    ("v_cache", longer(0), r"\[pages, Hkv, 128, D\]"),
    *[("index_k_cache", spoil, got) for spoil, got in NOT_CACHES],
    ("index_k_cache", longer(0), r"\[pages, 128, Di\]"),
    ("index_k_cache", cache_of(64, D), r"got \[\d+, 64, 128\]"),
    ("index_k_cache", crooked(1), "multiple of 16 bytes"),
    ("k_scale", number(0.5), "None beside a bfloat16 k_cache"),
    ("v_scale", number(torch.ones(2)), "None beside a bfloat16 v_cache"),
]

SCHEDULE = [
    ("max_blocks", number(-1), "got -1"),
    ("max_blocks", number(2**31), "got 2147483648"),
    ("max_queries_per_item", number(0), "from 1.*got 0"),
    ("max_queries_per_item", number(-64), "got -64"),
    ("Hkv * B * max_blocks", ("max_blocks", number(2**30)), r"got \d+ \* \d+ \* 1073741824"),
    ("cu_seqlens_q", to(INT64), "int32.*got int64"),
    ("cu_seqlens_q", shorter(0), r"\[B \+ 1\]"),
    ("seq_lens", to(INT64), "int32.*got int64"),
]

MERGE = [
    ("outs", to(torch.float16), "float32 or bfloat16.*got float16"),
    ("outs", bytes_of(FP8), "got float8_e4m3fn"),
    ("outs", lambda x: x[0], r"\[P, T, H, D\]"),
    ("outs", lambda x: x[..., :64], r"got \[3, 5, 4, 64\]"),
    ("outs", gapped, "contiguous.*got stride 2"),
    ("outs", crooked(1), "multiple of 16 bytes"),
    ("P, the first dimension of outs", ("outs", lambda x: x[:0]), "got 0"),
    ("lses", to(torch.float64), "float32.*got float64"),
    ("lses", to(torch.bfloat16), "float32.*got bfloat16"),
    ("lses", shorter(0), r"\[P, T, H\]"),
    ("lses", shorter(2), r"\[P, T, H\]"),
    ("out", to(torch.bfloat16), "dtype of outs.*got bfloat16"),
    ("out", shorter(0), r"\[T, H, D\]"),
    ("out", gapped, "contiguous.*got stride 2"),
    ("out", overlapping, "without overlap"),
    ("lse", to(torch.float64), "float32.*got float64"),
    ("lse", shorter(1), r"\[T, H\]"),
    ("lse", overlapping, "without overlap"),
]


def for_list(spoil):
    return lambda parts: [parts[0], spoil(parts[1]), *parts[2:]]


PARTS = [
    ("outs", for_list(to(torch.bfloat16)), "dtype of outs.*got bfloat16"),
    ("outs", for_list(shorter(0)), r"\[T, H, D\]"),
    ("outs", for_list(gapped), "contiguous.*got stride 2"),
    ("lses", for_list(to(torch.float64)), "float32.*got float64"),
    ("lses", for_list(shorter(1)), r"\[T, H\]"),
    ("lses", lambda parts: parts[:2], "3 tensors.*got 2 tensors"),
    ("outs", lambda parts: [], "got 0"),
    ("outs", lambda parts: parts * 6, "1 to 16.*got 18"),
]

MEDIA = [
    ("patches", to(torch.int8), "uint8.*got int8"),
    ("patches", to(torch.float32), "uint8.*got float32"),
    ("patches", deeper, r"\[rows, 3 \* frames \* patch \* patch\].*got \[1, 6, 1176\]"),
    ("patches", flat, r"got \[7056\]"),
    ("patches", shorter(1), "588 or 1176, got 1175"),
    ("patches", lambda x: x[:, :392], "588 or 1176, got 392"),
    ("patches", gapped, r"contiguous, strides \[1176, 1\], got strides \[2352, 2\]"),
    ("patches", lambda x: x.expand(2, 6, 1176)[:, 0], r"contiguous.*got strides \[0, 1\]"),
    ("patches", lambda x: torch.cat([x, x], 1)[:, :1176], r"got strides \[2352, 1\]"),
    ("patches", shifted, "aligned to 4 bytes, got an address 1 bytes past"),
    ("mean", lambda x: x[:2], "3 numbers, one a channel, got 2 numbers"),
    ("mean", lambda x: [*x, 0.5], "got 4 numbers"),
    ("mean", lambda x: [0.5, 1.5, 0.5], r"mean\[1\] must be from 0 to 1, got 1.5"),
    ("mean", lambda x: [0.5, 0.5, -0.1], r"mean\[2\].*got -0.1"),
    ("mean", lambda x: [float("nan"), 0.5, 0.5], r"mean\[0\].*got nan"),
    ("std", lambda x: x[:1], "got 1 numbers"),
    ("std", lambda x: [0.5, 0.0, 0.5], r"std\[1\] must be from 1e-06 to 1, got 0"),
    ("std", lambda x: [0.5, 0.5, float("inf")], r"std\[2\].*got inf"),
    ("std", lambda x: [float("nan"), 0.5, 0.5], r"std\[0\].*got nan"),
    ("std", lambda x: [0.5, -0.5, 0.5], "got -0.5"),
    ("patch", number(2), "from 4 to 128, got 2"),
    ("patch", number(130), "from 4 to 128, got 130"),
    ("patch", number(15), "even, got 15"),
    ("the second dimension of patches", ("patch", number(16)), "768 or 1536, got 1176"),
    ("temporal", number(0), "from 1 to 2, got 0"),
    ("temporal", number(3), "from 1 to 2, got 3"),
    ("the second dimension of patches", ("temporal", number(1)), "= 588, got 1176"),
    ("out", to(torch.float16), "float32 or bfloat16, got float16"),
    ("out", to(torch.float64), "float32 or bfloat16, got float64"),
    ("out", shorter(0), r"= \[6, 1176\], got \[5, 1176\]"),
    ("out", shorter(1), r"got \[6, 1175\]"),
    ("out", gapped, "contiguous.*got strides"),
    ("out", overlapping, "contiguous.*got strides"),
    ("out", shifted, "aligned to 16 bytes, got an address 4 bytes past"),
    ("dtype", number(torch.bfloat16), "that of out, torch.float32, got torch.bfloat16"),
]

MEDIA_DTYPE = [
    ("dtype", number(torch.float16), "float32 or bfloat16, got float16"),
    ("dtype", number(torch.float64), "float32 or bfloat16, got float64"),
    ("dtype", number(torch.uint8), "float32 or bfloat16, got uint8"),
]

VIEW_OUT = [
    ("page_table", to(INT64), "int32.*got int64"),
    ("page_table", shorter(0), r"\[T \* Hkv, K\] = \[16, 16\], got \[15, 16\]"),
    ("page_table", shorter(1), r"got \[16, 15\]"),
    ("page_table", flat, r"\[T \* Hkv, K\]"),
    ("page_table", overlapping, "without overlap"),
    ("kv_lens", to(torch.float32), "int32.*got float32"),
    ("kv_lens", longer(0), r"\[T \* Hkv\] = \[16\], got \[17\]"),
    ("kv_lens", overlapping, "without overlap"),
]

PAGED_BATCH = [
    ({"block_table": "page_table", "seq_lens": "kv_lens"}.get(name, name), spoil, text)
    for name, spoil, text in BATCH
]

TABLES = [
    ("write_cache", write_call, WRITE),
    ("write_cache", fp8_write_call, SCALES),
    ("index_score", score_call, INDEX + BATCH + SCORES_OUT),
    ("topk_blocks", topk_call, TOPK + RULE + IDS_OUT),
    ("select_blocks", select_call, INDEX + BATCH + RULE + IDS_OUT),
    ("kv_block_schedule", schedule_call, IDS + SCHEDULE),
    ("decode_view", view_call, IDS + BATCH + VIEW_OUT),
    ("sparse_prefill", attend_call, ATTEND + BATCH + IDS + IDS_OF_Q),
    ("sparse_prefill", fp8_attend_call, SCALES),
    ("sparse_decode", attend_call, ATTEND + BATCH + IDS + IDS_OF_Q),
    ("sparse_decode", fp8_attend_call, SCALES),
    ("paged_decode", paged_call, ATTEND + PAGED_BATCH),
    ("merge_lse", merge_call, MERGE),
    ("merge_lse", parts_call, PARTS),
    ("normalize_patches", media_call, MEDIA),
    ("normalize_patches", media_dtype_call, MEDIA_DTYPE),
]

ROWS = [
    pytest.param(op, build, *row, id=f"{op}-{build.__name__}-{index}-{row[0]}")
    for op, build, rows in TABLES
    for index, row in enumerate(rows)
]


def tensors_of(call):
    for value in call.values():
        yield from (x for x in (value if isinstance(value, list) else [value]))


@pytest.mark.parametrize("op,build,argument,spoil,text", ROWS)
def test_refused(op, build, argument, spoil, text):
    call = build()
    target, change = spoil if isinstance(spoil, tuple) else (argument, spoil)
    call[target] = change(call.get(target))
    tensors = [x for x in tensors_of(call) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    with pytest.raises(ValueError) as caught:
        getattr(msa_kernels, op)(**call)
    message = str(caught.value)
    start = rf"^msa\.{op}: (.*\b)?{re.escape(argument)}\W.* ?must be .+, got .+"
    assert re.match(start, message), message
    assert re.search(text, message), message
    for tensor, copy in zip(tensors, before, strict=True):
        assert same_bits(tensor, copy), "something was written before the refusal"


@pytest.mark.parametrize("op,build", sorted({(op, build.__name__) for op, build, _ in TABLES}))
def test_the_unspoiled_call_is_taken(op, build):
    getattr(msa_kernels, op)(**globals()[build]())


@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_decode"])
def test_ids_are_never_guessed_from_sizes(op):
    """[T, Hkv, K] ids with T = Hkv cannot be told from [Hkv, T, K]: they are taken as the
    latter."""
    case = make_case([(2, 5200)], padding_rows=0)
    function = getattr(msa_kernels, op)
    straight = function(*case.attend_args)
    turned = function(case.q, case.k_cache, case.v_cache, case.ids.transpose(0, 1), *case.batch)
    expected = msa_kernels.reference.sparse_attention(
        *case.with_(ids=case.ids.transpose(0, 1).contiguous()).attend_args
    )[0]
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(straight, turned)


@pytest.mark.parametrize(
    "spoil,text",
    [
        (lambda c: {"k_cache": c.k_cache[:, :, :64]}, r"k_cache must be \[pages, Hkv, 128, D\]"),
        (lambda c: {"v_cache": c.v_cache[..., :64]}, r"v_cache must be \[pages, Hkv, 128, D\]"),
        (lambda c: {"k_cache": c.k_cache.half()}, "k_cache must be float32.*got float16"),
        (lambda c: {"v_cache": c.v_cache.bfloat16()}, "v_cache must be torch.float32, the dtype"),
        (lambda c: {"k_cache": c.k_cache.mT}, r"last dimension of k_cache must be contiguous"),
        (lambda c: {"k_cache": c.k_cache[:, :1]}, r"ids must be \[Hkv, T, K\] = \[1, \*, \*\]"),
        (lambda c: {"k_cache": c.k_cache[0]}, r"k_cache must be \[pages, Hkv, 128, D\]"),
        (
            lambda c: {"k_cache": c.k_cache[:1, :1].expand_as(c.k_cache)},
            "k_cache must be of pages and heads in places of their own",
        ),
    ],
)
def test_decode_view_looks_at_the_caches(spoil, text):
    case = make_case("mixed", hq=4, hkv=2)
    call = {"k_cache": case.k_cache, "v_cache": case.v_cache, **spoil(case)}
    with pytest.raises(ValueError, match=rf"msa\.decode_view: (the )?{text}"):
        msa_kernels.decode_view(case.ids, *case.batch, **call)


def test_view_pages_fit_int32():
    case = make_case("mixed", hq=4, hkv=2)
    with pytest.raises(ValueError, match=r"msa\.decode_view: the last view page.*got 2147483650"):
        torch.ops.msa.decode_view(case.ids, *case.batch, 3, 2**30, 2)


def test_no_heads_are_refused():
    """Scales of no heads are no scales: reading one would read past the tensor."""
    caches = torch.zeros(2, 0, 128, 128, dtype=torch.float8_e4m3fn)
    rows = torch.zeros(3, 0, 128)
    with pytest.raises(ValueError, match=r"msa\.write_cache: Hkv.* must be from 1"):
        msa_kernels.write_cache(
            rows,
            rows,
            None,
            torch.zeros(3, dtype=torch.int64),
            caches,
            caches,
            None,
            k_scale=torch.zeros(0),
        )


@pytest.mark.parametrize("counts", [(0, 1), (5, 3), (-1, 0), (1, 1000), (1, -1)])
def test_decode_counts_that_cannot_be(counts):
    """Refused before anything is written."""
    case = make_case([(1, 300), (2, 200)], padding_rows=0)
    cache = msa_kernels.PagedCache(case.k_cache, case.v_cache, case.index_k_cache)
    before = case.k_cache.clone()
    case.slot_mapping[:] = 0
    batch = msa_kernels.Batch(*case.batch, case.slot_mapping, *counts)
    with pytest.raises(ValueError, match=r"msa\.msa_attention: batch\.num_decode.*got"):
        msa_kernels.msa_attention(case.q, case.k, case.v, case.index_q, case.index_k, cache, batch)
    assert torch.equal(case.k_cache.view(torch.int32), before.view(torch.int32))


OVERLOADS = [
    pytest.param(op, build, overload, id=f"{op}-{build.__name__}-{overload}")
    for op, build, _ in TABLES
    for overload in ("default", "out")
    if overload in getattr(torch.ops.msa, op).overloads()
    and build not in (parts_call, media_dtype_call)
]


@pytest.mark.parametrize("op,build,overload", OVERLOADS)
def test_none_where_a_tensor_must_be(op, build, overload):
    """torch hands None on as a tensor that is not there; read as one, it would end the process."""
    call = {"num_pages": 4, "page_step": 1, "head_step": 1, "dtype": torch.float32, **build()}
    operator = getattr(getattr(torch.ops.msa, op), overload)
    written = {"output": "out"} | ({"scores": "out"} if op == "index_score" else {})
    written |= {"ids": "out"} if op in ("topk_blocks", "select_blocks") else {}
    arguments = operator._schema.arguments
    source = {a.name: written.get(a.name, a.name) for a in arguments}
    given = {name: call[word] for name, word in source.items() if word in call}
    operator(**given)
    needed = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
    for name in needed if len(needed) > 1 else []:  # torch looks for a kernel by some tensor
        expected = rf"msa\.{op}: ({name}|{source[name]}) must be .*, got None"
        with pytest.raises(ValueError, match=expected):
            operator(**{**given, name: None})


def test_the_view_of_a_selection_needs_caches():
    for name in ("ids", "k_cache", "v_cache"):
        with pytest.raises(
            ValueError, match=rf"msa\.decode_view: {name} must be a tensor, got None"
        ):
            msa_kernels.decode_view(**{**view_call(), name: None})


def test_debug_finds_counts_that_are_wrong():
    case = make_case([(1, 300), (2, 200)], padding_rows=0)
    good = msa_kernels.Batch(*case.batch, case.slot_mapping, 1, 1)
    msa_kernels.debug.check_batch(good, 3)
    with pytest.raises(ValueError, match=r"num_decode_tokens must be cu_seqlens_q\[1\] = 1, got 2"):
        msa_kernels.debug.check_batch(good._replace(num_decode_tokens=2), 3)
    with pytest.raises(ValueError, match="cu_seqlens_q must begin with 0"):
        msa_kernels.debug.check_batch(good, 2)
    for requests in (-1, 3):
        with pytest.raises(ValueError, match="num_decode_requests must be from 0 to 2, got"):
            msa_kernels.debug.check_batch(good._replace(num_decode_requests=requests), 3)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be \[B \+ 1\] = \[2\], got \[3\]"):
        msa_kernels.debug.check_batch(good._replace(seq_lens=good.seq_lens[:1]), 3)
    with pytest.raises(ValueError, match="expected at least 2 for request 1, got 1"):
        msa_kernels.debug.check_batch(good._replace(seq_lens=torch.tensor([300, 1]).int()), 3)


def test_merge_takes_two_tensors_or_two_lists():
    outs, lses = torch.zeros(2, 3, 4, 128), torch.zeros(2, 3, 4)
    for wrong in ((outs, list(lses)), (list(outs), lses), ([], [])):
        with pytest.raises(ValueError, match=r"msa\.merge_lse: outs"):
            msa_kernels.merge_lse(*wrong)
    with pytest.raises(ValueError, match=r"msa\.merge_lse: outs\[1\] must be .*got \[2, 4, 128\]"):
        msa_kernels.merge_lse([outs[0], outs[1, :2]], list(lses))


def test_nine_dimensions_name_the_operator():
    case = make_case("mixed")
    q = case.q.view(*case.q.shape[:2], *[1] * 6, 128)
    with pytest.raises(ValueError, match=r"msa\.sparse_prefill: q must be \[T, Hq, D\]"):
        msa_kernels.sparse_prefill(q, *case.attend_args[1:])


@pytest.mark.parametrize("strides", [(4, 4, 1), (0, 128, 1), (512, 64, 1)])
def test_outputs_that_overlap(strides):
    case = make_case("mixed", hq=4)
    out = torch.zeros(case.q.size(0) * 600).as_strided(case.q.shape, strides)
    with pytest.raises(ValueError, match="out must be writable without overlap"):
        msa_kernels.sparse_prefill(*case.attend_args, out=out)


OUTPUTS = [
    ("index_score", score_call, {"out": "scores"}),
    ("topk_blocks", topk_call, {"out": "ids"}),
    ("select_blocks", select_call, {"out": "ids"}),
    ("decode_view", view_call, {"page_table": "page_table", "kv_lens": "kv_lens"}),
    ("sparse_prefill", attend_call, {"out": "out", "lse": "lse"}),
    ("sparse_decode", fp8_attend_call, {"out": "out", "lse": "lse"}),
    ("paged_decode", paged_call, {"out": "out", "lse": "lse"}),
    ("merge_lse", merge_call, {"out": "out", "lse": "lse"}),
    ("normalize_patches", media_call, {"out": "out"}),
]


def shared_pairs():
    """(operator, call, output, its name in messages, tensor beside it)"""
    for op, build, outputs in OUTPUTS:
        beside = [name for name, value in build().items() if isinstance(value, torch.Tensor)]
        if op == "decode_view":  # which sees its caches' strides alone
            beside = [name for name in beside if not name.endswith("cache")]
        for out, name in outputs.items():
            for other in beside:
                if other != out:
                    yield pytest.param(op, build, out, name, other, id=f"{op}-{out}-{other}")


def in_one_buffer(first, second, second_begin):
    """Copies of two tensors, contiguous, the second from byte `second_begin` on."""
    sizes = [x.numel() * x.element_size() for x in (first, second)]
    buffer = torch.zeros(max(sizes[0], second_begin + sizes[1]) + 16, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 16 :]
    copies = []
    for x, begin, size in zip((first, second), (0, second_begin), sizes, strict=True):
        copies.append(buffer[begin : begin + size].view(x.dtype).view(x.shape))
        copies[-1].view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return copies


@pytest.mark.parametrize("op,build,out,name,other", list(shared_pairs()))
def test_outputs_in_memory_of_other_tensors(op, build, out, name, other):
    """An output that begins in an input, or in another output, is refused; behind it, it is
    taken."""
    call = build()
    getattr(msa_kernels, op)(**call)
    unwritten = torch.full_like(call[out], -7)
    size = call[other].numel() * call[other].element_size()
    within, behind = (size - 1) // 16 * 16, -(-size // 16) * 16

    shared = dict(call)
    shared[other], shared[out] = in_one_buffer(call[other], unwritten, within)
    before = [x.clone() for x in shared.values() if isinstance(x, torch.Tensor)]
    with pytest.raises(ValueError) as caught:
        getattr(msa_kernels, op)(**shared)
    message = rf"msa\.{op}: (\w+) must be in memory that (\w+) does not use, got memory of both"
    match = re.fullmatch(message, str(caught.value))
    assert match, caught.value
    assert name in match.groups()
    after = [x for x in shared.values() if isinstance(x, torch.Tensor)]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))

    apart = dict(call)
    apart[other], apart[out] = in_one_buffer(call[other], unwritten, behind)
    getattr(msa_kernels, op)(**apart)
    assert same_bits(apart[out], call[out])


def test_outputs_side_by_side_in_one_tensor():
    """Interleaved, without an element in common: taken. One column is both's: refused."""
    call = view_call()
    expected = msa_kernels.decode_view(**call)
    rows, topk = call["page_table"].shape
    both = torch.full((rows, topk + 1), -7, dtype=INT32)
    call["page_table"], call["kv_lens"] = both[:, :topk], both[:, topk]
    msa_kernels.decode_view(**call)
    assert torch.equal(both, torch.cat([expected.page_table, expected.kv_lens[:, None]], 1))
    call["kv_lens"] = both[:, topk - 1]
    with pytest.raises(
        ValueError, match=r"msa\.decode_view: kv_lens must be in memory that page_table does not"
    ):
        msa_kernels.decode_view(**call)


@pytest.mark.parametrize("name", ["v_cache", "index_k_cache"])
def test_caches_in_memory_of_each_other(name):
    call = write_call()
    before = call["k_cache"].clone()
    call[name] = call["k_cache"] if name == "v_cache" else call["k_cache"][:, 0]
    with pytest.raises(
        ValueError, match=rf"msa\.write_cache: {name} must be in memory that k_cache does not use"
    ):
        msa_kernels.write_cache(**call)
    assert same_bits(call["k_cache"], before)


@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_decode"])
def test_rows_of_the_remap_fit_int32(op):
    """A table so wide that (head, request, block) cannot be numbered; it takes no memory."""
    case = make_case([(2, 300), (1, 5)])
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(2, 2**30)
    with pytest.raises(
        ValueError, match=rf"msa\.{op}: Hkv \* B \* max_blocks must be.*got \d+ \* 2 \* 1073741824"
    ):
        getattr(msa_kernels, op)(*case.with_(block_table=wide).attend_args)


@pytest.mark.parametrize("op", ["index_score", "select_blocks"])
@pytest.mark.parametrize("pages", [2**31, 2**24, 2**24 - 3])
def test_units_of_scores_can_be_counted(op, pages):
    """(tile, block) pairs are numbered by 32 bits; no table is too wide for one request."""
    requests = 256 if pages >= 2**24 else 300
    case = make_case([(1, 300)] * requests, hq=1, hkv=1)
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(requests, pages)
    index_q, cache, _, *lengths = case.index_args
    got = rf"got \({requests} \+ 1\) \* \({pages} \+ 2\)"
    with pytest.raises(
        ValueError,
        match=rf"msa\.{op}: \(B \+ 1\) \* \(max_pages \+ 2\) must be below 2\^32.*{got}",
    ):
        getattr(msa_kernels, op)(index_q, cache, wide, *lengths)


@pytest.mark.parametrize("requests,pages", [(1, 2**40), (254, 2**24)])
def test_wide_tables_whose_units_can_be_counted(requests, pages):
    case = make_case([(1, 300)] * requests, hq=1, hkv=1, padding_rows=0)
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(requests, pages)
    index_q, cache, _, *lengths = case.index_args
    ids = msa_kernels.select_blocks(index_q, cache, wide, *lengths)
    assert torch.equal(ids[..., :4], torch.tensor([0, 1, 2, -1]).expand(1, requests, 4))


def test_rows_of_a_selection_fit_int32():
    scores = torch.zeros(1, 1, 20).expand(2, 2**30, 20)
    visible = torch.zeros(1, dtype=torch.int32).expand(2**30)
    with pytest.raises(
        ValueError, match=r"msa\.topk_blocks: Hi \* T.* must be at most 2147483647.*2 \* 1073741824"
    ):
        msa_kernels.topk_blocks(scores, visible)


def test_a_row_is_a_token_without_cu_seqlens():
    call = paged_call()
    call["cu_seqlens_q"] = None
    with pytest.raises(ValueError, match=r"msa\.paged_decode: kv_lens must be \[T\].*got \[2\]"):
        msa_kernels.paged_decode(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("op,build,rows", TABLES)
def test_mixed_devices(op, build, rows, request):
    """Any one tensor on another device is refused, whichever it is."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain = build()
    tensors = [name for name, value in plain.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        value = plain[name]
        if len(tensors) == 1 or (name.endswith("scale") and value.numel() == 1):
            continue  # nothing to differ from; a number on any device
        call = dict(plain)
        call[name] = value.cuda()
        with pytest.raises((ValueError, RuntimeError), match=rf"msa\.{op}|device"):
            getattr(msa_kernels, op)(**call)
