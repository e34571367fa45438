"""Rules of timestamps in the texts of Whisper (arXiv 2212.04356), as its reference implementation applies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.sampling.processors import Processor, RowContext


@dataclass(frozen=True, slots=True)
class TimestampTokens:
    """Tokens of a model that writes timestamps.

    Attributes:
        off: token in the decoder's prompt that turns timestamps off; the token after it is the timestamp 0.
        end: token that ends a text; all tokens below it are text.
        max_initial: largest timestamp that may begin a text, counted in steps from 0; None for any.
    """

    off: int
    end: int
    max_initial: int | None = None

    @property
    def first(self) -> int:
        """The timestamp 0; all later tokens are timestamps."""
        return self.off + 1


class Timestamps(Processor):
    """Allows timestamps in pairs and in ascending order only, and prefers them if they are more likely than text.

    A text begins with a timestamp. After the first timestamp of a pair comes text, after text another one, then the
    first timestamp of the next pair or the end.

    Args:
        tokens: the tokens of the model.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: TimestampTokens) -> None:
        self._tokens = tokens

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the logits of forbidden tokens to -inf."""
        first, end = self._tokens.first, self._tokens.end
        logits[:, self._tokens.off] = -math.inf
        output: list[int] = context.history.output.tolist()
        written = _last_timestamp(output, first)
        for row, path in enumerate(context.paths):
            tail = [*output[-2:], *path][-2:]
            after_timestamp = bool(tail) and tail[-1] >= first
            after_pair = after_timestamp and (len(tail) < 2 or tail[-2] >= first)
            if after_pair:
                logits[row, first:] = -math.inf
            elif after_timestamp:
                logits[row, :end] = -math.inf
            last = _last_timestamp(path, first)
            last = written if last is None else last
            if last is not None:
                # the second timestamp of a pair may be followed by an equal one, which begins the next pair
                logits[row, first : last if after_timestamp and not after_pair else last + 1] = -math.inf
            if not output and not path:
                self._begin(logits[row])
        probs = torch.log_softmax(logits.float(), dim=-1)
        prefers = probs[:, first:].logsumexp(dim=-1) > probs[:, :first].amax(dim=-1)
        logits[:, :first].masked_fill_(prefers[:, None], -math.inf)
        return logits

    def _begin(self, row: Tensor) -> None:
        row[: self._tokens.first] = -math.inf
        if self._tokens.max_initial is not None:
            row[self._tokens.first + self._tokens.max_initial + 1 :] = -math.inf


def _last_timestamp(tokens: Sequence[int], first: int) -> int | None:
    return next((token for token in reversed(tokens) if token >= first), None)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text between two timestamps.

    Attributes:
        start: in steps of the timestamps.
        end: in steps; None if the text ends without one.
        first: index of its first token of text.
        last: index after its last token of text.
    """

    start: int
    end: int | None
    first: int
    last: int


def spans_of(tokens: Sequence[int], first: int) -> list[Span]:
    """Return the parts of a text by its timestamps; parts without text are left out.

    Args:
        tokens: token ids of the text, without the end of text.
        first: the timestamp 0.
    """
    found: list[Span] = []
    start, begun = 0, 0
    for place, token in enumerate([*tokens, first]):
        if token < first:
            continue
        is_last = place == len(tokens)
        if place > begun:
            found.append(Span(start, None if is_last else token - first, begun, place))
        start, begun = token - first, place + 1
    return found
