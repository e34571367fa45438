"""The memory of sequences: the number of slots that fit, and their opening, sharing and return.

A sequence holds the keys and values of its tokens, in the target's slots and in the drafter's, and during a round the
logits of its tree. Sequences may use half of the free memory: while slots are replaced by longer ones, old and new ones
exist together. The memory of captured graphs is subtracted first. `draftree doctor` reports it.

Memory is counted by the present lengths and a little ahead, not by what sequences may become: most end early. When they
outgrow it, the youngest gives its slot back and is recomputed later.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

import numpy as np

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.core.types import MAX_NODES
from draftree.engine.parts import EngineParts
from draftree.engine.prefix_cache import (
    MIN_SHARED,
    CachedPrefix,
    DraftStates,
    PrefixCache,
    PrefixStats,
    common_length,
)
from draftree.engine.sequence import DraftState, WritingSequence, slot_of
from draftree.models.base import Slot
from draftree.models.memory import LOGIT_COPIES, Footprint, free_memory, total
from draftree.models.source import EncoderDecoder

SHARE = 0.5  # share of the free memory that sequences may use
UNKNOWN = 1 << 32  # assumed free bytes if the system does not report them
TREE_SHARE = 0.25  # share of the memory for sequences that recurrent states of one sequence's drafts may use
SHORT_TEXT = 64  # tokens of a text that must fit into the memory that a user sets
DRAFT_ROOM = 64  # initial room for tentative tokens in a slot; more if the drafter's trees are larger


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """Memory for sequences and its division into slots: the one place where slots are counted."""

    free_bytes: int | None  # of the device; None where the system does not say
    graph_bytes: int  # what captured graphs keep at most
    sequence_bytes: int  # what sequences may take
    token_bytes: int  # keys and values of one token, the drafter's included
    round_bytes: int  # logits, activations and states of tentative nodes of one round of one sequence
    tree_size: int  # tentative tokens that have to fit beside the text
    state_bytes: int = 0  # recurrent states of one sequence, the drafter's included
    max_nodes: int = MAX_NODES  # drafted tokens of one sequence for whose recurrent states there is memory

    def slot_bytes(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens, prompt and text."""
        return (length + self.tree_size) * self.token_bytes + self.state_bytes + self.round_bytes

    def num_slots(self, length: int) -> int:
        """How many sequences of `length` tokens fit; 0 if not even one does."""
        return self.sequence_bytes // max(1, self.slot_bytes(length))

    @property
    def longest(self) -> int | None:
        """Tokens that one sequence can have; None if tokens take no memory."""
        if not self.token_bytes:
            return None
        left = self.sequence_bytes - self.state_bytes - self.round_bytes
        return max(0, left // self.token_bytes - self.tree_size)


def slot_budget(parts: EngineParts, sequence_bytes: int | None = None) -> SlotBudget:
    """The budget of an engine of these parts, whose weights lie in memory already.

    Args:
        sequence_bytes: what sequences may take; None for half of what is free now.
    """
    free = free_memory(parts.target.device)
    graphs = parts.target.footprint.graphs + _of_drafters(parts).graphs
    share = int(SHARE * max(0, (UNKNOWN if free is None else free) - graphs))
    budget = divided(parts, share if sequence_bytes is None else sequence_bytes, free)
    if sequence_bytes is None or budget.num_slots(length := min(SHORT_TEXT, parts.target.max_length)):
        return budget
    while not budget.num_slots(length):  # trees grow with the memory
        budget = divided(parts, budget.slot_bytes(length), free)
    raise ConfigurationError(
        f"sequence_memory is {sequence_bytes} bytes, but a text of {length} tokens, the prompt included, "
        f"takes {budget.sequence_bytes}: increase it, or omit it to use half of the free memory"
    )


def _of_drafters(parts: EngineParts) -> Footprint:
    return total(choice.drafter.footprint for choice in parts.drafters)


def divided(parts: EngineParts, available: int, free: int | None) -> SlotBudget:
    """The division of the bytes that sequences may take among slots, with the drafters that are not released."""
    target, draft = parts.target.footprint, _of_drafters(parts)
    nodes = min(max((choice.planner.default_nodes for choice in parts.drafters), default=0), MAX_NODES)
    node_bytes = target.node + draft.node
    most = min(MAX_NODES, int(TREE_SHARE * available) // node_bytes) if node_bytes else MAX_NODES
    nodes = min(nodes, most)
    return SlotBudget(
        free_bytes=free,
        graph_bytes=target.graphs + draft.graphs,
        sequence_bytes=available,
        token_bytes=target.token + draft.token,
        state_bytes=target.state + draft.state,
        round_bytes=(1 + nodes) * (LOGIT_COPIES * target.logits + target.row + target.node)
        + LOGIT_COPIES * draft.logits
        + draft.row
        + nodes * draft.node,
        tree_size=max(DRAFT_ROOM, nodes),
        max_nodes=most,
    )


@dataclass(frozen=True, slots=True)
class SlotEstimate:
    """The number of slots of one length that an engine has room for."""

    free_bytes: int | None  # free memory of the device; None if the system does not report it
    sequence_bytes: int  # bytes of it that sequences may use
    graph_bytes: int  # upper bound of the memory of captured graphs
    slot_bytes: int  # bytes per slot, including its drafts
    num_slots: int  # number of slots that fit; 0 if none does


def estimate_slots(parts: EngineParts, length: int) -> SlotEstimate:
    """Estimate the room of an engine with these parts, created now."""
    budget = slot_budget(parts)
    sizes = budget.slot_bytes(length), budget.num_slots(length)
    return SlotEstimate(budget.free_bytes, budget.sequence_bytes, budget.graph_bytes, *sizes)


logger = logging.getLogger(__name__)

LEAST_CHUNK = 32  # tokens of a chunk that ends early for texts to come
AHEAD = 256  # tokens that a sequence should be able to write before memory is counted again


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The part of a prompt's beginning that is in memory."""

    slot: Slot | None = None  # a slot that holds the beginning; None if none does
    length: int = 0  # how much of it
    draft_state: DraftState | None = None  # the drafter's, for the same beginning
    kept: CachedPrefix | None = None  # the slot's entry, if it is a kept one
    later: int = 0  # how much another sequence holds or is about to read


class SlotAllocator:
    """The slots of running sequences and of kept prefixes. Mutated by the engine only.

    Args:
        shares: whether a sequence may wait for another that reads the beginning of its prompt; never with a sink.
    """

    def __init__(self, parts: EngineParts, budget: SlotBudget, *, keep: int, shares: bool) -> None:
        self._parts = parts
        self.budget = budget
        if keep and parts.sink is not None:
            raise ConfigurationError(
                f"prefix_cache_size is {keep}, but hidden states of every token are recorded: set it to 0"
            )
        self._shares = shares and parts.sink is None
        self._keeps_states = self._shares and parts.target.footprint.state > 0
        self._running: Sequence[WritingSequence] = ()
        self._length = 0
        self._count = 0
        self._counts: Counter[str] = Counter()
        self._drafts = DraftStates(parts)
        self.prefixes = PrefixCache(parts.target, keep, self._drafts)

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(**self._counts, kept=len(self.prefixes.kept), evicted=self.prefixes.evicted)

    def require_fit(self, sequence: WritingSequence) -> None:
        """Refuse what can never fit, with the numbers."""
        need = self.budget.slot_bytes(sequence.limit + sequence.source_length)
        if need > self.budget.sequence_bytes:
            per_text = self.budget.state_bytes + self.budget.round_bytes
            raise InvalidRequestError(
                f"a text of up to {sequence.limit} tokens, the prompt included, needs {_megabytes(need)} "
                f"({self.budget.token_bytes} bytes a token, and {_megabytes(per_text)} for states and logits), but "
                f"texts may take {_megabytes(self.budget.sequence_bytes)}, enough for "
                f"{self.budget.longest or 0} tokens: shorten the prompt, or lower max_tokens",
                param="max_tokens",
            )

    def fits(self, sequences: Sequence[WritingSequence], ahead: int = AHEAD) -> bool:
        """Whether these can all run, alone with their memory; one alone always can."""
        if len(sequences) == 1:
            return True
        # all slots are as long as the longest
        longest = max(min(s.limit, len(s.history) + ahead) + s.source_length for s in sequences)
        return self.budget.num_slots(longest) >= len(sequences)

    def open(self, running: Sequence[WritingSequence]) -> None:
        """Slots for those that have none, shared where prompts begin alike; room for what the next pass appends."""
        if not running:
            return
        self._running = running
        self.prefixes.evict(self._num_open() - self._most_open())
        try:
            self._reserve(min(len(running) + len(self.prefixes.kept), self._most_open()), running)
        except AssertionError:
            raise  # a mistake of ours, not a request's
        except Exception as error:
            logger.warning("no slots for %d texts at once (%s): those fail that do not fit", len(running), error)
        for place, sequence in enumerate(running):
            if sequence.slot is not None or sequence.is_finished:
                continue
            try:
                self._open(sequence, running[:place])
            except AssertionError:
                raise  # a mistake of ours, not the request's
            except Exception as error:
                sequence.fail(error)
        active = [s for s in running if not s.is_finished]
        begun = [s.read for s in active if s.slot is None and s.read is not None]
        if begun and all(s.slot is None or s.is_paused for s in active):  # nothing else to do
            wait(begun, return_when=FIRST_COMPLETED)
            self.open(running)

    def _open(self, sequence: WritingSequence, earlier: Sequence[WritingSequence]) -> None:
        copyable = sequence.history.tokens[: sequence.num_copyable]
        match = self._beginning(sequence, copyable, earlier) if sequence.shares_slots else PrefixMatch()
        if match.later >= match.length + MIN_SHARED:
            return  # another is about to read that much of it
        # of a beginning with images nothing less is shared than what is read of them at once
        read = 0 if sequence.images is None else sequence.images.num_first - 1
        if match.length < max(MIN_SHARED, read):
            match = PrefixMatch()
        if sequence.images is not None and match.slot is None and not self._has_read(sequence, earlier):
            return  # other texts go on meanwhile
        begin = self._take_over if self._takes_over(match) else self._copy
        begin(match, sequence)
        sequence.read = None
        if sequence.plan_state is None and sequence.draft_state is not None:
            planner = sequence.draft_state.choice.planner
            sequence.plan_state = planner.open(is_sampled=sequence.controls.temperature > 0)
        if sequence.counts.rounds == 0:
            sequence.counts.cached_tokens = cached = match.length
            self._counts.update(sequences=1, hits=cached > 0, prompt_tokens=len(sequence.history), cached_tokens=cached)

    def _has_read(self, sequence: WritingSequence, earlier: Sequence[WritingSequence]) -> bool:
        """Begin to read images, unless an earlier text reads the same ones, and return whether they are read."""
        if any(other.read is not None and other.prefix_key == sequence.prefix_key for other in earlier):
            return False
        if sequence.read is None:
            assert sequence.image_reader is not None, "the request was checked"
            assert sequence.images is not None, "as above"
            sequence.read = sequence.image_reader.begin(sequence.images)
        return sequence.read.done()

    def _beginning(
        self, sequence: WritingSequence, prompt: np.ndarray, earlier: Sequence[WritingSequence]
    ) -> PrefixMatch:
        target = self._parts.target
        kept, length = self.prefixes.find(prompt, sequence.prefix_key)
        match = PrefixMatch() if kept is None else PrefixMatch(kept.slot, length, kept.draft_state, kept)
        later = 0
        for other in earlier if self._shares else ():
            if other.slot is None or not other.shares_slots or other.prefix_key != sequence.prefix_key:
                continue
            alike = common_length(other.history.tokens, prompt)
            length = target.cut_length(other.slot, min(alike, other.slot.length))
            if length > match.length:
                match = PrefixMatch(other.slot, length, other.draft_state)
            if alike > other.slot.length:
                later = max(later, alike)
        return replace(match, later=later)

    def chunk_end(self, sequence: WritingSequence) -> int:
        """Return the length at which the next prompt chunk of a sequence ends at the latest.

        A recurrent state is kept at the end of a chunk, and another text can begin with a copy of it: so a chunk ends
        where a waiting text departs from this one, or where a kept one does, as the next one may as well.
        """
        tokens, start = sequence.history.tokens, slot_of(sequence).length
        if not self._keeps_states:
            return len(tokens)
        ends = [len(tokens)]
        for other in self._running:
            if other.slot is None and other.shares_slots and other.prefix_key == sequence.prefix_key:
                ends.append(common_length(other.history.tokens[: other.num_copyable], tokens))
        for kept in self.prefixes.kept:
            end = min(common_length(kept.tokens, tokens), len(tokens) - 1)
            if kept.key == sequence.prefix_key and end >= start + LEAST_CHUNK:
                ends.append(end)
        return min(end for end in ends if end > start)

    def _takes_over(self, match: PrefixMatch) -> bool:
        """Whether a kept slot is handed over: if nothing of it is lost, or if there is no place for a copy."""
        kept = match.kept
        if kept is None:
            return False
        self.prefixes.use(kept)
        return match.length == len(kept.tokens) or self._num_open() >= self._most_open()

    def _take_over(self, match: PrefixMatch, sequence: WritingSequence) -> None:
        assert match.kept is not None, "only kept slots are handed over"
        sequence.slot = self.prefixes.take(match.kept)
        self._parts.target.truncate(sequence.slot, match.length)
        view = replace(sequence.view, slot=sequence.slot)
        sequence.draft_state = self._drafts.attach(match.draft_state, view, match.length)
        self._reserve(self._num_open(), [sequence])

    def _copy(self, match: PrefixMatch, sequence: WritingSequence) -> None:
        target = self._parts.target
        self.prefixes.evict(self._num_open() + 1 - self._most_open())
        self._reserve(self._num_open() + 1, [sequence])
        if match.slot is not None:
            sequence.slot = target.fork(match.slot, match.length)
        elif sequence.read is not None:
            assert sequence.image_reader is not None, "it has read them"
            assert sequence.images is not None, "as above"
            sequence.slot = sequence.image_reader.open(sequence.images, sequence.read)
        elif sequence.opens is not None:
            sequence.slot = sequence.opens()
        elif sequence.source is None:
            sequence.slot = target.open()
        else:
            assert isinstance(target, EncoderDecoder), "sources are for encoder-decoder models"
            sequence.slot = target.open_on(sequence.source)
        view = replace(sequence.view, slot=sequence.slot)
        sequence.draft_state = self._drafts.fork(match.draft_state, view, match.length)

    def _num_open(self) -> int:
        return sum(s.slot is not None for s in self._running) + len(self.prefixes.kept)

    def _most_open(self) -> int:
        """Slots that may be open: one for each that runs, and for kept prefixes what memory is left."""
        running = len(self._running)
        longest = max(len(s.history) + s.source_length for s in self._running)
        return max(running, min(running + self.prefixes.limit, self.budget.num_slots(longest)))

    def _reserve(self, count: int, sequences: Sequence[WritingSequence]) -> None:
        """Room for so many slots, and for these texts: more than is too little now, so that it is seldom exchanged."""
        needed = max(len(s.history) for s in sequences) + self.budget.tree_size
        if count <= self._count and needed <= self._length:
            return
        length, most = self._length, self._count
        if needed > length:
            longest = max(s.limit for s in sequences) + self.budget.tree_size
            length = min(longest, max(needed + AHEAD, 2 * length))
        if count > most:
            most = max(count, min(self._most_open(), 2 * most))
        others = self._parts.target.num_open - self._num_open()
        self._parts.target.reserve(max(0, others) + most, length)
        self._drafts.reserve(most, length)
        self._length, self._count = length, most

    def leave(self, sequence: WritingSequence, *, may_keep: bool) -> None:
        """Take a sequence's slot and drafter state from it."""
        # an idle engine would keep the last batch alive
        self._running = [other for other in self._running if other is not sequence]
        slot, sequence.slot = sequence.slot, None
        draft_state, sequence.draft_state = sequence.draft_state, None
        if slot is not None and may_keep and sequence.shares_slots:
            self.prefixes.keep(slot, sequence.history.tokens, draft_state, sequence.prefix_key)
            return
        if slot is not None:
            self._parts.target.close(slot)
        self._drafts.close(draft_state)

    def recover(self, sequences: Sequence[WritingSequence]) -> None:
        """After a pass that raised: what is committed stays, what is tentative goes, drafters begin anew.

        A recurrent state that has moved on goes back to an earlier length, and the tokens since are read again.
        """
        target = self._parts.target
        for sequence in sequences:
            if sequence.slot is None or sequence.is_finished:
                continue
            try:
                target.truncate(sequence.slot, target.cut_length(sequence.slot, sequence.slot.length))
                draft_state, sequence.draft_state = sequence.draft_state, None
                self._drafts.close(draft_state)
                sequence.draft_state = self._drafts.open(replace(sequence.view, slot=sequence.slot))
            except Exception as error:
                sequence.fail(error)

    def check_integrity(self, running: Sequence[WritingSequence], waiting: Sequence[WritingSequence]) -> None:
        """Raise AssertionError if a slot has no owner or two, or holds what was not verified."""
        assert all(s.slot is None and s.draft_state is None for s in waiting), "waiting sequences have no slot"
        slots = [s.slot for s in running if s.slot is not None]
        for sequence in running:
            if sequence.slot is not None:
                assert sequence.slot.num_tentative == 0, "between rounds nothing is tentative"
                assert sequence.slot.length < len(sequence.history), "the root is not read yet"
        self.prefixes.check_integrity(slots)
        num_open = len(slots) + len(self.prefixes.kept)
        assert num_open <= self._count, "slots are reserved"
        counted = self._parts.target.num_open
        assert not counted or counted >= num_open, "no slot is lost"
        kept = [prefix.draft_state for prefix in self.prefixes.kept]
        assert all(s.draft_state is None for s in running if s.slot is None), "states go with slots"
        self._drafts.check_integrity([*(s.draft_state for s in running), *kept])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 10_000_000 else 2}f} MB"
