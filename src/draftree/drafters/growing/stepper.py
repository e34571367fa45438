"""Interface through which trees are grown: a model, or a part of one, reads texts and the trees after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from draftree.core.tree import TokenTree
from draftree.drafters.base import SequenceView
from draftree.models.base import LanguageModel
from draftree.sampling.logits import Logits


class Stepped(Protocol):
    """What a stepper knows of a sequence."""

    view: SequenceView
    fed: dict[int, int]
    """Nodes of the last tree that the model has read: tree index to the index that `feed` takes for a parent."""


StateT = TypeVar("StateT", bound=Stepped)


class Stepper(ABC, Generic[StateT]):
    """Lets a model read texts, and trees behind them."""

    model: LanguageModel
    max_depth: int
    """Levels that always fit."""

    @abstractmethod
    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for so many sequences of so many tokens, tentative ones included."""

    @abstractmethod
    def open(self, view: SequenceView) -> StateT:
        """State for a new sequence."""

    @abstractmethod
    def close(self, state: StateT) -> None:
        """Give back what the sequence held."""

    def fork(self, state: StateT, view: SequenceView) -> StateT:
        """State for a new sequence, with what an open one has read of its text."""
        return self.open(view)

    def detach(self, state: StateT) -> StateT | None:
        """What is kept of a finished sequence; None, and closed, if nothing is."""
        self.close(state)
        return None

    def attach(self, state: StateT, view: SequenceView) -> StateT:
        """As `fork`, from a detached state that is not needed any more."""
        forked = self.fork(state, view)
        self.close(state)
        return forked

    def check_integrity(self, states: Sequence[StateT]) -> None:
        """Raise AssertionError if the slots of all open states contradict them."""

    def read(self, states: Sequence[StateT], counts: Sequence[int]) -> None:
        """Read prompts beside the target, which has just read so many tokens of each."""

    def is_ready(self, state: StateT) -> bool:
        """Whether the text is read soon enough that a tree behind it can pay."""
        return True

    @abstractmethod
    def catch_up(self, states: Sequence[StateT], ahead: Sequence[int]) -> Logits:
        """Feed every sequence what has not been read of its text; logits behind it, one row a sequence.

        Args:
            states: the sequences.
            ahead: for each how many positions a tree may need behind its last token.
        """

    @abstractmethod
    def feed(
        self, states: Sequence[StateT], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """One pass over new nodes of trees; their logits, one row a node.

        Args:
            states: the sequences.
            tokens: for each the new nodes' tokens, in the tree's vocabulary.
            parents: for each their parents, counted as they were fed; or -1 for the text's last token.
        """

    @abstractmethod
    def keep(self, states: Sequence[StateT], paths: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted of what was fed; the histories already hold the written tokens.

        Args:
            states: the sequences.
            paths: for each the accepted nodes, in order from the root down.
        """

    @abstractmethod
    def follow(self, states: Sequence[StateT], trees: Sequence[TokenTree]) -> None:
        """As `keep`, for trees in the model's own tokens, whose verdict the text alone tells."""
