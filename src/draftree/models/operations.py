"""Operations on slots as plain data: passes, their results, and edits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from draftree.sampling.logits import Logits


class Slot(ABC):
    """One sequence's place in the memory of a model. Mutated by its model only."""

    @property
    @abstractmethod
    def id(self) -> int:
        """The lowest number that was free when the slot was opened: two models that do the same use the same ids."""

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
        parents: for each token the tentative node it follows, or -1 for the end of the prefix; nodes are counted over
            the slot's whole tentative tree, earlier passes included.
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


ALL_LAYERS = LayerSubset()


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass computes: plain host data.

    A pass through a part of the layers computes partial nodes, on the slots' own keys and values. The tentative tree
    must be empty, and the parents of a job count partial nodes alone. Every edit and every whole pass of the slot ends
    them; where the part is the beginning of a whole pass, that one takes over what it would compute again.

    Attributes:
        jobs: a slot occurs in one of them at most.
        layers: the layers that the rows run through.
        capture: layers whose input, the residual stream, is returned for every row; the number of layers stands for
            what comes out of the last one, before the final norm. ValueError if it names a layer twice.
    """

    jobs: Sequence[Extend]
    layers: LayerSubset = ALL_LAYERS
    capture: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.capture and (len(set(self.capture)) < len(self.capture) or min(self.capture) < 0):
            raise ValueError(f"capture={self.capture} must name different layers, counted from 0")


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass returned, job after job.

    Attributes:
        logits: of the requested rows of all jobs.
        starts: for each job its first row in `logits`; then the number of rows.
        hidden: what was captured, shape (rows of all jobs, captured layers, hidden); None without `capture`.
        row_starts: for each job its first row in `hidden`; then the number of rows.
    """

    logits: Logits
    starts: tuple[int, ...]
    hidden: Tensor | None = None
    row_starts: tuple[int, ...] = ()

    @staticmethod
    def of_jobs(jobs: Sequence[Extend], logits: Logits, hidden: Tensor | None = None) -> PassResult:
        """The result of a pass over these jobs."""
        rows = () if hidden is None else (0, *accumulate(len(job.tokens) for job in jobs))
        return PassResult(logits, (0, *accumulate(job.num_logits for job in jobs)), hidden, rows)

    def of(self, job: int) -> Logits:
        """Logits of one job's requested rows."""
        return self.logits.rows(self.starts[job], self.starts[job + 1])

    def first(self, jobs: int) -> Logits:
        """Logits of the first jobs."""
        return self.logits if jobs + 1 == len(self.starts) else self.logits.rows(0, self.starts[jobs])

    def hidden_of(self, job: int) -> Tensor:
        """What was captured of one job's rows, shape (tokens, captured layers, hidden)."""
        assert self.hidden is not None, "the pass captured something"
        return self.hidden[self.row_starts[job] : self.row_starts[job + 1]]


@dataclass(frozen=True, slots=True)
class Commit:
    """Make a path of tentative nodes prefix.

    Attributes:
        slot: where.
        path: the nodes, in order from the prefix down.
        keep: nodes that stay tentative, ascending, renumbered 0, 1, ... The parent of each is kept as well, or is the
            end of the path (of an empty path: of the prefix). All others are dropped.
    """

    slot: Slot
    path: Sequence[int]
    keep: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep the first `length` tokens of a prefix, and nothing tentative or partial."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Open a slot with the first `length` tokens of another's prefix, and an empty tree."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    """Free a slot. It must not be used again."""

    slot: Slot


Edit = Commit | Truncate | Fork | Close
