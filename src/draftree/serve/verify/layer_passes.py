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
    if not isinstance(target, SlottedModel):
        raise ConfigurationError(f"{_undivided(model)}: it keeps its own cache")
    if target.streams_weights:
        raise ConfigurationError(f"{_undivided(model)}: offload reads them from a file")
    return target, await model.llm.between_steps(lambda: _probed(model, target, split))


def _probed(model: ServedModel, target: SlottedModel, split: int) -> Probe:
    """Return states of a few tokens; on the engine's thread."""
    if split >= target.num_layers:
        raise ConfigurationError(
            f"split={split}, and model '{model.name}' has {target.num_layers} layers, so none is left for the server"
        )
    try:
        target.require_part(LayerSubset(end=split))
        target.require_capture((split, target.num_layers))
    except UnsupportedModelError as error:
        raise ConfigurationError(f"{_undivided(model)}: {error}") from error
    return Probe.of_whole(target, split)


def _undivided(model: ServedModel) -> str:
    return f"the layers of model '{model.name}' cannot be divided"


logger = logging.getLogger(__name__)

MAX_ROWS = 512
"""Rows of a pass; a larger text has a pass of its own."""


@dataclass(slots=True, eq=False)
class LayerText:
    """One open text; `controls` is None if states are returned, `slot` before its first pass."""

    limit: int
    controls: Controls | None
    used: float
    slot: KVSlot | None = None
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """New nodes of one text in a pass.

    `edit` is of the slot before the pass, `length` counts the committed tokens after it; `states` has shape (nodes,
    hidden), and the last `wanted` nodes have results.
    """

    text: LayerText
    edit: RowsEdit | None
    length: int
    parents: tuple[int, ...]
    states: Tensor
    wanted: int
    format: StateFormat
    layers: tuple[int, ...]

    @property
    def slot(self) -> KVSlot:
        assert self.text.slot is not None, "the slot is open"
        return self.text.slot


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one text: packed states, for each node one of every layer, or picks. Times are seconds."""

    content: bytes | list[int]
    queue: float
    passed: float


@dataclass(slots=True, eq=False)
class _Waiting:
    work: Work
    since: float
    done: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@final
class LayerPasses:
    """Passes of one served model. For one event loop; the passes run on the engine's thread."""

    def __init__(self, llm: AsyncLLM, model: SlottedModel, first: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._llm, self._model, self._first, self._clock = llm, model, first, clock
        self._queue: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None
        self.num_passes = 0
        self.num_works = 0

    async def run(self, works: Sequence[Work]) -> list[Answer]:
        waiting = [_Waiting(work, self._clock()) for work in works]
        self._queue += waiting
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        found = await asyncio.gather(*(one.done for one in waiting), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Answer)]

    async def _work(self) -> None:
        while self._queue:
            try:
                await self._llm.between_steps(self._pass_of_waiting)
            except Exception as error:  # the engine ended
                waiting, self._queue = self._queue, []
                for one in waiting:
                    _settle(one, error)

    def _pass_of_waiting(self) -> None:
        """Run what waits now in one pass; if it raises, each text alone. On the engine's thread."""
        count, rows = 0, 0
        while count < len(self._queue) and (not count or rows + len(self._queue[count].work.parents) <= MAX_ROWS):
            rows += len(self._queue[count].work.parents)
            count += 1
        batch, self._queue[:count] = self._queue[:count], []
        for one in [one for one in batch if one.work.text.is_closed]:
            batch.remove(one)
            one.done.get_loop().call_soon_threadsafe(
                _settle, one, EngineClosedError("the text was ended by the server")
            )
        for one in batch:
            self._edit(one.work)
        kept = [one.work.slot.num_tentative for one in batch]
        try:
            self._answer(batch)
        except Exception as error:
            logger.warning("a pass over states of %d texts raised %r", len(batch), error)
            for one, num_kept in zip(batch, kept, strict=True):
                self._try_again(one, error, may=len(batch) > 1 and not num_kept)

    def _try_again(self, one: _Waiting, error: Exception, *, may: bool) -> None:
        if may:
            try:
                self._model.truncate(one.work.slot, one.work.slot.length)
                self._answer([one])
                return
            except Exception as its_own:
                error = its_own
        one.done.get_loop().call_soon_threadsafe(_settle, one, error)

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        start = self._clock()
        contents = self._contents([one.work for one in batch])
        passed = self._clock() - start
        self.num_passes += 1
        self.num_works += len(batch)
        for one, content in zip(batch, contents, strict=True):
            answer = Answer(content, max(0.0, start - one.since), passed)
            one.done.get_loop().call_soon_threadsafe(_settle, one, answer)

    def _contents(self, works: Sequence[Work]) -> list[bytes | list[int]]:
        running = [work for work in works if work.parents]
        jobs = [_job(work) for work in running]
        found: dict[int, bytes | list[int]] = {}
        if running:
            capture = tuple(sorted({layer for work in running if work.wanted for layer in work.layers}))
            hidden = torch.cat([work.states for work in running])
            result = self._model.run_rest(jobs, hidden, first=self._first, capture=capture)
            for place, work in enumerate(running):
                if work.text.controls is not None:
                    found[id(work)] = _picks(work, result.of(place), work.text.controls)
                elif work.wanted:
                    own = [capture.index(layer) for layer in work.layers]
                    states = result.hidden_of(place)[-work.wanted :, own]
                    found[id(work)] = work.format.pack(states.flatten(0, 1)).tobytes()
        return [found.get(id(work), b"" if work.text.controls is None else []) for work in works]

    def _edit(self, work: Work) -> None:
        if work.text.slot is None:
            work.text.slot = kv_slot(self._model.open())
        if work.edit is not None:
            self._model.commit(work.slot, work.edit.path, work.edit.keep)
        if work.slot.length > work.length:
            self._model.truncate(work.slot, work.length)


def _job(work: Work) -> Extend:
    count = len(work.parents)
    wants_logits = work.text.controls is not None and work.wanted
    return Extend(
        work.slot, [0] * count, work.parents, logits_at=range(count - work.wanted, count) if wants_logits else ()
    )


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


def _settle(one: _Waiting, result: Answer | Exception) -> None:
    if one.done.done():
        return
    if isinstance(result, Exception):
        one.done.set_exception(result)
    else:
        one.done.set_result(result)


@dataclass
class LayerTexts:
    """The part of a session that sends hidden states."""

    passes: LayerPasses
    target: SlottedModel
    format: StateFormat
    picks: bool
    texts: dict[int, LayerText] = field(default_factory=dict)
