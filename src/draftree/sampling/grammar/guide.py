"""One text's way through a grammar: which tokens may follow, at every node of a tree, and which must.

A matcher has read what is written. For the rows of a tree it goes down each way token by token and back up again;
what it says of a place is kept until the text goes on, so that a drafter's rows and the target's are asked for once.

Costs about 15 microseconds a row with 49,000 tokens: 10 for the matcher, the rest to make a list of its bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.sampling.history import History
from draftree.sampling.processors import Processor, RowContext

BITS = 32
MOST_SPELLINGS = 64
"""Allowed tokens at most that are looked at to find out whether all begin the same text."""


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """Which tokens a grammar allows at a place, told by the shorter list.

    Attributes:
        tokens: ids, ascending.
        forbids: whether these are the forbidden ones, and all others are allowed.
    """

    tokens: np.ndarray
    forbids: bool

    def restrict(self, row: Tensor) -> None:
        """Set the logits of what is not allowed to -inf, in place."""
        tokens = torch.from_numpy(self.tokens).to(row.device, non_blocking=True)
        if self.forbids:
            row.index_fill_(0, tokens, -math.inf)
            return
        kept = row.index_select(0, tokens)
        row.fill_(-math.inf).index_copy_(0, tokens, kept)


ANYTHING = Allowed(np.zeros(0, dtype=np.int64), forbids=True)


class Guide:
    """Leads one sequence. Mutated whenever it is asked: its matcher moves.

    Args:
        matcher: of xgrammar, at the beginning of the text; it knows the tokens that end a text.
        bytes_of: what each token says; nothing where it may not stand in a text.
        vocab_size: width of the logits.
        ends: the tokens that end a text, the likeliest first.
    """

    def __init__(self, matcher: Any, bytes_of: Sequence[bytes], *, vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._bytes_of = bytes_of
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._bits = torch.zeros(1, -(-vocab_size // BITS), dtype=torch.int32)
        self._written: list[int] = []
        self._history: History | None = None
        self._path: list[int] = []
        self._known: dict[tuple[int, ...], Allowed | None] = {}

    def allowed(self, history: History, paths: Sequence[Sequence[int]]) -> list[Allowed | None]:
        """What may follow each path behind the text; None where the grammar does not go, and no text ever will.

        Args:
            history: prompt and text; the prompt is not looked at.
            paths: tokens behind it.
        """
        self._follow(history)
        return [self._at(tuple(path)) for path in paths]

    def forced(self, history: History, path: Sequence[int], most: int, *, certain: bool = False) -> list[int]:
        """The tokens, at most so many, that follow a path because nothing else may.

        One that is alone is certain. Of several that are beginnings of each other the longest is taken: a tokenizer's
        usual choice, and a guess, since a model may cut the text elsewhere; with `certain` the run ends before it.
        """
        self._follow(history)
        run: list[int] = []
        while len(run) < most:
            allowed = self._at((*path, *run))
            token = self._only(allowed)
            if token is None or allowed is None or (certain and len(allowed.tokens) > 1):
                break
            run.append(token)
        return run

    def _only(self, allowed: Allowed | None) -> int | None:
        if allowed is None or allowed.forbids or not 0 < len(allowed.tokens) <= MOST_SPELLINGS:
            return None
        tokens = allowed.tokens.tolist()
        if set(tokens) <= set(self._ends):
            return next(token for token in self._ends if token in tokens)
        spelled = {token: self._bytes_of[token] for token in tokens if token not in self._ends}
        longest = max(spelled, key=lambda token: len(spelled[token]))
        is_one_text = len(spelled) == len(tokens) and all(map(spelled[longest].startswith, spelled.values()))
        return longest if is_one_text else None

    def _follow(self, history: History) -> None:
        """Read what was written since."""
        if history is self._history and history.num_output_tokens == len(self._written):
            return
        self._history = history
        output: list[int] = history.output.tolist()
        stands = _common(output, self._written)
        back = len(self._path) + len(self._written) - stands
        if back:
            self._matcher.rollback(back)
        self._path.clear()
        self._known.clear()
        del self._written[stands:]
        for token in output[stands:]:
            accepted = self._accepts(token)
            assert accepted, f"token {token} was written, and the grammar does not allow it"
            self._written.append(token)

    def _at(self, path: tuple[int, ...]) -> Allowed | None:
        if path not in self._known:
            is_lost = bool(path) and path[:-1] in self._known and self._known[path[:-1]] is None
            self._known[path] = None if is_lost or not self._move(path) else self._next()
        return self._known[path]

    def _move(self, path: Sequence[int]) -> bool:
        """Stand behind a path; whether the grammar goes there."""
        stands = _common(path, self._path)
        if len(self._path) > stands:
            self._matcher.rollback(len(self._path) - stands)
            del self._path[stands:]
        for token in path[stands:]:
            if not self._accepts(token):
                return False
            self._path.append(token)
        return True

    def _accepts(self, token: int) -> bool:
        # the matcher complains aloud of tokens that say nothing
        is_word = token in self._ends or (token < len(self._bytes_of) and bool(self._bytes_of[token]))
        return is_word and not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def _next(self) -> Allowed:
        if self._matcher.is_terminated():
            # the text is over: no control looks at what a model says behind its end
            return ANYTHING
        self._matcher.fill_next_token_bitmask(self._bits)
        return _listed(self._bits[0].numpy(), self._vocab_size)


class GrammarMask(Processor):
    """Forbids what a grammar does not allow behind history and path.

    Args:
        guide: the sequence's own.
    """

    __slots__ = ("_guide",)

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Logits with such tokens at -inf; rows that no text comes to stay as they are."""
        for row, allowed in zip(logits, self._guide.allowed(context.history, context.paths), strict=True):
            if allowed is not None:
                allowed.restrict(row)
        return logits


def _listed(words: np.ndarray, vocab_size: int) -> Allowed:
    """Lists from bits, a token a bit; most words are all ones or all zeros, and are not looked into."""
    some, gaps = np.flatnonzero(words), np.flatnonzero(words != -1)
    forbids = len(gaps) < len(some)
    places = gaps if forbids else some
    told = ~words[places] if forbids else words[places]
    bits = np.flatnonzero(np.unpackbits(told.view(np.uint8), bitorder="little"))
    tokens = places[bits // BITS] * BITS + bits % BITS
    return Allowed(tokens[: np.searchsorted(tokens, vocab_size)], forbids)


def _common(one: Sequence[int], other: Collection[int]) -> int:
    """How many tokens two rows begin with alike."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
