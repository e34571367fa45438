"""Beam search, where the live beams of a text are one token tree over a shared prefix."""

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult, Hypothesis

__all__ = ["BeamResult", "BeamSearchParams", "Hypothesis"]
