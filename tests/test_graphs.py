"""Every operator on every kernel in CUDA graphs: captured without a host synchronisation, also as
the first call of a process, and replayed into outputs that hold something else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import every_kernel
from tests.conftest import no_gpu_reason

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
REPLAYS = 3
POISON = 0x7F
"""of every byte of an output: NaN in FP8, large numbers elsewhere, and no id"""


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)


def outputs(name: str, result) -> list[torch.Tensor]:
    """The tensors that a call writes: of a decode view, not the caches that it is of."""
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result[:2] if name == "decode_view" else result)


def poison(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(POISON)


def bits(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    if name == "kv_block_schedule":  # the order within a row is not fixed
        copies[1] = copies[1].sort()[0]
    return [copy.contiguous().view(torch.uint8) for copy in copies]


def fault(name: str, call, *, eager_first: bool) -> str | None:
    """What goes wrong when the call is captured, replayed and compared with itself, or None."""

    def eager() -> list[torch.Tensor]:
        tensors = outputs(name, call())
        poison(tensors)  # where the call writes into its arguments, the same poison as below
        return bits(name, outputs(name, call()))

    expected = eager() if eager_first else None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")
            captured = outputs(name, call())
    except Exception as error:  # of the capture, whatever it is
        return f"{name}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = expected or eager()
    for replay in range(REPLAYS):
        poison(captured)
        graph.replay()
        for index, (got, want) in enumerate(zip(bits(name, captured), expected, strict=True)):
            if not bool((got == want).all()):  # on the host, so it waits
                return f"{name}: output {index} of replay {replay} differs"
    return None


def faults(*, eager_first: bool) -> list[str]:
    return [
        message
        for name, call in every_kernel.calls("cuda")
        if (message := fault(name, call, eager_first=eager_first))
    ]


def test_every_call_is_captured_and_replayed():
    assert faults(eager_first=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("portable", ["0", "1"], ids=["chosen", "portable"])
def test_the_first_call_of_a_process_may_be_captured(portable):
    """Kernels are loaded, and their limits raised, by the first call: within the capture here."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.test_graphs"],
        cwd=ROOT,
        env={**os.environ, "MSA_FORCE_PORTABLE": portable},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout.strip() == "", run.stdout + run.stderr[-2000:]


if __name__ == "__main__":
    print(*faults(eager_first=False), sep="\n")
