"""Rules of timestamps in the texts of Whisper (arXiv 2212.04356), as its reference implementation applies them."""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text of a window.

    Attributes:
        start: in steps of the timestamps, from the beginning of the window.
        end: likewise.
        first: index of its first token, the timestamp at its beginning included.
        last: index after its last token, timestamps included.
    """

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WindowCut:
    """What is kept of the text of a window.

    Attributes:
        parts: of the text, in order.
        advance: frames from the beginning of the window to that of the next one; at least 1.
    """

    parts: tuple[Part, ...]
    advance: int


def cut_window(tokens: Sequence[int], first: int, *, frames: int, stride: int) -> WindowCut:
    """Cut the text of a window of long audio into parts, as `generate` of transformers does.

    Two timestamps in a row end a part and begin the next one. What follows the last such pair is unfinished and is
    dropped, unless the text ends with a single timestamp, after which there is no speech. A text without such a pair is
    one part and is kept whole.

    Args:
        tokens: token ids of the text, without the end of text.
        first: the timestamp 0.
        frames: length of the window.
        stride: frames in a step of the timestamps.
    """
    is_time = [token >= first for token in tokens]
    pairs = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not pairs:
        times = [token - first for token, timed in zip(tokens, is_time, strict=True) if timed]
        end = times[-1] if times and times[-1] > 0 else frames // stride
        return WindowCut((Part(0, end, 0, len(tokens)),) if tokens else (), frames)
    is_closed = is_time[-1] and not is_time[-2]
    bounds = [0, *pairs, len(tokens)] if is_closed else [0, *pairs[:-1], pairs[-1] + 1]
    parts = []
    for begin, bound in itertools.pairwise(bounds):
        # the last part of an open text holds both timestamps of the pair, so that they are kept
        last = tokens[bound - 2] if not is_closed and bound == bounds[-1] else tokens[bound - 1]
        parts.append(Part(tokens[begin] - first, last - first, begin, bound))
    reached = (tokens[pairs[-1] - 1] - first) * stride
    return WindowCut(tuple(parts), frames if is_closed or reached < 1 else reached)
