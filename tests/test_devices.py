"""The device of the tensors is what counts, not the one that is current."""

import pytest
import torch

from tests import every_kernel


@pytest.mark.gpu
def test_tensors_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device or none")
    calls = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        calls.append(list(every_kernel.calls(device)))
    with torch.cuda.device(0):
        for (name, here), (_, there) in zip(*calls, strict=True):
            expected, found = here(), there()
            assert torch.cuda.current_device() == 0, name
            if name == "kv_block_schedule":  # the order within a row is not fixed
                expected, found = (
                    it._replace(pairs=it.pairs.sort()[0]) for it in (expected, found)
                )
            for want, got in zip(tensors(expected), tensors(found), strict=True):
                assert got.device.index == 1, name
                assert torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8)), name


def tensors(result) -> list[torch.Tensor]:
    if result is None:  # write_cache
        return []
    if isinstance(result, torch.Tensor):
        return [result.contiguous()]
    return [tensor for part in result for tensor in tensors(part)]
