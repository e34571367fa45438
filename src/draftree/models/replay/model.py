"""A target that replays one recorded text: passes return its picks and cost measured seconds, and nothing is computed.

Under a rule that follows the target's picks, the text does not depend on drafts, and the pick after any beginning of
the text is its next token. One recorded text therefore determines the verdict on every draft of every drafter, tree
shape and planner: nodes on the text are accepted, nodes beside it are rejected. The engine, the drafter and the planner
run as with the recorded target, on a clock to which the seconds of the passes are added.

Not replayable: picks beside the text (`DraftTraits.wants_picks`) and passes through a part of the target's layers.
Hidden states of the text are returned if they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    SlotRequest,
    Truncate,
)
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.replay.slots import ReplaySlot, replayed
from draftree.models.replay.text import RecordedText, ReplayClock, ReplayCosts
from draftree.sampling.logits import PickedRows

__all__ = ["ReplayModel"]


@final
class ReplayModel(LanguageModel):
    """A target that replays a recorded text.

    Args:
        model: the recorded target; its embedding and its output head are used by drafters that share them.
        costs: seconds of its passes.
        clock: charged with them.

    Attributes:
        text: what is replayed; None before the first one is set.
    """

    applies_controls = True
    returns_states = True

    def __init__(self, model: LanguageModel, costs: ReplayCosts, clock: ReplayClock) -> None:
        self._model, self._costs, self._clock = model, costs, clock
        self.text: RecordedText | None = None
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.supports_trees, self.is_exact = model.supports_trees, model.is_exact
        self.device, self.dtype = model.device, model.dtype
        self.fingerprint, self.num_layers = model.fingerprint, model.num_layers
        self._slots: dict[int, ReplaySlot] = {}

    @property
    def here(self) -> LanguageModel:
        """The recorded model, for drafters whose passes use its threads."""
        return self._model.here

    @property
    def num_open(self) -> int:
        """Open slots."""
        return len(self._slots)

    def known_costs(self, max_rows: int) -> Mapping[int, float]:
        """Return the measured seconds of passes by rows."""
        return {rows: self._costs.pass_seconds(rows) for rows in range(1, max_rows + 1)}

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing: slots hold no keys and values."""

    def open(self) -> Slot:
        """Raise: there are no passes over other texts."""
        raise UnsupportedModelError("a replayed target runs no passes over other texts than the recorded one")

    def opener(self, request: SlotRequest) -> Callable[[], Slot]:
        """Return a function that opens the slot of the recorded text.

        Raises:
            InvalidRequestError: the request is not the recorded one.
        """
        text = self.text
        if text is None or not text.answers(request):
            raise InvalidRequestError("the request is not the recorded one: a replay writes the recorded text only")
        return lambda: self._open(text)

    def _open(self, text: RecordedText) -> ReplaySlot:
        number = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._slots[number] = ReplaySlot(number, text)
        return self._slots[number]

    def run(self, pass_: Pass) -> PassResult:
        """Return the picks of the text, and its hidden states.

        Raises:
            UnsupportedModelError: the states of a layer were not recorded, or the pass leaves layers out.
        """
        start = self._clock()
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
        slots = [replayed(job.slot) for job in pass_.jobs]
        ways = [slot.places(job) for slot, job in zip(slots, pass_.jobs, strict=True)]
        picks = [pick for slot, job, way in zip(slots, pass_.jobs, ways, strict=True) for pick in slot.picks(job, way)]
        hidden = None
        if pass_.capture:
            hidden = torch.cat([slot.states(way, pass_.capture) for slot, way in zip(slots, ways, strict=True)])
        for slot, job in zip(slots, pass_.jobs, strict=True):
            slot.tentative += len(job.tokens)
        self._clock.charge(start, self._costs.pass_seconds(sum(len(job.tokens) for job in pass_.jobs)))
        return PassResult.of_jobs(pass_.jobs, PickedRows(picks, self.vocab_size, self._charge_picks), hidden)

    def _charge_picks(self, rows: int) -> None:
        temperature = 0.0 if self.text is None else self.text.params.sampling.temperature
        self._clock.charge(self._clock(), self._costs.pick_seconds(rows, temperature))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Note what the slots hold."""
        for edit in edits:
            slot = replayed(edit.slot)
            match edit:
                case Commit(_, path, keep):
                    slot.held, slot.tentative = slot.held + len(path), len(keep)
                case Truncate(_, length):
                    slot.held, slot.tentative = length, 0
                case Fork():
                    raise UnsupportedModelError("slots of a replayed target cannot be copied")
                case Close():
                    del self._slots[slot.id]
        return []

    def require_part(self, part: LayerSubset) -> None:
        """Raise: no layer is computed."""
        raise UnsupportedModelError("it drafts with layers of the target, which a replay does not compute")

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Raise: no layer is computed."""
        raise UnsupportedModelError("it drafts with a copy of the target on its slots, which a replay does not compute")

    def require_capture(self, layers: Sequence[int]) -> None:
        """Check that the recorded model has these layers."""
        self._model.require_capture(layers)

    def input_embedding(self) -> Tensor:
        """Return the embedding of the recorded model."""
        return self._model.input_embedding()

    def output_head(self) -> Tensor:
        """Return the output head of the recorded model."""
        return self._model.output_head()

    def embedding_facts(self) -> EmbeddingFacts:
        """Return how the recorded model uses both."""
        return self._model.embedding_facts()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the final norm of the recorded model."""
        return self._model.final_norm(hidden)
