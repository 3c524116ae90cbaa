"""A paged GQA kernel of others, which knows nothing of MSA, gives MSA's result on the view.

FlashInfer's BatchDecodeWithPagedKVCacheWrapper, as installed or unpacked (bench/README.md).
"""

import pytest
import torch

import msa_kernels
from bench import peers
from tests.conftest import no_gpu_reason
from tests.inputs import LAYOUTS, D, make_case
from tests.tolerance import assert_attention


@pytest.fixture(scope="module")
def flashinfer():
    if reason := no_gpu_reason():
        pytest.skip(reason)
    try:
        return peers.load("flashinfer")
    except peers.CannotRun as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("hq,hkv", [(64, 4), (16, 1), (8, 1), (8, 4), (4, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flashinfer_on_the_view(flashinfer, layout, hq, hkv):
    """Its kernel is given page tables, lengths and the strided caches, and nothing else."""
    for batch in ("decode_edges", "verify", "long"):
        case = make_case(batch, layout=layout, hq=hq, hkv=hkv, device="cuda")
        view = msa_kernels.decode_view(case.ids, *case.batch, case.k_cache, case.v_cache)
        assert view.k_view.stride() == view.v_view.stride()
        q = case.q.reshape(case.num_tokens * hkv, hq // hkv, D)
        out, lse = flashinfer.paged_decode(q, *view)()
        assert_attention(case, out.view_as(case.q), lse.view(case.num_tokens, hq))
        ours, our_lse = msa_kernels.paged_decode(
            q, view.k_view, view.v_view, view.page_table, view.kv_lens, return_lse=True
        )
        torch.testing.assert_close(ours, out, rtol=2**-6, atol=2**-8)
        torch.testing.assert_close(our_lse, lse, rtol=1e-5, atol=1e-5)
