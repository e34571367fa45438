"""Base of the strategies: which continuations are candidates, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from draftree.beam.candidates import Candidates

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation on the host.

    Attributes:
        parent: the beam that it continues.
        rank: rank of the parent in its group.
        token: the token.
        score: cumulative log-probability.
        logprob: what the token added to the score.
    """

    parent: Beam
    rank: int
    token: int
    score: float
    logprob: float


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Facts about a step that a strategy may read.

    Attributes:
        groups: live beams of each group; the rows of tensors are in their order.
        widths: maximum number of beams of each group.
        end_ids: tokens that end a text, int64 on the device of the log-probabilities.
        is_last: whether this is the last token before the limit.
    """

    groups: Sequence[Sequence[Beam]]
    widths: Sequence[int]
    end_ids: Tensor
    is_last: bool

    @property
    def beams(self) -> list[Beam]:
        """All live beams, in the order of the rows."""
        return [beam for group in self.groups for beam in group]

    def rows(self) -> list[slice]:
        """Return the rows of each group."""
        found, start = [], 0
        for group in self.groups:
            found.append(slice(start, start + len(group)))
            start += len(group)
        return found


class Strategy(ABC):
    """Selection of candidates for one search. May keep state of its beams."""

    is_ranked: bool = True
    """Whether candidates are in the order in which they go on; otherwise the best go on."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params

    @property
    def is_bounded(self) -> bool:
        """Whether a beam that is worse than all candidates that a step needs may be left out of the step."""
        return False

    def group_widths(self) -> list[int]:
        """Return the number of beams of each group; groups are searched side by side, each with its own pool."""
        return [self.params.beam_width]

    def num_candidates(self, width: int, num_ends: int) -> int:
        """Return how many candidates of a group leave at least `width` that do not end."""
        return max(2, 1 + num_ends) * width

    def check(self, prompt: Sequence[int], end_ids: Sequence[int], vocab_size: int) -> None:  # noqa: B027
        """Check a request before the first pass.

        Raises:
            InvalidRequestError: it cannot be honoured.
        """

    def mask(self, logprobs: Tensor, step: StepInfo) -> None:  # noqa: B027
        """Write -inf over tokens that are not allowed; `logprobs` has shape (beams, vocab)."""

    def score(self, logprobs: Tensor, step: StepInfo) -> Tensor:
        """Return log-probabilities with the strategy's penalties, shape (beams, vocab)."""
        return logprobs

    @abstractmethod
    def select(self, logprobs: Tensor, scores: Tensor, step: StepInfo) -> list[Candidates]:
        """Return the candidates of each group.

        Args:
            logprobs: shape (beams, vocab).
            scores: cumulative scores of the beams, shape (beams,).
            step: the step.
        """

    def arrange(self, candidates: list[Candidate]) -> list[Candidate]:
        """Order the candidates of a group on the host, and drop some."""
        return candidates

    def meets_constraints(self, beam: Beam) -> bool:
        """Whether a finished beam contains all that is required."""
        return True

    def on_select(self, parent: Beam, beam: Beam) -> None:  # noqa: B027
        """Set the state of a beam from its parent's; called for beams that go on and for finished ones."""
