"""topk_blocks: each number of warps a row, of ordinary scores and of many that are equal."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator, Launch

KERNEL = "msa_topk_blocks_sm80_kernel"
KERNELS = [  # most blocks, rows, threads of a CTA: 128 of four rows, else all of one
    (200, 13, 128),
    (500, 13, 128),
    (1000, 13, 128),
    (2000, 6, 256),
    (5000, 6, 256),
    (9000, 3, 512),
    (17000, 2, 512),
    (1100, 2049, 64),
    (2100, 2049, 128),
]


def scores_of(kind: str, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(shape[-1])
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    scores = torch.randint(-1, 2, shape, generator=generator).float()
    scores[..., ::7] = torch.nan
    scores[..., 1::9] = -torch.inf
    scores[..., 2::11] = -0.0
    return scores


@pytest.mark.parametrize("kind", ["normal", "equal"])
@pytest.mark.parametrize("blocks,rows,threads", KERNELS)
def test_kernels(library, blocks, rows, threads, kind):
    scores = scores_of(kind, (1, rows, blocks))
    if rows > 1000:  # short rows, most of them
        visible = torch.full((rows,), 40, dtype=torch.int32)
        visible[::300] = blocks
    else:
        visible = torch.tensor([(7919 * row) % (blocks + 2) for row in range(rows)]).int()
        visible[:2] = torch.tensor([blocks, blocks - 1])
    emulator = Emulator(library, seed=blocks % 3)
    for topk, init_blocks, local_blocks in ((16, 0, 1), (32, 2, 0))[: 1 if rows > 1000 else 2]:
        rule = {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}
        ids = emulator.topk_blocks(scores, visible, **rule)
        assert emulator.launched == [Launch(KERNEL, threads, 0)]
        assert torch.equal(ids, reference.topk_blocks(scores, visible, **rule))


def test_strides(emulator):
    """Blocks outermost, as a kernel that does not know torch's order may leave them."""
    scores = scores_of("normal", (300, 9, 3)).permute(2, 1, 0)
    visible = torch.tensor([300, 299, 1, 0, -5, 17, 16, 400, 33], dtype=torch.int32)
    for topk in (1, 16):
        ids = emulator.topk_blocks(scores, visible, topk)
        assert torch.equal(ids, reference.topk_blocks(scores, visible.clamp(min=0), topk))
