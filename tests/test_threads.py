"""CPU kernels give the same bits with any number of threads."""

import pytest
import torch

import msa_kernels
from tests.inputs import copied_caches, make_case, same_bits


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def everything(case):
    """Every operator's results on the case, as one flat list."""
    written = copied_caches(case, "zero")
    tokens = (case.k, case.v, case.index_k, case.slot_mapping)
    caches = (written.k_cache, written.v_cache, written.index_k_cache)
    msa_kernels.write_cache(*tokens, *caches)
    scores = msa_kernels.index_score(*case.index_args)
    width = case.block_table.size(1)
    paged = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    results = [
        *caches,
        scores,
        msa_kernels.topk_blocks(scores, case.visible),
        msa_kernels.select_blocks(*case.index_args),
        *msa_kernels.kv_block_schedule(case.ids, case.cu_seqlens_q, case.seq_lens, width),
        *torch.ops.msa.decode_view(case.ids, *case.batch, case.k_cache.size(0), 2, 1),
        *msa_kernels.sparse_prefill(*case.attend_args, return_lse=True),
        *msa_kernels.sparse_decode(*case.attend_args, return_lse=True),
        *msa_kernels.paged_decode(*paged, cu_seqlens_q=case.cu_seqlens_q, return_lse=True),
    ]
    outs = torch.stack(results[-6:-1:2])
    lses = torch.stack(results[-5::2])
    pixels = torch.arange(131 * 588).mul(7919).bitwise_and(255).byte().view(131, 588)
    patches = msa_kernels.normalize_patches(pixels, [0.48, 0.46, 0.41], [0.27, 0.26, 0.28])
    return [*results, *msa_kernels.merge_lse(outs, lses), patches]


@pytest.mark.parametrize("batch", ["long", "chunks", "verify"])
def test_bits_do_not_depend_on_the_threads(threads, batch):
    case = make_case(batch, dtype=torch.bfloat16)
    threads(1)
    expected = everything(case)
    for count in (2, 3, 8):
        threads(count)
        for index, (got, want) in enumerate(zip(everything(case), expected, strict=True)):
            assert same_bits(got, want), f"result {index} with {count} threads"
