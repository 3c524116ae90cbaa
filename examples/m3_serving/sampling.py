"""From logits to the next token; the randomness belongs to the request, not the batch."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How a request picks tokens. At temperature 0 (greedy) the others change nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    """mass of the most likely tokens kept, above 0 and at most 1"""
    seed: int | None = None
    """None: the engine draws one"""

    def __post_init__(self) -> None:
        """ValueError for a value out of range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides token `index` of a request's answer.

    A function of the two alone, so that it does not matter what else is in the batch, nor whether
    the request was preempted and computed again in between: no generator's state has to be carried
    along.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def top_p_probabilities(logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn and their probabilities.

    Args:
        logits: [V], any float dtype.
        temperature: above 0.
        top_p: the fewest most likely tokens whose mass reaches it are kept, at least one.

    Returns:
        (probabilities [n] float64, descending, sum 1; token ids [n] int64). Equal logits: lower id
        first.
    """
    scaled = logits.double() / temperature
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    probabilities = torch.softmax(ordered, dim=-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    kept = max(1, int((mass_before < top_p).sum()))
    probabilities = probabilities[:kept]
    return probabilities / probabilities.sum(), ids[:kept]


def sample(logits: Tensor, params: SamplingParams, seed: int, index: int) -> int:
    """Picks one token.

    Args:
        logits: [V], any float dtype.
        params: `params.seed` is not read.
        seed: of the request.
        index: of this token in the answer, from 0.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    probabilities, ids = top_p_probabilities(logits, params.temperature, params.top_p)
    drawn = int(torch.searchsorted(probabilities.cumsum(-1), uniform(seed, index), right=True))
    return int(ids[min(drawn, len(ids) - 1)])  # the sum may round to just below 1
