"""Diverse beam search (arXiv 1610.02424): groups of beams that avoid the tokens of earlier groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates, best_of_all
from draftree.beam.strategies.base import StepInfo, Strategy

if TYPE_CHECKING:
    from draftree.beam.group import Beam


@final
class DiverseGroups(Strategy):
    """Groups are searched in order; each subtracts a penalty for tokens that beams of earlier groups go on with.

    The penalty is `diversity_penalty` for each such beam (Hamming diversity), times 1 plus the discounted number of
    equal earlier tokens of the two groups if there is a discount. It stays in the cumulative score.
    """

    @property
    def is_bounded(self) -> bool:
        """With a discount the tokens of all beams count."""
        return self.params.eos_rule != "any" and not self.params.diversity_discount

    def group_widths(self) -> list[int]:
        """Return equal widths."""
        groups = self.params.num_beam_groups
        return [self.params.beam_width // groups] * groups

    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of each group."""
        vocab = logprobs.shape[-1]
        chosen: list[tuple[Tensor, Tensor]] = []
        found = []
        for group, rows in enumerate(step.rows()):
            own = logprobs[rows]
            if not len(own):
                found.append(Candidates(scores[rows], torch.empty_like(scores[rows], dtype=torch.int64), scores[rows]))
                chosen.append((scores.new_zeros(0, dtype=torch.int64), scores.new_zeros(0)))
                continue
            penalty = own.new_zeros(vocab)
            for earlier, (tokens, counted) in enumerate(chosen):
                weight = self._weight(step.groups[group], step.groups[earlier])
                penalty.index_add_(0, tokens, counted * (weight * self.params.diversity_penalty))
            own = own - penalty
            width = step.widths[group]
            candidates = best_of_all(own, scores[rows], self.num_candidates(width, len(step.end_ids)))
            tokens = candidates.places % vocab
            goes_on = ~torch.isin(tokens, step.end_ids) & candidates.scores.isfinite()
            counted = goes_on & (goes_on.cumsum(0) <= width)
            chosen.append((tokens, counted.to(own.dtype)))
            found.append(candidates)
        return found

    def _weight(self, own: Sequence[Beam], other: Sequence[Beam]) -> float:
        discount = self.params.diversity_discount
        if not discount or not own or not other:
            return 1.0
        pairs = zip(own, other, strict=False)
        overlap, count = 0.0, 0
        for one, two in pairs:
            weight = 1.0
            for left, right in zip(reversed(one.tokens), reversed(two.tokens), strict=True):
                weight *= discount
                overlap += weight * (left == right)
            count += 1
        return 1.0 + overlap / count
