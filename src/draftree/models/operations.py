"""Operations on slots as plain data: passes, their results, and edits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.sampling.logits import Logits


class Slot(ABC):
    """Memory of one sequence in a model. Mutated by its model only."""

    @property
    @abstractmethod
    def id(self) -> int:
        """Lowest free number when the slot was opened; the same operations on two models give the same ids."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens in the committed prefix."""

    @property
    @abstractmethod
    def num_tentative(self) -> int:
        """Number of tokens in the tentative tree."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Facts about a text for a model that applies controls itself.

    Attributes:
        history: prompt and written tokens, read only.
        controls: controls of the request.
        limit: maximum tokens of prompt and output.
        is_plain: whether no drafter drafts for this text.
    """

    history: History
    controls: Controls
    limit: int
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Extend:
    """Job of a pass: tokens to append to a slot's tentative tree.

    Attributes:
        slot: the slot.
        tokens: the token ids.
        parents: for each token the tentative node it follows, or -1 for the end of the prefix; nodes are counted over
            the slot's whole tentative tree, earlier passes included.
        logits_at: indices of the tokens whose logits are requested, ascending; None for all.
    """

    slot: Slot
    tokens: Sequence[int]
    parents: Sequence[int]
    logits_at: Sequence[int] | None = None

    @property
    def num_logits(self) -> int:
        """Number of requested rows of logits."""
        return len(self.tokens) if self.logits_at is None else len(self.logits_at)


@dataclass(frozen=True, slots=True)
class LayerSubset:
    """Subset of a model's layers; the final norm and the head are always included.

    Attributes:
        end: this layer and all later ones are skipped; None to skip none of them.
        attention: layers whose attention is skipped.
        mlp: layers whose multilayer perceptron is skipped.
    """

    end: int | None = None
    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @property
    def is_beginning(self) -> bool:
        """Whether the subset is the first `end` layers, complete."""
        return self.end is not None and not self.attention and not self.mlp

    def num_sublayers(self, num_layers: int) -> int:
        """Return the number of attentions and perceptrons in this subset of `num_layers` layers."""
        end = num_layers if self.end is None else self.end
        return 2 * end - sum(layer < end for left_out in (self.attention, self.mlp) for layer in left_out)


ALL_LAYERS = LayerSubset()


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, as plain host data.

    A pass through a subset of the layers computes partial nodes, on the slots' own keys and values. It requires an
    empty tentative tree, and the parents of its jobs count partial nodes only. Every edit and every whole pass of a
    slot drops its partial nodes; a whole pass first reuses the hidden states of partial nodes from the first layers.

    Attributes:
        jobs: at most one for each slot.
        layers: layers to run.
        capture: layers whose input, the residual stream, is returned for every row; the number of layers selects the
            output of the last layer, before the final norm.

    Raises:
        ValueError: `capture` has negative or duplicate entries.
    """

    jobs: Sequence[Extend]
    layers: LayerSubset = ALL_LAYERS
    capture: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.capture and (len(set(self.capture)) < len(self.capture) or min(self.capture) < 0):
            raise ValueError(f"capture={self.capture} must name different layers, counted from 0")


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass, rows in the order of the jobs.

    Attributes:
        logits: logits of the requested rows of all jobs.
        starts: for each job its first row in `logits`; then the number of rows.
        hidden: captured hidden states, shape (rows of all jobs, captured layers, hidden); None without `capture`.
        row_starts: for each job its first row in `hidden`; then the number of rows.
    """

    logits: Logits
    starts: tuple[int, ...]
    hidden: Tensor | None = None
    row_starts: tuple[int, ...] = ()

    @staticmethod
    def of_jobs(jobs: Sequence[Extend], logits: Logits, hidden: Tensor | None = None) -> PassResult:
        """Return the result of a pass over these jobs."""
        rows = () if hidden is None else (0, *accumulate(len(job.tokens) for job in jobs))
        return PassResult(logits, (0, *accumulate(job.num_logits for job in jobs)), hidden, rows)

    def of(self, job: int) -> Logits:
        """Return logits of one job's requested rows."""
        return self.logits.rows(self.starts[job], self.starts[job + 1])

    def first(self, jobs: int) -> Logits:
        """Return logits of the first `jobs` jobs."""
        return self.logits if jobs + 1 == len(self.starts) else self.logits.rows(0, self.starts[jobs])

    def hidden_of(self, job: int) -> Tensor:
        """Return the captured hidden states of one job's rows, shape (tokens, captured layers, hidden)."""
        assert self.hidden is not None, "the pass captured something"
        return self.hidden[self.row_starts[job] : self.row_starts[job + 1]]


@dataclass(frozen=True, slots=True)
class Commit:
    """Edit: append a path of tentative nodes to the prefix.

    Attributes:
        slot: the slot.
        path: the nodes, in order from the prefix down.
        keep: nodes that stay tentative, ascending, renumbered 0, 1, ... The parent of each is kept as well, or is the
            end of the path (of an empty path: of the prefix). All others are dropped.
    """

    slot: Slot
    path: Sequence[int]
    keep: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Truncate:
    """Edit: keep only the first `length` tokens of a prefix; tentative and partial nodes are dropped."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Edit: open a slot with the first `length` tokens of another slot's prefix and an empty tree."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    """Edit: free a slot, which must not be used again."""

    slot: Slot


Edit = Commit | Truncate | Fork | Close
