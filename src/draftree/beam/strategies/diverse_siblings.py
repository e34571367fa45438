"""Diverse siblings (arXiv 1611.08562): the continuations of one beam are penalised by their rank."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates, best, best_of_all
from draftree.beam.strategies.base import StepInfo, Strategy


@final
class DiverseSiblings(Strategy):
    """Subtracts `sibling_penalty` times the rank (1, 2, …) of a continuation among those of its beam.

    The first step is plain beam search. The penalty stays in the cumulative score.
    """

    @property
    def is_bounded(self) -> bool:
        """Penalties act within a beam."""
        return self.params.eos_rule != "any"

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        if not step.groups[0][0].tokens:
            return [best_of_all(logprobs, scores, count)]
        beams, vocab = logprobs.shape
        each = min(count, vocab)
        places = torch.stack([best(logprobs[beam], each) for beam in range(beams)])
        penalties = self.params.sibling_penalty * torch.arange(
            1, each + 1, dtype=logprobs.dtype, device=logprobs.device
        )
        own = logprobs.gather(1, places) - penalties
        totals = (own + scores[:, None]).reshape(-1)
        flat = (places + torch.arange(beams, device=places.device)[:, None] * vocab).reshape(-1)
        chosen = best(totals, min(count, len(totals)))
        return [Candidates(totals[chosen], flat[chosen], own.reshape(-1)[chosen])]
