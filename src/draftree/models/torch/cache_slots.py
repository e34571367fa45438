"""Slots of chains in transformers' caches: what a pass reads into which cache, and what a commit leaves of it.

A cache of keys and values is cropped. One with states cannot be: settled tokens are read into the slot's cache, drafted
ones into a copy, which takes its place if all are accepted. If not, the copy is dropped, and the accepted tokens are
read once more by a later pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.models.base import Extend, Slot
from draftree.models.torch.family_cache import copied, with_keys_of, without_keys

MAX_REPEATED = 16  # certain tokens that are read beside drafted ones, perhaps in vain, to save a pass of their own
KEPT_FROM = 32  # a state is kept after so many settled tokens in one pass
MAX_KEPT = 3  # states that are kept
ROWS_OF_TOKEN = 16  # rows of a long pass that take as long as a pass over one token


@dataclass(slots=True, eq=False)
class Reading:
    """Tokens that one forward pass reads into a cache; the pass replaces the cache by the one that it returns."""

    cache: Any  # None to create one
    tokens: list[int]  # the token ids
    start: int  # index in the text of the first one
    num_repeated: int = 0  # first tokens that belong to earlier passes


class ChainSlot(Slot):
    """Text and tentative chain of one sequence. Mutated by its model only.

    `cache`: with which it begins. `num_pads`: masked padding tokens before the text. `offset`: position minus index.
    """

    __slots__ = ("_id", "cache", "is_closed", "num_pads", "offset", "tentative", "text")

    def __init__(self, number: int, cache: Any, *, num_pads: int = 0, offset: int = 0) -> None:
        self._id = number
        self.cache = cache
        self.num_pads = num_pads
        self.offset = offset
        self.text: list[int] = []
        self.tentative: list[int] = []
        self.is_closed = False

    @property
    def id(self) -> int:
        return self._id

    @property
    def length(self) -> int:
        return len(self.text)

    @property
    def num_tentative(self) -> int:
        return len(self.tentative)

    @property
    def num_tokens(self) -> int:
        return len(self.text) + len(self.tentative)

    @abstractmethod
    def readings(self, job: Extend) -> Iterator[Reading]:
        """Yield what passes have to read, in order; the last rows are those of the job. Its tokens become tentative."""

    @abstractmethod
    def adopt(self, cache: Any, length: int) -> None:
        """Begin an empty slot with what is kept of `length` tokens: a cache, or the tokens with their padding."""

    def commit(self, path: Sequence[int], keep: Sequence[int]) -> None:
        kept = [*path, *keep]
        assert kept == list(range(len(kept))), "a path of a chain starts at its first node, followed by the kept nodes"
        assert len(kept) <= self.num_tentative, "kept nodes are tentative"
        self._leave(len(path), len(kept))
        self.text += self.tentative[: len(path)]
        self.tentative = self.tentative[len(path) : len(kept)]

    @abstractmethod
    def _leave(self, num_committed: int, num_kept: int) -> None:
        """Prepare the caches for a commit that keeps the first `num_kept` tentative tokens."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the text, and no chain."""

    @abstractmethod
    def fork(self, number: int, length: int) -> ChainSlot:
        """Return a slot with the first `length` tokens of the text."""

    def cut_length(self, length: int) -> int:
        return length

    def close(self) -> None:
        self.is_closed, self.cache = True, None

    def _require_prefix(self, length: int) -> None:
        assert 0 <= length <= self.length, "a prefix is cut, not lengthened"


class CroppedSlot(ChainSlot):
    """Slot whose cache holds text and chain; rejected tokens are cropped."""

    __slots__ = ()

    def readings(self, job: Extend) -> Iterator[Reading]:
        reading = Reading(self.cache, list(job.tokens), self.num_tokens)
        yield reading
        self.cache = reading.cache
        self.tentative += job.tokens

    def adopt(self, cache: Any, length: int) -> None:
        self.cache, self.text = copied(cache), [0] * length

    def _leave(self, num_committed: int, num_kept: int) -> None:
        self._crop(self.num_tentative - num_kept)

    def truncate(self, length: int) -> None:
        self._require_prefix(length)
        self._crop(self.num_tokens - length)
        self.text, self.tentative = self.text[:length], []

    def fork(self, number: int, length: int) -> CroppedSlot:
        self._require_prefix(length)
        twin = CroppedSlot(number, copied(self.cache), num_pads=self.num_pads, offset=self.offset)
        twin.text, twin.tentative = list(self.text), list(self.tentative)
        twin.truncate(length)
        return twin

    def _crop(self, surplus: int) -> None:
        if surplus:
            self.cache.crop(-surplus)


@dataclass(frozen=True, slots=True)
class KeptState:
    """Cache after the first `length` tokens, without the keys and values that a later cache holds as well."""

    length: int
    cache: Any


class CopiedSlot(ChainSlot):
    """Slot whose cache has states: of the text, perhaps without its last tokens; a copy of it holds the chain.

    `by_token`: only a cache that has read nothing can read several tokens in one pass.
    """

    __slots__ = ("ahead", "by_token", "is_damaged", "kept", "num_read")

    def __init__(self, number: int, cache: Any, *, by_token: bool = False, **place: int) -> None:
        super().__init__(number, cache, **place)
        self.by_token = by_token
        self.num_read = 0  # number of tokens in the cache. Those after the text are settled and committed next.
        self.ahead: Any = None  # copy of the cache that has read the whole text and chain; None if there is none
        self.kept = [KeptState(0, copied(cache))]
        self.is_damaged = False  # whether a pass raised that was to change the cache

    def readings(self, job: Extend) -> Iterator[Reading]:
        if self.is_damaged:
            self._restart()
        tokens, settled = list(job.tokens), job.settled
        if self.ahead is None:
            assert not (settled and self.tentative), "settled tokens follow the prefix"
            certain = self.text[self.num_read :] + tokens[:settled]
            if settled == len(tokens) or len(certain) > (0 if self.by_token else MAX_REPEATED):
                yield from self._settle(certain, num_repeated=len(certain) - settled)
                self.tentative += tokens[:settled]
                tokens = tokens[settled:]
                if settled >= KEPT_FROM:
                    self._keep()
            if not tokens:
                return
            repeated = (self.text + self.tentative)[self.num_read :]
            reading = Reading(copied(self.cache), repeated + tokens, self.num_read, num_repeated=len(repeated))
        else:
            reading = Reading(self.ahead, tokens, self.num_tokens)
            self.ahead = None  # a pass that raises leaves it half changed
        yield reading
        self.ahead = reading.cache
        self.tentative += tokens

    def _settle(self, certain: list[int], *, num_repeated: int) -> Iterator[Reading]:
        """Read tokens of the text into the slot's own cache."""
        end, count = self.num_read + len(certain), len(certain)
        if self.by_token and count > 1 and not self.kept[0].length and end < ROWS_OF_TOKEN * count:
            certain, num_repeated = [*self.text[: self.num_read], *certain], num_repeated + self.num_read
            self._restart()
        reading = Reading(self.cache, certain, self.num_read, num_repeated=num_repeated)
        self.is_damaged = True
        yield reading
        self.cache, self.num_read, self.is_damaged = reading.cache, end, False

    def _keep(self) -> None:
        first, *others = self.kept
        self.kept = [first, *others[1 - MAX_KEPT :], KeptState(self.num_read, without_keys(self.cache))]

    def adopt(self, cache: Any, length: int) -> None:
        self.text, self.num_read = [0] * length, length  # the tokens are unknown, and never read again
        self.kept = [KeptState(length, cache)]
        self.cache = copied(cache)

    def _leave(self, num_committed: int, num_kept: int) -> None:
        assert self.num_read <= self.length + num_committed, "settled tokens are committed next"
        if num_kept < self.num_tentative:
            self.ahead = None
        elif num_committed == num_kept and self.ahead is not None:
            self.cache, self.num_read, self.ahead = self.ahead, self.num_tokens, None

    def truncate(self, length: int) -> None:
        self._require_prefix(length)
        self.ahead = None
        if self.is_damaged:
            self._restart()
        if self.num_read > length:
            self._go_back(length)
        self.kept = [state for state in self.kept if state.length <= length]
        self.text, self.tentative = self.text[:length], []

    def fork(self, number: int, length: int) -> CopiedSlot:
        self._require_prefix(length)
        twin = CopiedSlot(number, None, by_token=self.by_token, num_pads=self.num_pads, offset=self.offset)
        twin.kept, twin.text = list(self.kept), list(self.text)
        twin.num_read, twin.is_damaged = self.num_read, self.is_damaged
        twin.cache = copied(self.cache) if self.num_read <= length else self.cache  # a later one is only read from
        twin.truncate(length)
        return twin

    def close(self) -> None:
        super().close()
        self.ahead, self.kept = None, []

    def cut_length(self, length: int) -> int:
        if length >= self.length >= self.num_read:
            return self.length
        return max((state.length for state in self.kept if state.length <= length), default=0)

    def _go_back(self, length: int) -> None:
        """Return to the last state that is kept of the first `length` tokens; those after it are read again."""
        state = next((state for state in reversed(self.kept[1:]) if state.length <= length), None)
        if state is None:
            self._restart()
            assert self.num_read <= length, "a text is not cut in a prompt that was adopted"
            return
        self.cache = with_keys_of(state.cache, self.cache, self.num_pads + state.length)
        self.num_read = state.length

    def _restart(self) -> None:
        """Return to the state with which the slot began; the text after it is read again."""
        first = self.kept[0]
        self.cache, self.num_read, self.is_damaged = copied(first.cache), first.length, False


class RereadSlot(ChainSlot):
    """Slot without a cache: every pass reads the whole text, after its padding."""

    __slots__ = ("pads",)

    def __init__(self, number: int, **place: int) -> None:
        super().__init__(number, None, **place)
        self.pads: list[int] = []

    def readings(self, job: Extend) -> Iterator[Reading]:
        earlier = self.pads + self.text + self.tentative
        yield Reading(None, [*earlier, *job.tokens], 0, num_repeated=len(earlier))
        self.tentative += job.tokens

    def adopt(self, cache: Any, length: int) -> None:
        start = len(cache) - length
        self.pads, self.text = cache[:start], cache[start:]

    def _leave(self, num_committed: int, num_kept: int) -> None:
        """Do nothing: there is no cache."""

    def truncate(self, length: int) -> None:
        self._require_prefix(length)
        self.text, self.tentative = self.text[:length], []

    def fork(self, number: int, length: int) -> RereadSlot:
        self._require_prefix(length)
        twin = RereadSlot(number, num_pads=self.num_pads, offset=self.offset)
        twin.pads, twin.text = self.pads, self.text[:length]
        return twin
