"""Interface for growing trees: a model, a subset of its layers, or a head reads texts and trees after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from draftree.core.tree import TokenTree
from draftree.drafters.base import SequenceView
from draftree.models.memory import NOTHING, Footprint
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


class Stepped(Protocol):
    """State of a sequence in a stepper."""

    view: SequenceView
    fed: dict[int, int]
    """Nodes of the last tree that the model has read: tree index to the index of a parent in `feed`."""


StateT = TypeVar("StateT", bound=Stepped)


class Stepper(ABC, Generic[StateT]):
    """Interface of a model that reads texts and trees after them."""

    max_length: int
    """Maximum number of tokens of a text that it keeps, tree included."""
    max_depth: int
    """Number of levels that always fit."""

    @abstractmethod
    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for `num_sequences` sequences of `length` tokens, tentative ones included."""

    @abstractmethod
    def open(self, view: SequenceView) -> StateT:
        """Return the state of a new sequence."""

    @abstractmethod
    def close(self, state: StateT) -> None:
        """Free the resources of a sequence."""

    def fork(self, state: StateT, view: SequenceView) -> StateT:
        """Return the state of a new sequence with the common prefix of an open one."""
        return self.open(view)

    def detach(self, state: StateT) -> StateT | None:
        """Return the state to keep of a finished sequence; None if it was closed."""
        self.close(state)
        return None

    def attach(self, state: StateT, view: SequenceView) -> StateT:
        """Do as `fork`, and consume the detached state."""
        forked = self.fork(state, view)
        self.close(state)
        return forked

    def check_integrity(self, states: Sequence[StateT]) -> None:
        """Raise AssertionError if the slots of all open states contradict them."""

    def read(self, states: Sequence[StateT], counts: Sequence[int]) -> None:
        """Prefill prompts along with the target, which has just read `counts` tokens of each."""

    def is_ready(self, state: StateT) -> bool:
        """Return whether few enough tokens are unread for a tree to pay off."""
        return True

    @abstractmethod
    def catch_up(self, states: Sequence[StateT], ahead: Sequence[int]) -> Logits:
        """Read the unread tokens of every sequence; return the logits after them, one row per sequence.

        Args:
            states: the sequences.
            ahead: for each the maximum number of positions of a tree after its last token.
        """

    @abstractmethod
    def feed(
        self, states: Sequence[StateT], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """Run a pass over new nodes of trees; return their logits, one row per node.

        Args:
            states: the sequences.
            tokens: for each the new nodes' tokens, in the tree's vocabulary.
            parents: for each their parents, counted as they were fed; or -1 for the text's last token.
        """

    @property
    def most_children(self) -> int:
        """Maximum number of children of a node in `trees`; 0 if there is no `trees`.

        A stepper with own estimates (`confidence`) has none.
        """
        return 0

    def trees(self, states: Sequence[StateT], shape: TreeWidths, searches: Sequence[TreeSearch]) -> list[FoundTree]:
        """Do as `catch_up`, and grow a tree after every text, with the choices of `catch_up` and `feed`.

        Args:
            states: the sequences.
            shape: shape of the trees.
            searches: how the nodes of each tree are chosen.

        Returns:
            The trees; a node whose share is NaN or minus infinity is left out.
        """
        raise NotImplementedError("trees grow level by level")

    def confidence(self) -> Sequence[float] | None:
        """Return own estimates for the rows of the last logits: the probability that the first child is the pick.

        Returns:
            None for steppers without such estimates.
        """
        return None

    @abstractmethod
    def keep(self, states: Sequence[StateT], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of those that were read; histories already contain the written tokens.

        Args:
            states: the sequences.
            paths: for each the accepted nodes, in order from the root down.
        """

    @abstractmethod
    def follow(self, states: Sequence[StateT], trees: Sequence[TokenTree]) -> None:
        """Do as `keep` for trees in the model's own tokens, whose acceptance follows from the text."""


class AnsweringStepper(Stepper[StateT]):
    """Stepper that keeps the states from which logits were computed, so that corrections can be learned."""

    answered: Tensor | None = None
    """States of the rows of the last logits, shape (rows, hidden); None before the first logits."""

    @property
    def footprint(self) -> Footprint:
        """Memory of its own in bytes."""
        return NOTHING

    def learn(self, states: Sequence[StateT], hidden: Sequence[Tensor | None]) -> None:
        """Note the target's hidden states, shape (rows, layers, hidden) for each sequence; None for none."""
