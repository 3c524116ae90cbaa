"""Every operator runs on the current stream, waits for nothing, and keeps its scratch memory to
itself: side streams, graphs beside eager calls, and many launches back to back."""

from collections.abc import Iterator

import pytest
import torch

import msa_kernels
from tests import every_kernel
from tests.conftest import no_gpu_reason
from tests.inputs import make_case, same_bits, shared_selection
from tests.test_graphs import bits, outputs

pytestmark = pytest.mark.gpu

SLOW = 40_000_000
"""clocks, some 20 ms: far longer than a call takes on the host"""


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)


def tensors_of(call: every_kernel.Call) -> Iterator[torch.Tensor]:
    """The tensors that a call is given, lists of them included, as bytes."""
    for argument in (*call.args, *call.keywords.values()):
        for tensor in argument if isinstance(argument, list) else [argument]:
            if isinstance(tensor, torch.Tensor):
                yield tensor.view(torch.uint8)


def test_every_call_runs_on_the_current_stream_and_waits_for_nothing():
    """Its inputs are zeros until slow work on a side stream is done, behind which the call is."""
    side = torch.cuda.Stream()
    for name, call in every_kernel.calls("cuda"):
        inputs = list(tensors_of(call))
        saved = [tensor.clone() for tensor in inputs]  # some calls write into them
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            expected = bits(name, outputs(name, call()))
        torch.cuda.synchronize()
        for tensor in inputs:
            tensor.zero_()
        torch.cuda.synchronize()
        slow_work_done = torch.cuda.Event()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW)
            slow_work_done.record()
            for tensor, copy in zip(inputs, saved, strict=True):
                tensor.copy_(copy)
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waited = slow_work_done.query()
            found = bits(name, outputs(name, result))
        torch.cuda.synchronize()
        assert not waited, f"{name} returned only when the work before it was done"
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want), f"{name} did not wait for its stream"


def decode_step(case, q, index_q):
    """What an engine does in a layer: write, select, attend."""
    tokens = (case.k, case.v, case.index_k, case.slot_mapping)
    msa_kernels.write_cache(*tokens, case.k_cache, case.v_cache, case.index_k_cache)
    ids = msa_kernels.select_blocks(index_q, *case.index_args[1:])
    return msa_kernels.sparse_decode(q, case.k_cache, case.v_cache, ids, *case.batch)


@pytest.mark.parametrize("requests,tokens", [(1, 1), (8, 1), (64, 1), (32, 8)])
def test_a_thousand_decode_steps_back_to_back(requests, tokens):
    """No step sees what the one before it left in scratch memory; queries change in turn."""
    lengths = [(tokens, 2500 + 31 * r) for r in range(requests)]
    case = make_case(lengths, hq=16, hkv=1, device="cuda", padding_rows=0)
    turns = 3
    queries = [(case.q * (turn + 1), case.index_q * (-1) ** turn) for turn in range(turns)]
    expected = []
    for query in queries:
        expected.append(decode_step(case, *query))
        torch.cuda.synchronize()
    found = [decode_step(case, *queries[step % turns]) for step in range(999)]
    for turn, want in enumerate(expected):
        same = (torch.stack(found[turn::turns]) == want).flatten(1).all(dim=1)
        assert bool(same.all()), f"step {turns * int(same.long().argmin()) + turn} differs"


def test_graphs_and_eager_calls_on_two_streams():
    """Two captured calls at once, and eager calls of the same operators on both streams between."""
    decode = make_case([(1, 3000 + 57 * r) for r in range(8)], hq=64, hkv=4, device="cuda")
    chunk = make_case([(700, 6000)], hq=64, hkv=4, selection="none", device="cuda")
    chunk = chunk.with_(ids=shared_selection(chunk, 0.7))

    def prefill():
        ids = msa_kernels.select_blocks(*chunk.index_args)
        return ids, msa_kernels.sparse_prefill(*chunk.attend_args)

    def step():
        return (decode_step(decode, decode.q, decode.index_q),)

    works = [step, prefill]
    expected = [work() for work in works]
    torch.cuda.synchronize()
    graphs, captured = [], []
    for work in works:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(work())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(20):
        eager = []
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                # The two streams run the two works in turn, and each its own graph.
                for other in ((which + turn) % 2, which):
                    eager.append((other, works[other]()))
                    graphs[which].replay()
        torch.cuda.synchronize()
        results = [*eager, *enumerate(captured)]
        for which, result in results:
            for got, want in zip(result, expected[which], strict=True):
                assert same_bits(got, want), f"turn {turn}, {works[which].__name__}"
        for result in captured:
            for tensor in result:
                tensor.fill_(7)
        torch.cuda.synchronize()
