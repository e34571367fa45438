"""Model seam: `LanguageModel`, whose slots hold a committed prefix and a tentative tree.

Prefill, decoding, verification and drafting use two calls: `run` computes a pass, `apply` edits slots. Passes and edits
are plain data. Several engines and threads may share a model, under its `lock`.
"""

from __future__ import annotations

import heapq
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, TypeVar, final

import torch
from torch import Tensor

from draftree.core.errors import ModelError, UnsupportedModelError
from draftree.core.tensors import synchronize
from draftree.models.memory import NOTHING, Footprint
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.sampling.logits import Logits, RowNoise
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


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


@dataclass(slots=True, eq=False)
class CountedSlot(Slot):
    """Slot of a model that keeps keys and values elsewhere, or none. Mutated by its model only."""

    id: int
    length: int = 0
    num_tentative: int = 0

    def note(self, edit: Commit | Truncate) -> None:
        """Count the tokens that an edit leaves."""
        match edit:
            case Commit(_, path, keep):
                self.length, self.num_tentative = self.length + len(path), len(keep)
            case Truncate(_, length):
                self.length, self.num_tentative = length, 0


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
        settled: number of first tokens that belong to the text whatever is accepted: a chain after the prefix of a
            slot without a tree, at the start of the path of its next commit. A recurrent state moves on over them.
    """

    slot: Slot
    tokens: Sequence[int]
    parents: Sequence[int]
    logits_at: Sequence[int] | None = None
    settled: int = 0

    @property
    def num_logits(self) -> int:
        """Number of requested rows of logits."""
        return len(self.rows)

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the tokens whose logits are requested."""
        return range(len(self.tokens)) if self.logits_at is None else self.logits_at


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
    """Edit: keep only the first `length` tokens of a prefix, a `cut_length` of it, and no tentative or partial node."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Edit: open a slot with the first `length` tokens of another's prefix, a `cut_length` of it, and an empty tree."""

    slot: Slot
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    """Edit: free a slot, which must not be used again."""

    slot: Slot


Edit = Commit | Truncate | Fork | Close


T = TypeVar("T")


@final
class ModelLock:
    """Lets one thread at a time use a model, and others between the passes of a thread that runs many.

    Python's locks are not fair: a thread that runs pass after pass would keep the others out. So short uses wait at a
    gate that every pass has to go through. `with` acquires both locks in C, so that an exception of a signal handler
    leaves neither of them held.
    """

    def __init__(self) -> None:
        self._gate, self._use = threading.RLock(), threading.RLock()
        self._user: int | None = None
        self._process = os.getpid()
        self._postponed: deque[Callable[[], object]] = deque()

    def run(self, use: Callable[[], T]) -> T:
        """Run a pass, or several that belong together; immediately within another use by this thread.

        Raises:
            ModelError: the process was forked after the model was loaded.
        """
        if self._user == threading.get_ident():
            return use()
        self._require_process()
        with self._gate:
            pass
        with self._use:
            result = self._used(use)
        self._run_postponed()
        return result

    def between(self, use: Callable[[], T]) -> T:
        """Run a short use of the model or of its engines before the next pass of any thread; otherwise as `run`."""
        if self._user == threading.get_ident():
            return use()
        self._require_process()
        with self._gate, self._use:
            result = self._used(use)
        self._run_postponed()
        return result

    def later(self, use: Callable[[], object]) -> None:
        """Run a use now, or after the current one. Never waits: the garbage collector may call it in any place."""
        self._postponed.append(use)
        self._run_postponed()

    def _used(self, use: Callable[[], T]) -> T:
        self._user = threading.get_ident()
        try:
            return use()
        finally:
            self._user = None

    def _run_postponed(self) -> None:
        # whoever holds the lock runs what was postponed meanwhile, after the release: nothing is forgotten
        while self._postponed and self._user != threading.get_ident() and self._use.acquire(blocking=False):
            try:
                while self._postponed:
                    self._used(self._postponed.popleft())
            finally:
                self._use.release()

    def _require_process(self) -> None:
        # threads of torch do not survive a fork, and passes would wait for them forever
        if os.getpid() != self._process:
            raise ModelError(
                "the process was forked after the model was loaded, and its threads are missing here: load the model "
                "in the child process, or start it with multiprocessing's 'spawn'"
            )


class SlotIds:
    """Allocator of slot ids: the lowest free number for each new slot."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    @property
    def num_taken(self) -> int:
        """Number of ids in use."""
        return self._count - len(self._free)

    def take(self) -> int:
        """Take and return the lowest free number."""
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def free(self, number: int) -> None:
        """Free a number."""
        heapq.heappush(self._free, number)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingFacts:
    """Operations on embeddings before the first layer, and on the product with the output head.

    Attributes:
        embedding_scale: factor of a token's embedding before the first layer. Learned positions, if any, are added
            after it.
        logit_scale: factor of the product with the head.
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)`; None for no cap.
        bias: added to the product before it is scaled, shape (vocab,), float32; None for none.
        is_tied: whether the embedding is known to equal the output head.
    """

    embedding_scale: float
    logit_scale: float
    soft_cap: float | None = None
    bias: Tensor | None = None
    is_tied: bool = False

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        """Return logits of hidden states.

        Args:
            states: outputs of the final norm, shape (..., hidden).
            head: the output head, shape (vocab, hidden).

        Returns:
            Shape (..., vocab), float32.
        """
        products = states.float() @ head.float().T
        if self.bias is not None:
            products = products + self.bias
        return self.capped(products)

    def capped(self, products: Tensor) -> Tensor:
        """Return logits from products with the head, bias included."""
        scaled = products * self.logit_scale
        return scaled if self.soft_cap is None else self.soft_cap * torch.tanh(scaled / self.soft_cap)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of the self-check: maximum differences from the reference, relative to the range of the logits.

    `is_exact`: whether every node has the same bits as when its branch is read token by token, in the small tree and,
    for native kernels and fixed shapes, in all comparisons of `rounds_alike`.
    """

    chain_error: float
    tree_error: float
    tolerance: float
    is_exact: bool = False

    @property
    def chains_ok(self) -> bool:
        """Whether chains are scored within the tolerance."""
        return self.chain_error <= self.tolerance

    @property
    def trees_ok(self) -> bool:
        """Whether trees are scored within the tolerance."""
        return self.tree_error <= self.tolerance

    @property
    def error(self) -> float:
        """The larger one of both differences."""
        return max(self.chain_error, self.tree_error)


class LanguageModel(ABC):
    """A causal language model with slots."""

    vocab_size: int
    max_length: int
    """Maximum number of positions: prefix plus tree depth."""
    supports_trees: bool
    """Whether tentative trees may branch; if False, they must be chains."""
    device: torch.device
    dtype: torch.dtype
    is_exact: bool = False
    """Whether a token's logits are bit-identical alone, in any tree and in any batch."""
    fingerprint: str = ""
    """Identity of the weights, independent of the name; empty if unknown."""
    num_layers: int = 0
    """Number of layers that `LayerSubset` can select from; 0 if only whole passes are supported."""
    applies_controls: bool = False
    """Whether passes return final picks in place of logits: the model applies controls and noise of requests itself."""
    returns_states: bool = False
    """Whether a model that applies controls returns hidden states of the accepted path nevertheless."""
    max_open: int | None = None
    """Most slots that may be open at the same time; None if only memory limits them."""
    num_sublayer_runs: int = 0
    """Rows computed by attentions and perceptrons so far, summed over sublayers."""
    self_check: CheckResult | None = None
    """Result of the self-check at load; None if it was not run."""
    streams_weights: bool = False
    """Whether passes read weights from a file, so that one over hundreds of rows costs hardly more than over one."""

    @final
    @property
    def lock(self) -> ModelLock:
        """The lock of all threads and engines that use the model; passes are run and slots are edited under it."""
        return self.__dict__.setdefault("_lock_of_model", ModelLock())

    @final
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle or copy a model, whose slots and native memory have no copy."""
        raise TypeError(f"{type(self).__name__} can be neither pickled nor copied: load the model again, or share it")

    @property
    def here(self) -> LanguageModel:
        """The model whose passes run in this process: this one, unless layers of it run elsewhere."""
        return self

    @property
    def footprint(self) -> Footprint:
        """Memory of the model in bytes; zero if negligible."""
        return NOTHING

    @property
    def note(self) -> str:
        """Message for the user about the passes so far; empty if there is none."""
        return ""

    def known_costs(self, max_rows: int) -> Mapping[int, float] | None:
        """Return seconds of passes by rows, up to at least `max_rows`; None if they have to be measured."""
        return None

    def opener(self, request: SlotRequest) -> Callable[[], Slot] | None:
        """Return a function that opens the slot of a request; None if token ids alone determine a slot.

        Raises:
            InvalidRequestError: the model cannot honour a parameter of the request.
        """
        return None

    @property
    def num_warm_ups(self) -> int:
        """Number of slower first passes of each shape."""
        return 0

    def synchronize(self) -> None:
        """Wait until the device has finished all queued passes."""
        synchronize(self.device)

    def settle(self) -> None:
        """Finish work that would slow the first passes, such as copies of mapped weights. Call it before measuring."""
        return

    @property
    def num_open(self) -> int:
        """Number of open slots; 0 if the model does not count them."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping of slots contradicts itself; for tests and soaks."""
        assert self.num_open >= 0, "no slot is closed twice"

    @abstractmethod
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` open slots of `length` tokens, tentative ones included. Open slots are kept."""

    @abstractmethod
    def open(self) -> Slot:
        """Return an empty slot."""

    def open_probe(self) -> Slot:
        """Return an empty slot for checks and measurements."""
        return self.open()

    def cut_length(self, slot: Slot, length: int) -> int:
        """Return the largest length, at most `length`, at which `Truncate` and `Fork` can cut a slot's prefix.

        Keys and values can be cut anywhere; a recurrent state only where it was kept, and at the end.
        """
        return length

    @abstractmethod
    def run(self, pass_: Pass) -> PassResult:
        """Append tentative (or partial) nodes to slots, all in one batched pass.

        Raises:
            UnsupportedModelError: the model cannot capture these layers.
        """

    def decode(
        self, jobs: Sequence[Extend], noise: Sequence[RowNoise], stop_ids: Collection[int], *, seconds: float
    ) -> list[list[int]]:
        """Run several passes of plain decoding in one call: each reads the tokens that the one before chose.

        All tokens that were read are a tentative chain afterwards.

        Args:
            jobs: the last token of each text, after the prefix of a slot without a tree.
            noise: noise of the rows of every pass, at most as many passes.
            stop_ids: tokens after which no pass follows.
            seconds: time after which no pass begins.

        Returns:
            The tokens of each pass. None, without an effect, if passes have to run one by one, or if the first choice
            has to be made from the logits, which are close or not finite.
        """
        return []

    def grow(self, jobs: Sequence[Extend], shape: TreeWidths, searches: Sequence[TreeSearch]) -> list[FoundTree] | None:
        """Append chains to prefixes, and grow a tree of likely tokens after each, without the host between its levels.

        Nodes that were read are tentative afterwards, numbered as in `FoundTree.read`; other numbers are unused.

        Args:
            jobs: chains of new tokens, with logits after the last one.
            shape: shape of the trees.
            searches: how the nodes of each tree are chosen.

        Returns:
            None, without an effect, if the trees have to grow level by level.
        """
        return None

    @abstractmethod
    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits in order; returns the slots that forks opened. Successive commits are one operation."""

    def require_part(self, part: LayerSubset) -> None:
        """Raise UnsupportedModelError if this part cannot be run."""
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot run a part of its layers: choose a drafter that runs none"
        )

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Return a copy with weights of fewer bits that appends partial nodes to this model's slots.

        Raises:
            UnsupportedModelError: the model has none.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} has no copy with {quantization} weights, which needs native kernels"
        )

    def input_embedding(self) -> Tensor:
        """Return the embedding as passes use it, shape (vocab, hidden), in the model's dtype; read only.

        Raises:
            UnsupportedModelError: the model does not expose it.
        """
        return self._elsewhere("input embedding").input_embedding()

    def output_head(self) -> Tensor:
        """Return the output head as passes use it, shape (vocab, hidden), in the model's dtype; read only.

        int8 weights are returned multiplied by their scales.

        Raises:
            UnsupportedModelError: the model does not expose it.
        """
        return self._elsewhere("output head").output_head()

    def embedding_facts(self) -> EmbeddingFacts:
        """Return how the model uses its embedding and its head.

        Raises:
            UnsupportedModelError: `EmbeddingFacts` cannot express it.
        """
        return self._elsewhere("output head").embedding_facts()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return outputs of the last layer after the final norm, computed in float32.

        `embedding_facts().logits(final_norm(hidden), output_head())` gives the logits of a pass within rounding.

        Args:
            hidden: captured outputs of the last layer, shape (..., hidden), any floating dtype.

        Returns:
            The same shape, float32.

        Raises:
            UnsupportedModelError: what follows the last layer is not one norm, or is unknown.
        """
        return self._elsewhere("final norm").final_norm(hidden)

    def last_keys(self, slot: Slot, *, has_window: bool) -> tuple[Tensor, Tensor]:
        """Return keys and values of a slot's prefix in the last layer with a sliding window, or in the last without.

        Returns:
            Views, read only, both of shape (kv_heads, length, head_dim).

        Raises:
            UnsupportedModelError: the model has no such layer, or does not show them.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} does not show its keys and values: choose a drafter that has its own"
        )

    def _elsewhere(self, part: str) -> LanguageModel:
        """Return the model in this process that has the embedding and the head of this one, if it is another."""
        if self.here is self:
            raise UnsupportedModelError(f"{type(self).__name__} has no {part}: choose a drafter that needs none")
        return self.here

    def require_capture(self, layers: Sequence[int]) -> None:
        """Check that the hidden states of these layers can be captured.

        Raises:
            UnsupportedModelError: the model cannot capture these layers.
        """
        if layers:
            raise UnsupportedModelError(
                f"{type(self).__name__} does not return hidden states of its layers: choose a drafter that needs none"
            )

    @final
    def commit(self, slot: Slot, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Apply a `Commit`."""
        self.apply([Commit(slot, path, keep)])

    @final
    def truncate(self, slot: Slot, length: int) -> None:
        """Apply a `Truncate`."""
        self.apply([Truncate(slot, length)])

    @final
    def fork(self, slot: Slot, length: int | None = None) -> Slot:
        """Apply a `Fork`; None copies the whole prefix."""
        return self.apply([Fork(slot, slot.length if length is None else length)])[0]

    @final
    def close(self, slot: Slot) -> None:
        """Apply a `Close`."""
        self.apply([Close(slot)])
