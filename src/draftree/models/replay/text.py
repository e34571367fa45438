"""Parts of a replay: a recorded text, measured seconds, and a clock that is charged with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final

from torch import Tensor

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.models.base import SlotRequest
from draftree.sampling.params import SamplingParams

__all__ = ["RecordedText", "ReplayClock", "ReplayCosts"]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedText:
    """One text of the target.

    Attributes:
        prompt: token ids of the prompt.
        tokens: the text, the token that ended it included.
        params: parameters of its request.
        seed: seed of its noise.
        is_ended: whether it ended by itself, before the limit of its request.
        layers: layers whose input was recorded, counted from 0; see `Pass.capture`.
        hidden: these states at every token of prompt and text but the last, shape (tokens, layers, hidden).
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    is_ended: bool = False
    layers: tuple[int, ...] = ()
    hidden: Tensor | None = None

    def answers(self, request: SlotRequest) -> bool:
        """Return whether a request with the same prompt writes this text, or the beginning of it."""
        controls, start = request.controls, len(self.prompt)
        same = replace(controls.params, max_tokens=self.params.max_tokens) == self.params.resolved()
        enough = self.is_ended or request.limit - start <= len(self.tokens)
        prompt = tuple(request.history.tokens[:start].tolist())
        return same and enough and prompt == self.prompt and controls.noise.seed == self.seed


class ReplayCosts(Protocol):
    """Measured seconds of the recorded target."""

    def pass_seconds(self, rows: int) -> float:
        """Return the seconds of a pass over so many tokens."""

    def pick_seconds(self, rows: int, temperature: float) -> float:
        """Return the seconds of the picks of so many rows."""


@final
class ReplayClock:
    """A clock on which passes that are not computed take their measured time.

    Args:
        clock: what all other work is measured with.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock, self._added = clock, 0.0

    def __call__(self) -> float:
        """Return the seconds of the clock and of all charges."""
        return self._clock() + self._added

    def charge(self, since: float, seconds: float) -> None:
        """Set the time to `seconds` after `since`."""
        self._added += since + seconds - self()
