"""Adaptors: the same inputs and semantics, whatever a peer calls them; with made-up peers."""

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from bench import check, peers
from bench.inputs import D, Inputs, Shape
from bench.peers.base import module, stand_ins
from bench.peers.flashinfer import FlashInfer
from bench.peers.sglang import Sglang
from bench.peers.vllm import Vllm
from msa_kernels import reference

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "topk": 4}
PREFILL = Shape((18, 5), (900, 300), **HEADS)
DECODE = Shape((2, 2), (900, 300), **HEADS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_plain_torch_equals_the_reference(shape, dtype):
    inputs = Inputs(shape, dtype)
    peer = peers.load("torch")

    def answer(op):
        call = peer.prepare(op, inputs)
        return call.answer(call.run())

    batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    expected = reference.index_score(inputs.index_q, inputs.index_k_cache, *batch)
    torch.testing.assert_close(answer("index_score"), expected)
    chosen = reference.select_blocks(inputs.index_q, inputs.index_k_cache, *batch, shape.topk)
    assert torch.equal(answer("select_blocks"), chosen)
    assert check.attention(inputs, answer("sparse_prefill")).ok
    ids, out = answer("msa_prefill")
    assert torch.equal(ids, chosen) and check.attention(inputs, out, ids).ok
    assert check.merged(inputs, answer("merge_lse")).ok
    assert check.topk(inputs, answer("topk_blocks")).ok
    answer("write_cache")
    assert check.written(inputs).ok
    assert not check.written(inputs).ok  # looking wiped it


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["torch", "host"])
def test_pixels_by_others(name, dtype):
    inputs = Inputs(PREFILL, dtype)
    for op, patches in (
        ("normalize_patches", inputs.patches),
        ("normalize_image_patches", inputs.image_patches),
    ):
        call = peers.load(name).prepare(op, inputs)
        out = call.answer(call.run())
        assert call.on_host == (name == "host")
        assert check.normalized(inputs, patches, out).ok
        out[0, -1] += 40 * out[0].abs().max()
        assert not check.normalized(inputs, patches, out).ok
    with pytest.raises(peers.CannotRun):
        peers.load("host").prepare("merge_lse", inputs)


@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_dense_attends_to_everything(shape):
    inputs = Inputs(shape)
    op = "sparse_decode" if shape is DECODE else "sparse_prefill"
    call = peers.load("dense").prepare(op, inputs)
    out = call.answer(call.run())
    assert call.dense and check.dense_attention(inputs, out).ok
    assert not check.attention(inputs, out).ok  # the selection leaves blocks out
    with pytest.raises(peers.CannotRun, match="FP8"):
        peers.load("dense").prepare(op, Inputs(shape, "fp8"))


class FakeVllm:
    """Functions with the names and arguments of the real ones, computing by the reference."""

    @staticmethod
    def minimax_m3_index_score(q, cache, table, cu, lens, prefix, max_q, max_k, heads):
        assert (prefix == lens - cu.diff()).all() and heads == q.size(1)
        assert max_q == int(cu.diff().max()) and max_k == int(lens.max())
        scores = reference.index_score(q, cache, table, cu, lens)
        # Theirs is wider than the table, and anything stands where nothing is visible.
        wide = torch.full((*scores.shape[:2], scores.size(2) + 3), 7.0)
        wide[..., : scores.size(2)] = scores.masked_fill(scores.isinf(), 9.0)
        return wide

    @staticmethod
    def minimax_m3_index_topk(score, cu, prefix, max_q, topk, init, local):
        assert (init, local) == (0, 1)
        visible = reference.token_positions(cu, prefix + cu.diff(), score.size(1)).visible
        return reference.topk_blocks(score, visible, topk).flip(-1)  # order is of no meaning

    @staticmethod
    def minimax_m3_index_decode(q, cache, table, lens, max_k, topk, init, local, heads, n, most):
        cu = torch.arange(0, q.size(0) + 1, n, dtype=torch.int32)
        assert len(cu) == len(lens) + 1 and most >= n
        return reference.select_blocks(q, cache, table, cu, lens, topk)

    @staticmethod
    def minimax_m3_sparse_attn(
        q, kv, ids, table, cu, lens, prefix, most, heads, scale, out, k_scale=None, v_scale=None
    ):
        assert kv.shape[1:] == (heads, 128, 2 * D)
        args = (q, kv[..., :D], kv[..., D:], ids, table, cu, lens)
        out.copy_(
            reference.sparse_attention(*args, scale=scale, k_scale=k_scale, v_scale=v_scale)[0]
        )

    @classmethod
    def minimax_m3_sparse_attn_decode(cls, q, kv, ids, table, lens, heads, scale, out, n, *scales):
        cu = torch.arange(0, q.size(0) + 1, n, dtype=torch.int32)
        cls.minimax_m3_sparse_attn(q, kv, ids, table, cu, lens, None, n, heads, scale, out, *scales)


class FakeSglang:
    """The same for SGLang: pools of slots, a table of slots, a token a request at decode."""

    @staticmethod
    def _paged(slots, request):
        pages = slots[request.long()][:, ::128] // 128
        return pages

    @classmethod
    def flash_prefill_with_topk_index(
        cls, *, q, k_cache, req_to_token, cu_seqlens, seq_lens, topk, **rest
    ):
        assert rest["disable_index_value"] and (rest["init_blocks"], rest["local_blocks"]) == (0, 1)
        assert (
            rest["all_seqblock_q"] == q.size(0) and rest["max_seqblock_q"] == rest["max_seqlen_q"]
        )
        table = cls._paged(req_to_token, rest["slot_ids"])
        cache = k_cache.view(-1, 128, D)
        return None, reference.select_blocks(q, cache, table, cu_seqlens, seq_lens, topk)

    @classmethod
    def flash_decode_with_topk_idx(
        cls, *, q, k_cache, req_to_token, seq_lens, slot_ids, topk, **rest
    ):
        cu = torch.arange(q.size(0) + 1, dtype=torch.int32)
        table = cls._paged(req_to_token, slot_ids)
        ids = reference.select_blocks(q, k_cache.view(-1, 128, D), table, cu, seq_lens, topk)
        return None, ids, None

    @classmethod
    def flash_prefill_with_gqa_share_sparse(
        cls, *, q, k_cache, v_cache, req_to_token, slot_ids, topk_idx, cu_seqlens, seq_lens, **rest
    ):
        k, v = (c.view(-1, 128, c.size(1), D).transpose(1, 2) for c in (k_cache, v_cache))
        table = cls._paged(req_to_token, slot_ids)
        args = (q, k, v, topk_idx, table, cu_seqlens, seq_lens)
        return reference.sparse_attention(*args)[0].to(q.dtype)

    @classmethod
    def flash_decode_with_gqa_share_sparse(cls, *, q, seq_lens, **rest):
        cu = torch.arange(q.size(0) + 1, dtype=torch.int32)
        return cls.flash_prefill_with_gqa_share_sparse(
            q=q, seq_lens=seq_lens, cu_seqlens=cu, **rest
        )


class FakeFlashInfer:
    """The same for FlashInfer: scores first, [heads, blocks, tokens]; ids token-major, scales 1."""

    @staticmethod
    def msa_proxy_score(q, k, cu, *, page_table, seqused_k, causal, max_seqlen_q, max_k_tiles):
        assert causal and k.size(1) == 1 and max_seqlen_q == int(cu.diff().max())
        scores = reference.index_score(q, k[:, 0], page_table, cu, seqused_k)
        assert scores.size(2) == max_k_tiles
        return scores.transpose(1, 2).contiguous()

    @staticmethod
    def msa_topk_select(scores, topk, *, num_valid_pages, output, force_end_blocks):
        assert scores.is_contiguous() and force_end_blocks == 1
        ids = reference.topk_blocks(scores.transpose(1, 2), num_valid_pages, topk)
        return output.copy_(ids.transpose(0, 1))

    @staticmethod
    def msa_sparse_attention(q, k, v, ids, cu, *, page_table, seqused_k, causal):
        assert causal and k.stride(2) == 2 * D and ids.is_contiguous()
        return reference.sparse_attention(q, k, v, ids, page_table, cu, seqused_k)[0].to(q.dtype)

    @classmethod
    def msa_sparse_decode_attention(cls, q, k, v, ids, *, seqlen_q, **rest):
        cu = torch.arange(0, q.size(0) + 1, seqlen_q, dtype=torch.int32)
        return cls.msa_sparse_attention(q, k, v, ids, cu, **rest)


FAKES = {
    "flashinfer": lambda: FlashInfer(FakeFlashInfer, "0"),
    "vllm": lambda: Vllm(FakeVllm, FakeVllm, "0"),
    "sglang": lambda: Sglang(*[FakeSglang] * 4, version="0"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", FAKES)
def test_adaptors_pass_the_same_inputs(name, phase, dtype):
    from bench.operators import OPERATORS

    inputs = Inputs(PREFILL if phase == "prefill" else DECODE, dtype)
    ops = ["select_blocks", f"sparse_{phase}", f"msa_{phase}"]
    ops += ["index_score"] if name == "vllm" else []
    for op in ops:
        call = FAKES[name]().prepare(op, inputs)
        verdict = OPERATORS[op].check(inputs, call.answer(call.run()))
        assert verdict.ok, f"{op}: {verdict.message}"


@pytest.mark.parametrize("name", FAKES)
def test_what_a_peer_cannot_run_is_said(name):
    peer = FAKES[name]()
    with pytest.raises(peers.CannotRun, match="no kernel of its own for merge_lse"):
        peer.prepare("merge_lse", Inputs(DECODE))
    if name != "flashinfer":  # says itself what it does not take, when it is called
        with pytest.raises(peers.CannotRun, match="float32"):
            peer.prepare("sparse_decode", Inputs(DECODE, "float32"))
    with pytest.raises(peers.CannotRun, match="as many query tokens"):
        peer.prepare("sparse_decode", Inputs(PREFILL))


def test_missing_peers_say_why(tmp_path, monkeypatch):
    monkeypatch.delenv(peers.ENVIRONMENT, raising=False)
    with pytest.raises(peers.CannotRun, match="no peer is called"):
        peers.load("cudnn")
    for name in ("vllm", "sglang", "flashinfer"):
        with pytest.raises(peers.CannotRun):
            peers.load(name, tmp_path)


def test_flashinfer_unpacked_is_imported_without_its_init(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", None)
    monkeypatch.delitem(sys.modules, "flashinfer.msa_ops")
    unpack(tmp_path, "flashinfer/__init__.py", "raise AssertionError('imports everything')")
    unpack(tmp_path, "flashinfer/msa_ops/__init__.py", "from ..utils import NUMBER")
    unpack(tmp_path, "flashinfer/utils.py", "NUMBER = 7")
    source = "def _cute_prefill_preferred(*_): return True"
    unpack(tmp_path, "flashinfer/msa_ops/_sm90_dispatch.py", source)
    (tmp_path / "flashinfer_python-9.8.7.dist-info").mkdir()
    for _ in range(2):
        peer = peers.load("flashinfer", tmp_path)
        assert peer.version == "9.8.7" and peer.ops.NUMBER == 7
        assert "CUDA programs" in peer.note  # no CuTe DSL here
        assert not peer.ops._sm90_dispatch._cute_prefill_preferred()
    unpack(tmp_path, "flashinfer/msa_ops/__init__.py", "from ..utils import no_such_thing")
    monkeypatch.delitem(sys.modules, "flashinfer.msa_ops")
    with pytest.raises(peers.CannotRun, match="no_such_thing"):
        peers.load("flashinfer", tmp_path)


TRITON = module("triton", language=SimpleNamespace(), jit=lambda f: f)


def unpack(folder, path: str, source: str) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))


def test_unpacked_files_import_what_is_supplied(tmp_path, monkeypatch):
    """Files that import as the real ones do; nothing of them stays visible under their names."""
    ops = "vllm/models/minimax_m3/common/ops"
    source = """
        from vllm.platforms import current_platform
        from vllm.triton_utils import tl, triton
        from vllm.utils.math_utils import round_up
        assert round_up(17, 16) == 32 and not current_platform.is_rocm()
        assert isinstance(current_platform.is_arch_support_pdl(), bool)
    """
    unpack(tmp_path, f"{ops}/index_topk.py", source)
    unpack(tmp_path, f"{ops}/sparse_attn.py", source)
    (tmp_path / "vllm-9.8.7.dist-info").mkdir()
    sparse = "sglang/kernels/ops/attention/minimax_sparse"
    unpack(tmp_path, f"{sparse}/__init__.py", "")
    unpack(tmp_path, f"{sparse}/common/utils.py", "TOKENS = 128")
    for part in ("prefill", "decode"):
        for file in ("flash_with_topk_idx", "topk_sparse"):
            source = """
                from sglang.srt.environ import envs
                from sglang.srt.runtime_context import get_platform
                from sglang.srt.utils import is_gfx95_supported, is_xpu
                from ..common.utils import TOKENS
                assert not envs.SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX.get()
                assert not is_xpu() and not is_gfx95_supported()
                HOPPER = get_platform().is_sm90
            """
            unpack(tmp_path, f"{sparse}/{part}/{file}.py", source)
    before = {name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")}
    monkeypatch.setenv(peers.ENVIRONMENT, str(tmp_path))
    with stand_ins({"triton": TRITON, "triton.language": module("triton.language")}):
        assert peers.load("vllm").version == "9.8.7"
        assert peers.load("sglang").decode.TOKENS == 128
    after = {name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")}
    assert after == before


def test_files_that_do_not_import_say_why(tmp_path):
    ops = "vllm/models/minimax_m3/common/ops"
    unpack(tmp_path, f"{ops}/index_topk.py", "from vllm.platforms import no_such_thing")
    unpack(tmp_path, f"{ops}/sparse_attn.py", "")
    triton = {"triton": TRITON, "triton.language": module("triton.language")}
    with stand_ins(triton), pytest.raises(peers.CannotRun, match="no_such_thing"):
        peers.load("vllm", tmp_path)
