"""Acceptance by depth from matches of drafted tokens with the target's picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.train.errors import TrainingError

__all__ = ["DepthCounts", "runs_of", "walk"]


@dataclass(slots=True)
class DepthCounts:
    """Drafts of one length and how many of their tokens were accepted.

    Attributes:
        depth: length of a draft.
        runs: number of drafts by accepted tokens, 0 to `depth`.
    """

    depth: int
    runs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = self.runs or [0] * (self.depth + 1)

    def add(self, runs: Sequence[int]) -> None:
        """Count drafts with these numbers of accepted tokens."""
        for run in runs:
            self.runs[run] += 1

    def merge(self, other: DepthCounts) -> None:
        """Add the counts of other drafts of the same length."""
        self.runs = [mine + theirs for mine, theirs in zip(self.runs, other.runs, strict=True)]

    @property
    def drafts(self) -> int:
        """Number of drafts."""
        return sum(self.runs)

    @property
    def reached(self) -> list[int]:
        """Number of drafts whose token at each depth was judged: all tokens before it were accepted."""
        return [sum(self.runs[depth:]) for depth in range(self.depth)]

    @property
    def conditional(self) -> list[float]:
        """Acceptance at each depth of the drafts that reached it; 0 if none did."""
        return [sum(self.runs[depth + 1 :]) / reached if reached else 0.0 for depth, reached in enumerate(self.reached)]

    @property
    def survival(self) -> list[float]:
        """Share of all drafts that were accepted up to each depth; 0 without drafts."""
        return [sum(self.runs[depth + 1 :]) / self.drafts if self.drafts else 0.0 for depth in range(self.depth)]

    @property
    def acceptance_length(self) -> float:
        """Tokens written per round: mean accepted tokens and the target's own; 1 without drafts."""
        return 1 + sum(run * count for run, count in enumerate(self.runs)) / max(1, self.drafts)

    def check(self) -> None:
        """Check that survival adds up to the acceptance length.

        Raises:
            TrainingError: it does not.
        """
        if abs(sum(self.survival) - (self.acceptance_length - 1)) > 1e-9:
            raise TrainingError(
                f"survival by depth adds up to {sum(self.survival)}, and acceptance length minus 1 is "
                f"{self.acceptance_length - 1}: they must be equal"
            )


def runs_of(matches: Sequence[Sequence[bool]]) -> list[int]:
    """Return the number of matches before the first miss of each draft."""
    return [next((depth for depth, match in enumerate(row) if not match), len(row)) for row in matches]


def walk(runs: Sequence[int]) -> list[int]:
    """Return the drafts of a text that decoding would make: the next one starts after the accepted tokens and the pick.

    Args:
        runs: accepted tokens of the draft at each place of the text.

    Returns:
        Indices of places, ascending.
    """
    places, place = [], 0
    while place < len(runs):
        places.append(place)
        place += runs[place] + 1
    return places
