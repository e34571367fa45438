"""Strategies of a beam search: one file each; `of` chooses those of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.beam.strategies.base import Strategy
from draftree.beam.strategies.beam import BeamStrategy
from draftree.beam.strategies.beam_sampling import BeamSampling
from draftree.beam.strategies.diverse_groups import DiverseGroups
from draftree.beam.strategies.diverse_siblings import DiverseSiblings
from draftree.beam.strategies.independent import IndependentSampling
from draftree.beam.strategies.lexical import LexicalConstraints

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams

__all__ = ["Strategy", "of"]


def of(params: BeamSearchParams) -> Strategy:
    """Return a new strategy for one search; parameters that exclude each other were refused before."""
    if params.sampling == "beam":
        return BeamSampling(params)
    if params.sampling == "independent":
        return IndependentSampling(params)
    if params.num_beam_groups > 1:
        return DiverseGroups(params)
    if params.sibling_penalty:
        return DiverseSiblings(params)
    if params.force_words_ids:
        return LexicalConstraints(params)
    return BeamStrategy(params)
