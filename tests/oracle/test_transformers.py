"""The released model's own attention against the reference functions and against the operators.

A `MiniMaxM3VLAttention` layer of transformers (eager, FP32, random weights) runs each request
alone. Here the requests of a step run together, on paged caches with permuted block tables and
poison around. Both must select the same blocks and give the same attention output.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from msa_kernels import reference
from tests.inputs import BLOCK, D, make_caches, make_index_cache
from tests.tolerance import assert_close, assert_ids, attention_floor

m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
transformers = pytest.importorskip("transformers")

HIDDEN = 64


@dataclasses.dataclass
class Oracle:
    """One attention layer of the released architecture, with hooks on what it selects and
    attends."""

    hq: int
    hkv: int
    seed: int = 0

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.config = m3.MiniMaxM3VLTextConfig(
            hidden_size=HIDDEN,
            num_attention_heads=self.hq,
            num_key_value_heads=self.hkv,
            head_dim=D,
            index_n_heads=self.hkv,
            index_head_dim=D,
            num_hidden_layers=1,
            layer_types=["minimax_m3_sparse"],
            mlp_layer_types=["dense"],
            vocab_size=8,
            pad_token_id=0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
            max_position_embeddings=1 << 16,
        )
        self.config._attn_implementation = "eager"
        self.rotary = m3.MiniMaxM3VLRotaryEmbedding(self.config)
        self.layer = m3.MiniMaxM3VLAttention(self.config, 0).eval()
        for name, parameter in self.layer.named_parameters():
            std = 0.3 if "norm" in name else HIDDEN**-0.5
            torch.nn.init.normal_(parameter, std=std)
        self.seen: dict[str, Tensor] = {}
        self.layer.indexer.register_forward_hook(
            lambda module, args, output: self.seen.__setitem__("ids", output)
        )
        self.layer.o_proj.register_forward_pre_hook(
            lambda module, args: self.seen.__setitem__("out", args[0])
        )

    def project(self, hidden: Tensor, position: Tensor) -> dict[str, Tensor]:
        """q, k, v, index_q, index_k [tokens, heads, D] of hidden [tokens, HIDDEN], by the layer's
        own modules."""
        layer, indexer = self.layer, self.layer.indexer
        cos, sin = self.rotary(hidden[None], position[None])

        def heads(x: Tensor, norm=None) -> Tensor:
            x = x.view(1, len(hidden), -1, D)
            return (x if norm is None else norm(x)).transpose(1, 2)

        q, k = m3.apply_rotary_pos_emb(
            heads(layer.q_proj(hidden), layer.q_norm),
            heads(layer.k_proj(hidden), layer.k_norm),
            cos,
            sin,
        )
        index_q, index_k = m3.apply_rotary_pos_emb(
            heads(indexer.q_proj(hidden), indexer.q_norm),
            heads(indexer.k_proj(hidden), indexer.k_norm),
            cos,
            sin,
        )
        v = heads(layer.v_proj(hidden))
        names = ("q", "k", "v", "index_q", "index_k")
        parts = (q, k, v, index_q, index_k)
        return {n: x[0].transpose(0, 1) for n, x in zip(names, parts, strict=True)}

    def run(self, hidden: Tensor, seq_len: int, steps: list[int]) -> tuple[Tensor, Tensor]:
        """(ids [Hi, tokens, n], out [tokens, Hq * D]) of the last sum(steps) tokens, step by step.

        The tokens before them enter the cache without attention, which they do not depend on in one
        layer.
        """
        cache = transformers.DynamicCache(config=self.config)
        start = seq_len - sum(steps)
        if start:
            old = self.project(hidden[:start], torch.arange(start))
            k, v, index_k = (old[n].transpose(0, 1)[None] for n in ("k", "v", "index_k"))
            cache.update(k, v, 0)
            cache.layers[0].update_index(index_k)
        ids, outs = [], []
        for step in steps:
            position = torch.arange(start, start + step)[None]
            x = hidden[None, start : start + step]
            self.layer(x, self.rotary(x, position), None, cache=cache, position_ids=position)
            found = self.seen["ids"][0]
            ids.append(torch.nn.functional.pad(found, (0, 64 - found.size(-1)), value=-1))
            outs.append(self.seen["out"][0])
            start += step
        return torch.cat(ids, dim=1), torch.cat(outs)


def run_reference(new: dict[str, Tensor], caches, batch) -> tuple[Tensor, Tensor]:
    block_table, cu_seqlens_q, seq_lens, slot_mapping = batch
    reference.write_cache(new["k"], new["v"], new["index_k"][:, 0], slot_mapping, *caches)
    lengths = (block_table, cu_seqlens_q, seq_lens)
    ids = reference.select_blocks(new["index_q"], caches[2], *lengths)
    out, _ = reference.sparse_prefill(new["q"], *caches[:2], ids, *lengths)
    return ids, out


def run_operators(
    new: dict[str, Tensor], caches, batch, decode_requests: int = 0, decode_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    import msa_kernels

    block_table, cu_seqlens_q, seq_lens, slot_mapping = batch
    step = msa_kernels.Batch(
        block_table, cu_seqlens_q, seq_lens, slot_mapping, decode_requests, decode_tokens
    )
    index_k = new["index_k"][:, 0]
    out = msa_kernels.msa_attention(
        new["q"], new["k"], new["v"], new["index_q"], index_k, msa_kernels.PagedCache(*caches), step
    )
    ids = msa_kernels.select_blocks(new["index_q"], caches[2], block_table, cu_seqlens_q, seq_lens)
    return ids, out


def all_decode(new, caches, batch):
    return run_operators(new, caches, batch, batch[2].size(0), new["q"].size(0))


IMPLEMENTATIONS = [
    pytest.param(run_reference, id="reference"),
    pytest.param(run_operators, id="operators-prefill"),
    pytest.param(all_decode, id="operators-decode"),
]


def check(oracle: Oracle, implementation, requests: list[tuple[int, list[int]]], seed: int = 0):
    """requests: (tokens after the last step, tokens of each step). Every step of all runs as one
    batch."""
    torch.manual_seed(1000 + seed)
    num_steps = max(len(steps) for _, steps in requests)
    assert all(len(steps) == num_steps for _, steps in requests)
    pages = sum(-(-seq_len // BLOCK) for seq_len, _ in requests) + 4
    free = (torch.randperm(pages - 2) + 1).tolist()
    width = max(-(-seq_len // BLOCK) for seq_len, _ in requests) + 1
    table = torch.full((len(requests), width), 2**31 - 1, dtype=torch.int32)
    for request, (seq_len, _) in enumerate(requests):
        for block in range(-(-seq_len // BLOCK)):
            table[request, block] = free.pop()
    k_cache, v_cache, _ = make_caches("nhd_kv", pages, oracle.hkv, torch.float32, "nan")
    index_k_cache, _ = make_index_cache(pages, torch.float32, "nan")
    caches = (k_cache, v_cache, index_k_cache)

    hidden = [torch.randn(seq_len, HIDDEN) for seq_len, _ in requests]
    with torch.no_grad():
        expected = [
            oracle.run(x, seq_len, steps)
            for x, (seq_len, steps) in zip(hidden, requests, strict=True)
        ]
        projected = [oracle.project(x, torch.arange(len(x))) for x in hidden]

    def slots(request: int, begin: int, end: int) -> Tensor:
        token = torch.arange(begin, end)
        return table[request, token // BLOCK].long() * BLOCK + token % BLOCK

    for request, (seq_len, steps) in enumerate(requests):  # what was in the cache before
        start = seq_len - sum(steps)
        old = {name: x[:start] for name, x in projected[request].items()}
        reference.write_cache(
            old["k"], old["v"], old["index_k"][:, 0], slots(request, 0, start), *caches
        )

    done = [0] * len(requests)
    for step in range(num_steps):
        begins = [n - sum(steps) + done[r] for r, (n, steps) in enumerate(requests)]
        counts = [steps[step] for _, steps in requests]
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        spans = list(zip(range(len(requests)), begins, ends, strict=True))
        new = {
            name: torch.cat([projected[r][name][begin:end] for r, begin, end in spans])
            for name in projected[0]
        }
        cu_seqlens_q = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        slot_mapping = torch.cat([slots(*span) for span in spans])
        ids, out = implementation(new, caches, (table, cu_seqlens_q, seq_lens, slot_mapping))

        for request, (first, last) in enumerate(
            zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)
        ):
            rows = slice(done[request], done[request] + counts[request])
            want_ids, want_out = (expected[request][0][:, rows], expected[request][1][rows])
            what = f"step {step}, request {request} of {requests[request]}"
            where = dict(keys=projected[request], begin=begins[request])
            _check_ids(ids[:, first:last], want_ids, new["index_q"][first:last], where, what)
            _check_out(
                out[first:last], want_out, new, caches, ids, first, last, table, ends, request, what
            )
            done[request] += counts[request]


def _check_ids(ids: Tensor, want: Tensor, index_q: Tensor, where: dict, what: str) -> None:
    """The same sets: transformers lists them by score, the operators by id."""
    keys = where["keys"]["index_k"][:, 0].double()
    count = where["begin"] + index_q.size(0)
    keys = keys[:count]
    products = torch.einsum("thd,sd->hts", index_q.double(), keys)
    position = torch.arange(where["begin"], count)
    products.masked_fill_(torch.arange(count) > position[:, None], float("-inf"))
    blocks = -(-count // BLOCK)
    products = torch.nn.functional.pad(products, (0, blocks * BLOCK - count), value=float("-inf"))
    scores = products.unflatten(-1, (blocks, BLOCK)).amax(-1)
    far = 1 << 20
    want = want.masked_fill(want < 0, far).sort(dim=-1).values
    want = want.masked_fill(want == far, -1)[..., : ids.size(-1)].int()
    slack = (
        2
        * D
        * torch.finfo(torch.float32).eps
        * float(index_q.norm(dim=-1).max() * keys.norm(dim=-1).max())
    )
    assert_ids(ids, want, scores, slack, what)


def _check_out(out, want, new, caches, ids, first, last, table, ends, request, what) -> None:
    """transformers is the FP32 PyTorch whose error the policy doubles; the exact result is
    FP64's."""
    count = last - first
    exact, exact_lse = reference.sparse_prefill(
        new["q"][first:last],
        *caches[:2],
        ids[:, first:last],
        table[request : request + 1],
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([ends[request]], dtype=torch.int32),
        compute_dtype=torch.float64,
    )
    baseline = want.view(count, -1, D)
    # The exact result is of our caches and our selection, so it must itself be the model's.
    torch.testing.assert_close(
        exact.float(), baseline, rtol=1e-4, atol=2e-5, msg=lambda m: f"{what}: {m}"
    )
    assert_close(out, exact, baseline, what, attention_floor(exact, exact_lse))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hq,hkv", [(16, 1), (16, 2), (8, 2)], ids=["G16", "G8", "G4"])
def test_prefill(implementation, hq, hkv):
    """Whole prompts, around every multiple of 128 up to a few blocks."""
    lengths = [1, 2, 127, 128, 129, 255, 256, 257, 383, 384, 385, 513]
    check(Oracle(hq, hkv), implementation, [(n, [n]) for n in lengths])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hq,hkv", [(16, 1), (16, 2), (8, 2)], ids=["G16", "G8", "G4"])
def test_chunked_prefill(implementation, hq, hkv):
    """Three chunks a request: below, around and above 16 blocks, and past 40."""
    requests = [
        (128, [1, 63, 64]),
        (520, [129, 128, 127]),
        (2050, [7, 130, 129]),
        (2177, [65, 64, 1]),
        (5250, [40, 90, 35]),
    ]
    check(Oracle(hq, hkv), implementation, requests)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hq,hkv", [(16, 1), (16, 2), (8, 2)], ids=["G16", "G8", "G4"])
def test_decode(implementation, hq, hkv):
    """Two single tokens, then a verify step of 4, each across or at a boundary somewhere."""
    lengths = [6, 128, 129, 130, 257, 2048, 2049, 2052, 2178, 5121, 5631]
    check(Oracle(hq, hkv), implementation, [(n, [1, 1, 4]) for n in lengths])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2])
def test_mixed_batch(implementation):
    """Decode, verify and prefill requests of one step."""
    requests = [(2049, [1]), (131, [4]), (5200, [1]), (300, [300]), (2300, [150])]
    check(Oracle(16, 2), implementation, requests, seed=3)


def test_mixed_batch_split_between_paths():
    """The first three requests take the decode path and the others the prefill path."""

    def split(new, caches, batch):
        return run_operators(new, caches, batch, decode_requests=3, decode_tokens=6)

    requests = [(2049, [1]), (131, [4]), (5200, [1]), (300, [300]), (2300, [150])]
    check(Oracle(16, 2), split, requests, seed=3)
