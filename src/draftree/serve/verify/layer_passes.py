"""Passes through the later layers of a model over hidden states of devices, all waiting sequences in one pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from draftree.async_llm import AsyncLLM
from draftree.core.errors import ConfigurationError, EngineClosedError, UnsupportedModelError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.models.base import Extend, LayerSubset
from draftree.models.kv.slots import KVSlot, kv_slot
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.split.exchange import Probe
from draftree.remote.split.messages import RowsEdit, StateFormat
from draftree.sampling.controls import Controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import Logits
from draftree.serve.pool import ServedModel


async def require_divisible(models: Sequence[ServedModel], split: int) -> None:
    """Check loaded models for a server whose devices run the first `split` layers; 0 checks nothing."""
    for model in models if split else ():
        try:
            await probe_of(model, split)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}: serve it without --split") from error


async def probe_of(model: ServedModel, split: int) -> tuple[SlottedModel, Probe]:
    """Return the target of a model whose first layers run on devices, and states that a device compares."""
    target = model.llm.llm.model
    undivided = f"the layers of model '{model.name}' cannot be divided"
    if not isinstance(target, SlottedModel):
        raise ConfigurationError(f"{undivided}: it keeps its own cache")
    if target.streams_weights:
        raise ConfigurationError(f"{undivided}: offload reads them from a file")
    if split >= target.num_layers:
        raise ConfigurationError(
            f"split={split}, and model '{model.name}' has {target.num_layers} layers, so none is left for the server"
        )

    def probed() -> Probe:
        target.require_part(LayerSubset(end=split))
        target.require_capture((split, target.num_layers))
        return Probe.of_whole(target, split)

    try:
        return target, await model.llm.between_steps(probed)
    except UnsupportedModelError as error:
        raise ConfigurationError(f"{undivided}: {error}") from error


logger = logging.getLogger(__name__)

MAX_ROWS = 512  # rows of a pass; a larger text has a pass of its own


@dataclass(slots=True, eq=False)
class LayerText:
    """One open text; `controls` is None if states are returned, `slot` before its first pass."""

    limit: int
    controls: Controls | None
    used: float
    slot: KVSlot | None = None
    settled: int = 0  # first tentative nodes, with which the next path begins
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one text: packed states, for each node one of every layer, or picks. Times are seconds."""

    content: bytes | list[int]
    queue: float
    passed: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """New nodes of one text in a pass.

    `edit` is of the slot before the pass, `length` counts the committed tokens after it; `states` has shape (nodes,
    hidden), the first `settled` nodes belong to the text, and the last `wanted` ones have results. It waits `since` a
    time in seconds for its `answer`.
    """

    text: LayerText
    edit: RowsEdit | None
    length: int
    parents: tuple[int, ...]
    states: Tensor
    wanted: int
    settled: int
    format: StateFormat
    layers: tuple[int, ...]
    since: float
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def slot(self) -> KVSlot:
        assert self.text.slot is not None, "the slot is open"
        return self.text.slot

    def settle(self, result: Answer | Exception) -> None:
        """Set the answer; on any thread."""
        self.answer.get_loop().call_soon_threadsafe(self._settle, result)

    def _settle(self, result: Answer | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


@final
class LayerPasses:
    """Passes of one served model. For one event loop; the passes run on the engine's thread."""

    def __init__(self, llm: AsyncLLM, model: SlottedModel, first: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._llm, self._model, self._first, self._clock = llm, model, first, clock
        self._queue: list[Work] = []
        self._task: asyncio.Task[None] | None = None
        self.num_passes = self.num_works = 0

    async def run(self, works: Sequence[Work]) -> list[Answer]:
        self._queue += works
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        await asyncio.gather(*(work.answer for work in works), return_exceptions=True)
        return [work.answer.result() for work in works]

    async def _work(self) -> None:
        while self._queue:
            try:
                await self._llm.between_steps(self._pass_of_waiting)
            except Exception as error:  # the engine ended
                waiting, self._queue = self._queue, []
                for work in waiting:
                    work.settle(error)

    def _pass_of_waiting(self) -> None:
        """Run what waits now in one pass; if it raises, each text alone. On the engine's thread."""
        count, rows = 0, 0
        while count < len(self._queue) and (not count or rows + len(self._queue[count].parents) <= MAX_ROWS):
            rows += len(self._queue[count].parents)
            count += 1
        taken, self._queue[:count] = self._queue[:count], []
        batch = [work for work in taken if not work.text.is_closed]
        for work in taken:
            if work.text.is_closed:
                work.settle(EngineClosedError("the text was ended by the server"))
            else:
                self._edit(work)
        kept = [work.slot.num_tentative for work in batch]
        try:
            self._answer(batch)
        except Exception as error:
            logger.warning("a pass over states of %d texts raised %r", len(batch), error)
            for work, num_kept in zip(batch, kept, strict=True):
                can_cut = self._model.cut_length(work.slot, work.slot.length) == work.slot.length
                self._try_again(work, error, may=len(batch) > 1 and not num_kept and can_cut)

    def _try_again(self, work: Work, error: Exception, *, may: bool) -> None:
        if may:
            try:
                self._model.truncate(work.slot, work.slot.length)
                self._answer([work])
                return
            except Exception as its_own:
                error = its_own
        work.settle(error)

    def _answer(self, batch: Sequence[Work]) -> None:
        start = self._clock()
        contents = self._contents(batch)
        passed = self._clock() - start
        self.num_passes += 1
        self.num_works += len(batch)
        for work, content in zip(batch, contents, strict=True):
            work.settle(Answer(content, max(0.0, start - work.since), passed))

    def _contents(self, works: Sequence[Work]) -> list[bytes | list[int]]:
        running = [work for work in works if work.parents]
        jobs = [
            Extend(
                work.slot,
                [0] * len(work.parents),
                work.parents,
                logits_at=()
                if work.text.controls is None
                else range(len(work.parents) - work.wanted, len(work.parents)),
                settled=work.settled,
            )
            for work in running
        ]
        contents: dict[int, bytes | list[int]] = {}
        if running:
            capture = tuple(sorted({layer for work in running if work.wanted for layer in work.layers}))
            hidden = torch.cat([work.states for work in running])
            result = self._model.run_rest(jobs, hidden, first=self._first, capture=capture)
            for place, work in enumerate(running):
                if work.text.controls is not None:
                    contents[id(work)] = _picks(work, result.of(place), work.text.controls)
                elif work.wanted:
                    columns = [capture.index(layer) for layer in work.layers]
                    states = result.hidden_of(place)[-work.wanted :, columns]
                    contents[id(work)] = work.format.pack(states.flatten(0, 1)).tobytes()
        return [contents.get(id(work), b"" if work.text.controls is None else []) for work in works]

    def _edit(self, work: Work) -> None:
        if work.text.slot is None:
            work.text.slot = kv_slot(self._model.open())
        if work.edit is not None:
            self._model.commit(work.slot, work.edit.path, work.edit.keep)
        if work.slot.length > work.length:
            self._model.truncate(work.slot, work.length)


def _picks(work: Work, logits: Logits, controls: Controls) -> list[int]:
    """Return the picks of the wanted nodes; they depend on positions and not on tokens."""
    if not work.wanted:
        return []
    slot = work.slot
    base = max(1, slot.length)
    levels = slot.depths[-work.wanted :]
    paths = [[0] * (slot.length + level - base) for level in levels]
    rows = DistributionRows(History([0] * base), controls, paths)
    with Distributions(logits, [rows]) as distributions:
        return list(distributions.picks())


@dataclass
class LayerTexts:
    """The part of a session that sends hidden states."""

    passes: LayerPasses
    target: SlottedModel
    format: StateFormat
    picks: bool
    texts: dict[int, LayerText] = field(default_factory=dict)
