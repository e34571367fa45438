"""Independent sampling: several texts, each drawn by itself, ranked by their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates, at_places
from draftree.beam.strategies.base import StepInfo, Strategy
from draftree.beam.strategies.filters import keep_top

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams


@final
class IndependentSampling(Strategy):
    """Draws one token per beam. A score adds the log-probabilities before the filters."""

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        self._generator = torch.Generator().manual_seed(params.seed)

    def group_widths(self) -> list[int]:
        """Each beam is a group."""
        return [1] * self.params.beam_width

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Draw a token for each beam; a beam without an allowed token has no candidate."""
        kept = keep_top(logprobs, top_k=self.params.top_k, top_p=self.params.top_p)
        weights = kept.softmax(dim=-1).nan_to_num(0.0).cpu()
        totals = logprobs + scores[:, None]
        # an impossible row draws token 0, whose score of -inf marks it
        weights[:, 0] += (weights.sum(dim=-1) == 0).to(weights.dtype)
        tokens = torch.multinomial(weights, 1, generator=self._generator)[:, 0].to(logprobs.device)
        return [
            at_places(totals[row : row + 1], logprobs[row : row + 1], tokens[row : row + 1])
            for row in range(len(tokens))
        ]
