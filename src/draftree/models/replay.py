"""Target that replays recorded sequences: passes return their tokens and cost measured seconds; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, final

import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    CountedSlot,
    Edit,
    Extend,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    SlotRequest,
    Truncate,
)
from draftree.sampling.logits import PickedRows
from draftree.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class RecordedText:
    prompt: tuple[int, ...]  # token ids of the prompt
    tokens: tuple[int, ...]  # the text, the token that ended it included
    params: SamplingParams  # parameters of its request
    seed: int  # seed of its noise
    is_ended: bool = False  # whether it ended by itself, before the limit of its request
    layers: tuple[int, ...] = ()  # layers whose input was recorded, counted from 0; see `Pass.capture`
    # these states at every token of prompt and text but the last, shape (tokens, layers, hidden)
    hidden: Tensor | None = None

    def answers(self, request: SlotRequest) -> bool:
        """Return whether a request with the same prompt writes this text, or the beginning of it."""
        controls, start = request.controls, len(self.prompt)
        kept = self.params.resolved()
        names = (each.name for each in fields(SamplingParams) if each.name != "max_tokens")
        same = all(getattr(controls.params, name) == getattr(kept, name) for name in names)
        enough = self.is_ended or request.limit - start <= len(self.tokens)
        prompt = tuple(request.history.tokens[:start].tolist())
        return same and enough and prompt == self.prompt and controls.noise.seed == self.seed


class ReplayCosts(Protocol):
    def pass_seconds(self, rows: int) -> float:
        """Return the seconds of a pass over so many tokens."""

    def pick_seconds(self, rows: int, temperature: float) -> float:
        """Return the seconds of the picks of so many rows."""


@final
class ReplayClock:
    """A clock on which passes that are not computed take their measured time."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock, self._added = clock, 0.0

    def __call__(self) -> float:
        return self._clock() + self._added

    def charge(self, since: float, seconds: float) -> None:
        self._added += since + seconds - self()


BESIDE = -1  # pick at a node beside the text: it is not known, and the walk does not reach it


@final
@dataclass(slots=True, eq=False)
class ReplaySlot(CountedSlot):
    text: RecordedText = field(kw_only=True)

    def places(self, job: Extend) -> list[int | None]:
        """Return for each node its position in prompt and text; None for a node beside them."""
        text, start = self.text, len(self.text.prompt)
        places: list[int | None] = []
        for token, parent in zip(job.tokens, job.parents, strict=True):
            before = self.length - 1 if parent < 0 else places[parent]
            place = None if before is None else before + 1
            if place is not None and place >= start and text.tokens[place - start : place - start + 1] != (token,):
                place = None
            places.append(place)
        return places

    def picks(self, job: Extend, places: Sequence[int | None]) -> list[int]:
        """Return the text's next token at each requested row."""
        tokens, start = self.text.tokens, len(self.text.prompt)
        nexts = [None if (place := places[row]) is None else place + 1 - start for row in job.rows]
        return [BESIDE if after is None or not 0 <= after < len(tokens) else tokens[after] for after in nexts]

    def states(self, places: Sequence[int | None], layers: Sequence[int]) -> Tensor:
        """Return recorded states at positions, zeros beside the text, shape (positions, layers, hidden)."""
        text = self.text
        missing = [layer for layer in layers if text.hidden is None or layer not in text.layers]
        if missing or text.hidden is None:
            raise UnsupportedModelError(f"hidden states of layers {missing} were not recorded")
        columns = [text.layers.index(layer) for layer in layers]
        known = [None if place is None or place >= len(text.hidden) else place for place in places]
        states = text.hidden[[place or 0 for place in known]][:, columns]
        states[[place is None for place in known]] = 0
        return states


def replayed(slot: Slot) -> ReplaySlot:
    assert isinstance(slot, ReplaySlot), "a replayed target has replay slots"
    return slot


@final
class ReplayModel(LanguageModel):
    """A target that replays a recorded text.

    Under a rule that follows the target's picks, the text does not depend on drafts, and the pick after any
    beginning of the text is its next token. One recorded text therefore determines the verdict on every draft of
    every drafter, tree shape and planner: nodes on the text are accepted, nodes beside it are rejected. The engine,
    the drafter and the planner run as with the recorded target, on a clock to which the seconds of the passes are
    added.

    Not replayable: picks beside the text (`DraftTraits.wants_picks`) and passes through a part of the target's
    layers. Hidden states of the text are returned if they were recorded.
    """

    applies_controls = True
    returns_states = True

    def __init__(self, model: LanguageModel, costs: ReplayCosts, clock: ReplayClock) -> None:
        self._model = model
        self._costs = costs
        self._clock = clock
        self.text: RecordedText | None = None  # what is replayed; None before the first one is set
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
        return len(self._slots)

    def known_costs(self, max_rows: int) -> Mapping[int, float]:
        return {rows: self._costs.pass_seconds(rows) for rows in range(1, max_rows + 1)}

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing: slots hold no keys and values."""

    def open(self) -> Slot:
        raise UnsupportedModelError("a replayed target runs no passes over other texts than the recorded one")

    def opener(self, request: SlotRequest) -> Callable[[], Slot]:
        text = self.text
        if text is None or not text.answers(request):
            raise InvalidRequestError("the request is not the recorded one: a replay writes the recorded text only")
        return lambda: self._open(text)

    def _open(self, text: RecordedText) -> ReplaySlot:
        number = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._slots[number] = ReplaySlot(number, text=text)
        return self._slots[number]

    def run(self, pass_: Pass) -> PassResult:
        start = self._clock()
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
        picks: list[int] = []
        states: list[Tensor] = []
        for job in pass_.jobs:
            slot = replayed(job.slot)
            places = slot.places(job)
            picks += slot.picks(job, places)
            if pass_.capture:
                states.append(slot.states(places, pass_.capture))
            slot.num_tentative += len(job.tokens)
        hidden = torch.cat(states) if states else None
        self._clock.charge(start, self._costs.pass_seconds(sum(len(job.tokens) for job in pass_.jobs)))
        return PassResult.of_jobs(pass_.jobs, PickedRows(picks, self.vocab_size, self._charge_picks), hidden)

    def _charge_picks(self, rows: int) -> None:
        temperature = 0.0 if self.text is None else self.text.params.sampling.temperature
        self._clock.charge(self._clock(), self._costs.pick_seconds(rows, temperature))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        for edit in edits:
            slot = replayed(edit.slot)
            match edit:
                case Commit() | Truncate():
                    slot.note(edit)
                case Fork():
                    raise UnsupportedModelError("slots of a replayed target cannot be copied")
                case Close():
                    del self._slots[slot.id]
        return []

    def require_part(self, part: LayerSubset) -> None:
        raise UnsupportedModelError("it drafts with layers of the target, which a replay does not compute")

    def quantized_copy(self, quantization: str) -> LanguageModel:
        raise UnsupportedModelError("it drafts with a copy of the target on its slots, which a replay does not compute")

    def require_capture(self, layers: Sequence[int]) -> None:
        self._model.require_capture(layers)
