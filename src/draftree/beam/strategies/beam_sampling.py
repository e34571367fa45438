"""Beam sampling: candidates are drawn without replacement from the cumulative scores of all beams."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates, drawn
from draftree.beam.strategies.base import StepInfo, Strategy
from draftree.beam.strategies.filters import keep_top

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams


@final
class BeamSampling(Strategy):
    """Draws from the softmax of the cumulative scores, as transformers with `do_sample` and `num_beams` > 1.

    The filters `top_k` and `top_p` act on each beam's row before the scores are added. Candidates stay in the order of
    their draws, so only the first `beam_width` draws can finish; of the others the best go on.
    """

    is_ranked = False

    def __init__(self, params: BeamSearchParams) -> None:
        super().__init__(params)
        self._generator = torch.Generator().manual_seed(params.seed)

    def score(self, logprobs: Tensor, step: StepInfo) -> Tensor:
        """Apply the filters."""
        return keep_top(logprobs, top_k=self.params.top_k, top_p=self.params.top_p, least=2)

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Draw the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        return [drawn(logprobs, scores, count, self._generator, width=step.widths[0])]
