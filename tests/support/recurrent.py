"""A small recurrent language model that enforces the rules of the model seam for states. Not a test itself.

Two gated linear recurrences, one after the other. A node's states are computed from its parent's states only, never
from the tokens before it, so a wrong state gives wrong logits. What a real model would not have any more is an
AssertionError here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.core.tree import ROOT, depths
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    Extend,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    SlotIds,
    Truncate,
)
from draftree.models.kv.slots import require_subtree
from draftree.models.memory import Footprint
from draftree.models.table import TableLM
from draftree.sampling.logits import TensorLogits

WIDTH = 16
LEAST_KEPT = 8  # settled tokens of a pass from which the state at their end is kept
MOST_KEPT = 3


@dataclass(slots=True, eq=False)
class RecurrentSlot(Slot):
    """States of one sequence, shape (2, WIDTH) each. None stands for a state that no longer exists."""

    id: int
    length: int = 0
    end: Tensor | None = field(default_factory=lambda: torch.zeros(2, WIDTH, dtype=torch.float64))
    """State at the end of the prefix; None after a pass with settled tokens, until they are committed."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """States at earlier lengths."""
    nodes: list[Tensor | None] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    settled: int = 0
    partial: list[Tensor] = field(default_factory=list)

    @property
    def num_tentative(self) -> int:
        return len(self.nodes)

    def before(self, parent: int) -> Tensor:
        state = self.end if parent == ROOT else self.nodes[parent]
        assert state is not None, f"the state of node {parent} does not exist any more"
        return state

    def drop_nodes(self) -> None:
        self.nodes, self.parents, self.partial, self.settled = [], [], [], 0


class RecurrentLM(LanguageModel):
    """Model of two recurrences, float64.

    Args:
        seed: of the weights.
        distance: size of a change of the output heads, for a draft model.
        supports_trees: whether trees may branch.
    """

    def __init__(
        self,
        vocab_size: int = 12,
        *,
        seed: int = 1,
        distance: float = 0.0,
        supports_trees: bool = True,
        max_length: int = 4096,
    ) -> None:
        drawn = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=drawn, dtype=torch.float64)

        self._decays = torch.sigmoid(random(2, vocab_size, WIDTH) + 1)
        self._embedding = random(vocab_size, WIDTH)
        self._mix = random(WIDTH, WIDTH) / WIDTH**0.5
        self._heads = random(2, vocab_size, WIDTH) / WIDTH**0.5
        self._heads += distance * random(2, vocab_size, WIDTH) / WIDTH**0.5
        self.vocab_size, self.max_length, self.supports_trees = vocab_size, max_length, supports_trees
        self.is_exact, self.num_layers = True, 2
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self._ids = SlotIds()
        self._slots: set[RecurrentSlot] = set()
        self.num_rows = 0
        """Tokens read by whole passes so far."""
        self.num_settled = 0
        """Those of them that were settled."""

    def after(self, state: Tensor, token: int) -> Tensor:
        """Return the states after a token."""
        first = self._decays[0, token] * state[0] + self._embedding[token]
        return torch.stack([first, self._decays[1, token] * state[1] + torch.tanh(self._mix @ first)])

    def logits_of(self, state: Tensor, *, end: int = 2) -> Tensor:
        """Return logits by the first `end` layers, shape (vocab,)."""
        return torch.stack([self._heads[layer] @ state[layer] for layer in range(end)]).sum(0)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after these tokens, computed from the first one on, shape (vocab,)."""
        state = torch.zeros(2, WIDTH, dtype=torch.float64)
        for token in tokens:
            state = self.after(state, token)
        return self.logits_of(state)

    def without_slots(self) -> TableLM:
        """Return a model of the same logits that looks them up by all tokens before."""
        states = {(): torch.zeros(2, WIDTH, dtype=torch.float64)}

        def logits(tokens: tuple[int, ...]) -> Tensor:
            known = len(tokens)
            while tokens[:known] not in states:
                known -= 1
            for end in range(known, len(tokens)):
                states[tokens[: end + 1]] = self.after(states[tokens[:end]], tokens[end])
            return self.logits_of(states[tokens])

        return TableLM(logits, max_length=self.max_length, supports_trees=self.supports_trees)

    @property
    def footprint(self) -> Footprint:
        size = 2 * WIDTH * 8
        return Footprint(weights=0, token=0, logits=4 * self.vocab_size, row=0, state=(1 + MOST_KEPT) * size, node=size)

    @property
    def num_open(self) -> int:
        return len(self._slots)

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing."""

    def open(self) -> RecurrentSlot:
        slot = RecurrentSlot(self._ids.take())
        self._slots.add(slot)
        return slot

    def cut_length(self, slot: Slot, length: int) -> int:
        held = self._held(slot)
        ends = [0, *held.kept] if held.end is None else [0, *held.kept, held.length]
        return max(end for end in ends if end <= length)

    def require_part(self, part: LayerSubset) -> None:
        assert part == LayerSubset(end=1), "the first recurrence is the only part"

    def run(self, pass_: Pass) -> PassResult:
        assert len({id(job.slot) for job in pass_.jobs}) == len(pass_.jobs), "a slot occurs in one job at most"
        run = self._run if pass_.layers == ALL_LAYERS else self._run_partial
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
        self.require_capture(pass_.capture)
        rows = [row for job in pass_.jobs for row in run(self._held(job.slot), job)]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=self.dtype)
        return PassResult.of_jobs(pass_.jobs, TensorLogits(logits))

    def _run(self, slot: RecurrentSlot, job: Extend) -> list[Tensor]:
        count, first = job.settled, slot.num_tentative
        assert 0 <= count <= len(job.tokens) == len(job.parents)
        assert slot.length + max(depths([*slot.parents, *job.parents])[first:]) <= self.max_length
        self.num_rows += len(job.tokens)
        self.num_settled += count
        slot.partial = []
        logits = []
        if count:
            assert not first, "settled tokens follow the prefix of a slot without a tree"
            assert list(job.parents[:count]) == list(range(-1, count - 1)), "settled tokens are a chain"
        for node, (token, parent) in enumerate(zip(job.tokens, job.parents, strict=True), first):
            assert self.supports_trees or parent == node - 1, "the model takes chains only"
            state = self.after(slot.before(parent), int(token))
            slot.nodes.append(state)
            slot.parents.append(parent)
            logits.append(self.logits_of(state))
            if node < count:
                # a settled token overwrites the state before it
                if parent == ROOT:
                    slot.end = None
                else:
                    slot.nodes[parent] = None
        slot.settled = max(slot.settled, count)
        return [logits[row] for row in job.rows]

    def _run_partial(self, slot: RecurrentSlot, job: Extend) -> list[Tensor]:
        assert not slot.nodes, "a slot with a tree takes no partial nodes"
        assert not job.settled, "partial nodes are computed again by the next whole pass"
        first = len(slot.partial)
        for token, parent in zip(job.tokens, job.parents, strict=True):
            state = slot.before(ROOT) if parent == ROOT else slot.partial[parent]
            slot.partial.append(self.after(state, int(token)))
        return [self.logits_of(slot.partial[first + row], end=1) for row in job.rows]

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        opened: list[Slot] = []
        for edit in edits:
            slot = self._held(edit.slot)
            match edit:
                case Commit():
                    self._commit(slot, edit)
                case Truncate(_, length):
                    assert self.cut_length(slot, length) == length <= slot.length, "the state at the cut is not kept"
                    slot.end, slot.length = self._state(slot, length), length
                    slot.kept = {end: state for end, state in slot.kept.items() if end <= length}
                    slot.drop_nodes()
                case Fork(_, length):
                    assert self.cut_length(slot, length) == length <= slot.length, "the state at the cut is not kept"
                    fork = self.open()
                    fork.end, fork.length = self._state(slot, length), length
                    fork.kept = {end: state for end, state in slot.kept.items() if end <= length}
                    opened.append(fork)
                case Close():
                    self._slots.remove(slot)
                    self._ids.free(slot.id)
        return opened

    def _state(self, slot: RecurrentSlot, length: int) -> Tensor:
        if length == slot.length and slot.end is not None:
            return slot.end
        return slot.kept[length] if length else torch.zeros(2, WIDTH, dtype=self.dtype)

    def _commit(self, slot: RecurrentSlot, edit: Commit) -> None:
        path, keep = list(edit.path), list(edit.keep)
        require_subtree(slot.parents, edit)
        assert path[: slot.settled] == list(range(slot.settled)), "a commit begins with the settled tokens"
        if slot.settled >= LEAST_KEPT:
            state = slot.nodes[slot.settled - 1]
            assert state is not None
            slot.kept[slot.length + slot.settled] = state
            slot.kept = dict(sorted(slot.kept.items())[-MOST_KEPT:])
        slot.end = slot.before(path[-1] if path else ROOT)
        place = {path[-1] if path else ROOT: ROOT} | {node: new for new, node in enumerate(keep)}
        nodes, parents = slot.nodes, slot.parents
        slot.drop_nodes()
        slot.nodes = [nodes[node] for node in keep]
        slot.parents = [place[parents[node]] for node in keep]
        slot.length += len(path)

    def _held(self, slot: Slot) -> RecurrentSlot:
        assert isinstance(slot, RecurrentSlot), "the slot is of this model"
        assert slot in self._slots, "the slot is open"
        return slot
