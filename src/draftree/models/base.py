"""The model seam: a slot holds a committed prefix and a tentative tree.

Prefill, decoding, verification, a drafter that grows its tree level by level and beam search are all `extend`
and `commit`. So is a model behind a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.transfer import synchronize
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.memory import NOTHING, Footprint
from draftree.sampling.searcher import RowsAt, rows_of

if TYPE_CHECKING:
    from draftree.models.check import CheckResult


class Slot(ABC):
    """One sequence's place in the memory of a model. Mutated by its model only."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the committed prefix."""

    @property
    @abstractmethod
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens to append to a slot's tentative tree in one pass.

    Attributes:
        slot: where.
        tokens: the token ids.
        parents: for each token the tentative node it follows (counted over the slot's whole tentative tree, so
            earlier calls' nodes can be named), or -1 for the end of the committed prefix.
        logits_at: which of these tokens' logits are wanted, ascending; None for all.
    """

    slot: Slot
    tokens: Sequence[int]
    parents: Sequence[int]
    logits_at: Sequence[int] | None = None

    @property
    def num_logits(self) -> int:
        """Rows of logits this job asks for."""
        return len(self.tokens) if self.logits_at is None else len(self.logits_at)


@dataclass(frozen=True, slots=True)
class LayerSubset:
    """A part of a model's layers; the final norm and the head always belong to it.

    Attributes:
        end: layers from this one on are left out; None for none of them.
        attention: layers whose attention is left out.
        mlp: layers whose multilayer perceptron is left out.
    """

    end: int | None = None
    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @property
    def is_beginning(self) -> bool:
        """Whether a whole pass begins with just what this part computes."""
        return self.end is not None and not self.attention and not self.mlp

    def num_sublayers(self, num_layers: int) -> int:
        """Attentions and perceptrons in this part of so many layers."""
        end = num_layers if self.end is None else self.end
        return 2 * end - sum(layer < end for left_out in (self.attention, self.mlp) for layer in left_out)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass gave: the asked logits of all jobs, job after job.

    Attributes:
        given: the logits; None if there is no tensor yet, but `at` knows where they lie.
        starts: first row of each job, and the total behind them.
        at: where the logits lie, if that is known.
    """

    given: Tensor | None
    starts: tuple[int, ...]
    at: RowsAt | None = None

    @property
    def logits(self) -> Tensor:
        """Shape (asked rows, vocab); float32, or float64 for a float64 model."""
        return rows_of(self.given, self.at)

    def first(self, jobs: int) -> Scores:
        """Logits of the first jobs alone."""
        end = self.starts[jobs]
        if end == self.starts[-1]:
            return self
        given = None if self.given is None else self.given[:end]
        return Scores(given, self.starts[: jobs + 1], None if self.at is None else self.at._replace(rows=end))

    def of(self, job: int) -> Tensor:
        """Logits of one job, shape (asked rows, vocab); a view."""
        return self.logits[self.starts[job] : self.starts[job + 1]]


class LanguageModel(ABC):
    """A causal language model with slots."""

    vocab_size: int
    max_length: int
    """Positions the model knows: longest prefix plus tree depth."""
    supports_trees: bool
    """False: only chains may be tentative."""
    device: torch.device
    dtype: torch.dtype
    is_exact: bool = False
    """Whether a token's logits are bit-identical, however it is scored: alone, in any tree, in any batch."""
    own_threads: bool = False
    """Whether passes run in threads of the model's own, not in torch's."""
    fingerprint: str = ""
    """Tells this model from others, under whatever name it is loaded; empty if it cannot be told."""
    num_layers: int = 0
    """Layers of which a part can be run; 0 if none can."""
    num_sublayer_runs: int = 0
    """Rows that attentions and perceptrons have computed so far, one count for each row of each of them."""
    self_check: CheckResult | None = None
    """What the check at load found; None where there was none."""

    @property
    def footprint(self) -> Footprint:
        """Bytes that it takes; nothing where it takes next to nothing."""
        return NOTHING

    @property
    def num_warm_ups(self) -> int:
        """Passes of a shape before one takes as long as all later ones."""
        return 0

    def synchronize(self) -> None:
        """Wait until the device has done all passes so far; on a card a pass returns when it is queued."""
        synchronize(self.device)

    @property
    def num_open(self) -> int:
        """Slots that are open now; 0 for a model that need not know."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping of slots contradicts itself; for tests and soaks."""
        assert self.num_open >= 0, "no slot is closed twice"

    @abstractmethod
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for this many open slots of this many tokens, tentative ones included. What is open stays."""

    @abstractmethod
    def open(self) -> Slot:
        """An empty slot."""

    @abstractmethod
    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """Append tentative nodes to slots, all in one batched pass; a slot occurs in one job at most."""

    @abstractmethod
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """These tentative nodes, in order from the prefix down, become prefix; the rest is dropped."""

    @abstractmethod
    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Drop all tentative nodes but these, which keep their order and are renumbered 0, 1, ...

        A kept node needs its parent kept.
        """

    @abstractmethod
    def truncate(self, slot: Slot, length: int) -> None:
        """Only the first `length` tokens of the prefix stay; the tentative tree is dropped."""

    @abstractmethod
    def fork(self, slot: Slot, length: int | None = None) -> Slot:
        """A new slot with the same committed prefix, or with its first `length` tokens, and an empty tree."""

    @abstractmethod
    def close(self, slot: Slot) -> None:
        """Give the slot back. A closed slot must not be used again."""

    def require_part(self, part: LayerSubset) -> None:
        """Refuse a part that cannot be run.

        Raises:
            UnsupportedModelError: the model cannot run this part.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot run a part of its layers: take a drafter that does not ask for one"
        )

    def input_embedding(self) -> Tensor:
        """The embedding as passes use it, shape (vocab, hidden), in the model's dtype; not to be changed.

        Raises:
            UnsupportedModelError: the model has none that can be read.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no input embedding: take a drafter that needs none")

    def output_head(self) -> Tensor:
        """The matrix that makes logits as passes use it, shape (vocab, hidden), in the model's dtype.

        Not to be changed. With int8 weights it is the product of the 8-bit numbers and their scales.

        Raises:
            UnsupportedModelError: the model has none that can be read.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: take a drafter that needs none")

    def embedding_facts(self) -> EmbeddingFacts:
        """How the model uses both.

        Raises:
            UnsupportedModelError: it does more with them than `EmbeddingFacts` can express.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: take a drafter that needs none")

    def require_capture(self, capture: Sequence[int]) -> None:
        """Refuse layers whose input cannot be captured.

        Raises:
            ConfigurationError: the model has no such layer.
            UnsupportedModelError: the model captures nothing.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot capture hidden states: take a drafter that needs none of the target's"
        )

    def sketch(self, jobs: Sequence[Extend], part: LayerSubset) -> Scores:
        """Score tokens with a part of the layers, on the slots' own keys and values.

        Sketched nodes are no tentative nodes: they stand beside the tentative tree, which must be empty, and the
        parents of a job count them alone. `extend` takes over what it would compute again: the keys, values and
        hidden states of sketched nodes that it is given, where the part is the beginning of a whole pass. Whatever
        else happens to the slot ends the sketch, `extend` included.
        """
        raise NotImplementedError

    def erase(self, slots: Sequence[Slot]) -> None:
        """Drop what is sketched in these slots."""
        raise NotImplementedError

    def commit_many(self, slots: Sequence[Slot], paths: Sequence[Sequence[int]]) -> None:
        """`commit` for a batch; a model may do it in fewer operations."""
        for slot, nodes in zip(slots, paths, strict=True):
            self.commit(slot, nodes)


def starts_of(jobs: Sequence[Extend]) -> tuple[int, ...]:
    """First row of each job in `Scores.logits`, and the total behind them."""
    starts = [0]
    for job in jobs:
        starts.append(starts[-1] + job.num_logits)
    return tuple(starts)
