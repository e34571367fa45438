"""Beam search: the best continuations of all beams together."""

from __future__ import annotations

from typing import final

from torch import Tensor

from draftree.beam.candidates import Candidates, best_of_all, best_of_each
from draftree.beam.strategies.base import StepInfo, Strategy


@final
class BeamStrategy(Strategy):
    """The best continuations of all beams; with the rule "any" the best of each beam, as in vLLM."""

    @property
    def is_bounded(self) -> bool:
        """With the rule "any" every beam has candidates."""
        return self.params.eos_rule != "any"

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of the only group."""
        count = self.num_candidates(step.widths[0], len(step.end_ids))
        choose = best_of_each if self.params.eos_rule == "any" else best_of_all
        return [choose(logprobs, scores, count)]
