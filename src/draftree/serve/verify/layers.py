"""Sequences of devices that run the first layers of a model: they send hidden states and get target tokens."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from draftree.async_llm import AsyncLLM
from draftree.core.errors import ConfigurationError, EngineClosedError, InvalidRequestError, UnsupportedModelError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.tree import ROOT, depths, is_chain, is_path, is_rooted
from draftree.models.base import Extend, LayerSubset
from draftree.models.kv.slots import CLOSED, KVSlot, kv_slot
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.address import PICKS, STATES, FrameError
from draftree.remote.protocol import read_params
from draftree.remote.split.exchange import Probe
from draftree.remote.split.messages import RowsEdit, SentRows, StateFormat, require_sendable
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import Logits
from draftree.serve.errors import ApiError, closed_error
from draftree.serve.pool import ServedModel
from draftree.serve.verify.settings import VerifySettings

if TYPE_CHECKING:
    from draftree.serve.verify.sessions import Session


async def require_divisible(models: Sequence[ServedModel], split: int) -> None:
    """Check loaded models for a server whose devices run the first layers.

    Args:
        models: all of the server.
        split: number of layers that devices run; 0 checks nothing.

    Raises:
        ConfigurationError: as `probe_of`.
    """
    for model in models if split else ():
        try:
            await probe_of(model, split)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}: serve it without --split") from error


async def probe_of(model: ServedModel, split: int) -> tuple[SlottedModel, Probe]:
    """Return the target of a model whose first layers run on devices, and states that a device compares.

    Args:
        model: a loaded model.
        split: number of layers that devices run.

    Raises:
        ConfigurationError: the model has too few layers, or they cannot be divided.
    """
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
    """One open text.

    Attributes:
        limit: most tokens of prompt and text.
        controls: of the picks; None if states are returned.
        used: when the client last named it, in seconds of the service's clock.
        slot: its keys and values in the later layers; None before its first pass.
        is_closed: whether it has ended; its slot is about to be closed.
    """

    limit: int
    controls: Controls | None
    used: float
    slot: KVSlot | None = None
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """New nodes of one text in a pass.

    Attributes:
        text: the text.
        edit: of the slot before the pass; None for none.
        length: committed tokens after the edit.
        parents: of the new nodes.
        states: output of the device's layers, shape (nodes, hidden).
        wanted: how many of the last nodes have results.
        format: of returned states.
        layers: as for `Pass.capture`: states that are returned.
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
        """The slot of the text, which is opened before its first pass."""
        assert self.text.slot is not None, "the slot is open"
        return self.text.slot

    @property
    def controls(self) -> Controls | None:
        """Controls of the picks; None to return states."""
        return self.text.controls


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one text.

    Attributes:
        content: packed states, for each node one of every layer, or picks.
        queue: seconds before the pass.
        passed: seconds of the pass.
    """

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
    """Passes of one served model. For one event loop; the passes run on the engine's thread.

    Args:
        llm: of the model.
        model: its target.
        first: first layer that is run.
        clock: measures queue and passes.
    """

    def __init__(self, llm: AsyncLLM, model: SlottedModel, first: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._llm, self._model, self._first, self._clock = llm, model, first, clock
        self._queue: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None
        self.num_passes = 0
        self.num_works = 0

    async def run(self, works: Sequence[Work]) -> list[Answer]:
        """Run these texts in the next passes.

        Raises:
            Exception: what a pass raised.
        """
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
            hidden = _joined_batch([work.states for work in running])
            result = self._model.run_rest(jobs, hidden, first=self._first, capture=capture)
            for place, work in enumerate(running):
                if work.controls is not None:
                    found[id(work)] = _picks(work, result.of(place), work.controls)
                elif work.wanted:
                    own = [capture.index(layer) for layer in work.layers]
                    states = result.hidden_of(place)[-work.wanted :, own]
                    found[id(work)] = work.format.pack(states.flatten(0, 1)).tobytes()
        return [found.get(id(work), b"" if work.controls is None else []) for work in works]

    def _edit(self, work: Work) -> None:
        """Bring a slot to the state before its new nodes."""
        if work.text.slot is None:
            work.text.slot = kv_slot(self._model.open())
        if work.edit is not None:
            self._model.commit(work.slot, work.edit.path, work.edit.keep)
        if work.slot.length > work.length:
            self._model.truncate(work.slot, work.length)


def _job(work: Work) -> Extend:
    count = len(work.parents)
    wants_logits = work.controls is not None and work.wanted
    return Extend(
        work.slot, [0] * count, work.parents, logits_at=range(count - work.wanted, count) if wants_logits else ()
    )


def _joined_batch(states: Sequence[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(list(states))


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


MAX_NODES = 1024
"""Most new nodes of one text in one frame, and of its tentative tree."""
ACTIVE_SECONDS = 5.0
"""A server that drains waits for texts that were used within this time."""
MAX_LAYERS = 4
"""Most layers whose states are returned: drafters read three, and the last is for the logits."""
MEMORY_SHARE = 2
"""Texts of devices take at most one of so many parts of the memory for texts."""


@dataclass
class LayerTexts:
    """The part of a session that sends hidden states.

    Attributes:
        passes: of its model.
        target: the model itself.
        format: of states in both directions.
        picks: whether the server picks.
        texts: open texts by number.
    """

    passes: LayerPasses
    target: SlottedModel
    format: StateFormat
    picks: bool
    texts: dict[int, LayerText] = field(default_factory=dict)


@final
class LayerService:
    """Texts of all devices that run the first layers. For one event loop.

    Args:
        settings: limits of sessions and drafts; `split` is the number of layers that devices run.
        clock: of leases.
        is_closed: returns whether the server takes no new texts.
    """

    def __init__(self, settings: VerifySettings, clock: Clock, is_closed: Callable[[], bool]) -> None:
        self._settings, self._clock, self._is_closed = settings, clock, is_closed
        self._passes: dict[str, tuple[LayerPasses, SlottedModel, Probe]] = {}
        self._open: dict[LayerText, str] = {}
        """Open texts of all sessions, with the names of their models."""
        self.counts = Counter[str]()

    @property
    def num_active(self) -> int:
        """Texts whose devices sent something lately; a device keeps others for prompts that begin alike."""
        since = self._clock() - ACTIVE_SECONDS
        return sum(text.used > since for text in self._open)

    @property
    def handlers(self) -> dict[str, Callable[[Session, dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """Handlers of the requests of sessions that send states, by type."""
        return {"join": self._join, "begin": self._begin, "rows": self._rows}

    async def _join(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let a session send states; the reply has facts of the model, and states that the device compares.

        Raises:
            ApiError: 400, another number of layers, or a model whose layers cannot be divided.
            FrameError: an unknown format, or the session has joined before.
        """
        model, split, kind, picks = (
            session.model,
            message["split"],
            message["states"] or STATES[0],
            message["picks"] or PICKS[0],
        )
        if split != self._settings.split:
            raise ApiError(
                400,
                f"the device runs {split} layers, and this server takes states after {self._settings.split}: name "
                f"split={self._settings.split} in the address",
                code="wrong_split",
            )
        if kind not in STATES or picks not in PICKS or session.layers is not None:
            raise FrameError(
                f"states must be one of {', '.join(STATES)}, picks one of {', '.join(PICKS)}, and a session joins once"
            )
        if model.name not in self._passes:
            try:
                target, probe = await probe_of(model, split)
            except ConfigurationError as error:
                raise ApiError(400, f"{error}; the device must send tokens") from error
            self._passes[model.name] = (LayerPasses(model.llm, target, split, clock=self._clock), target, probe)
        passes, target, probe = self._passes[model.name]
        texts = LayerTexts(passes, target, StateFormat(kind, probe.hidden), picks == "server")
        session.layers = texts
        facts = {"split": split, "layers": target.num_layers, "hidden": probe.hidden}
        return {"t": "joined", **facts, **probe.fields(texts.format)}

    async def _begin(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        """Open a text.

        Raises:
            FrameError: the number is in use, or too many texts are open.
            ApiError: 400, a wrong parameter; 429, no memory for another text.
        """
        texts = _joined(session)
        if self._is_closed():
            raise closed_error()
        await self.end(session, message["ends"])
        number, limit, target = message["text"], message["limit"], texts.target
        if number in texts.texts or number in session.texts:
            raise FrameError(f"text {number} is open already: take another number")
        if len(texts.texts) + len(session.texts) >= self._settings.max_texts:
            raise FrameError(f"{self._settings.max_texts} texts are open: close one first", code="too_many_texts")
        engine, name = session.model.llm.llm.engine, session.model.name
        if not 0 < limit <= min(target.max_length, engine.longest):
            raise ApiError(400, f"the text may have {limit} tokens: from 1 to {min(target.max_length, engine.longest)}")
        controls = None
        if texts.picks:
            require_sendable(message["params"])
            params = read_params(message["params"], seed=message["seed"], max_tokens=1)
            controls = build_controls(params, vocab_size=target.vocab_size, seed=message["seed"])
        elif message["params"]:
            raise InvalidRequestError("sampling parameters were sent, and the device picks: leave them out")
        limits = [text.limit for text, own in self._open.items() if own == name]
        if limits and MEMORY_SHARE * sum(1 / max(1, engine.num_slots(each)) for each in [*limits, limit]) > 1:
            raise ApiError(
                429, "there is no memory for another text: retry later", code="texts_full", headers={"Retry-After": "1"}
            )
        text = texts.texts[number] = LayerText(limit, controls, self._clock())
        self._open[text] = name
        self.counts["begun"] += 1
        return {"t": "begun"}

    async def _rows(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run the later layers over new nodes, all texts of a frame in one pass.

        Raises:
            FrameError: other texts, edits or trees than are possible; nothing has happened.
            Exception: the pass failed; its texts are closed.
        """
        texts, sent = _joined(session), message["x"]
        layers = self._layers(texts, message["layers"])
        works = [self._work(texts, rows, layers) for rows in sent]
        self.counts["rows"] += sum(len(rows.parents) for rows in sent)
        try:
            answers = await texts.passes.run(works)
        except Exception:
            await self.end(session, [rows.text for rows in sent])
            raise
        self.counts["passes"] += 1
        times = [max(answer.queue for answer in answers), max(answer.passed for answer in answers)]
        return {
            "t": "passed",
            "x": [answer.content for answer in answers],
            "us": [round(seconds * 1e6) for seconds in times],
        }

    def _layers(self, texts: LayerTexts, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Check the layers whose states a device wants."""
        first, last = self._settings.split, texts.target.num_layers
        if texts.picks:
            if layers:
                raise FrameError("states of layers are wanted, and this session gets picks: leave them out")
        elif (
            not 0 < len(layers) <= MAX_LAYERS
            or len(set(layers)) < len(layers)
            or not all(first < layer <= last for layer in layers)
        ):
            raise FrameError(f"states of 1 to {MAX_LAYERS} different layers from {first + 1} to {last} can be returned")
        return layers

    def _work(self, texts: LayerTexts, rows: SentRows, layers: tuple[int, ...]) -> Work:
        """Check the nodes of one text against its slot."""
        text = texts.texts.get(rows.text)
        if text is None:
            raise FrameError(f"there is no open text {rows.text}: begin it again", code="text_lost")
        text.used = self._clock()
        kept = _after_edit(text.slot or KVSlot(CLOSED), rows)
        if len(rows.parents) + len(kept) > MAX_NODES:
            raise FrameError(f"{len(rows.parents)} nodes were sent: at most {MAX_NODES} fit", code="too_many_nodes")
        tree = [*kept, *rows.parents]
        if any(not ROOT <= parent < node for node, parent in enumerate(tree)):
            raise FrameError(
                f"the parents of text {rows.text} are no tree: each must be an earlier node, or the prefix"
            )
        if not texts.target.supports_trees and not is_chain(tree):
            raise FrameError("this model scores chains only, and the nodes branch", code="too_many_branches")
        if tree and rows.length + max(depths(tree)) > text.limit:
            raise FrameError(f"the nodes end after the {text.limit} tokens of the text", code="too_deep")
        if text.controls is not None and rows.wanted > 1 + self._settings.max_nodes:
            raise FrameError(f"picks of {rows.wanted} nodes are wanted: at most {1 + self._settings.max_nodes}")
        states = texts.format.unpack(rows.data, len(rows.parents))
        return Work(text, rows.edit, rows.length, rows.parents, states, rows.wanted, texts.format, layers)

    async def end(self, session: Session, numbers: Sequence[int] | None = None) -> int:
        """Close texts of a session, all for None; returns how many there were."""
        texts = session.layers
        if texts is None:
            return 0
        chosen = list(texts.texts) if numbers is None else numbers
        found = [texts.texts.pop(number) for number in chosen if number in texts.texts]
        for text in found:
            text.is_closed = True
            del self._open[text]
        if found and session.model.llm.is_alive:
            await session.model.llm.between_steps(
                lambda: [texts.target.close(text.slot) for text in found if text.slot is not None]
            )
        return len(found)

    async def park(self, session: Session, *, before: float) -> int:
        """Close texts that were last used before a time; their devices send them again. Returns their number."""
        texts = {} if session.layers is None else session.layers.texts
        idle = [number for number, text in texts.items() if text.used <= before]
        return await self.end(session, idle) if idle else 0


def _joined(session: Session) -> LayerTexts:
    if session.layers is None:
        raise FrameError("the session sends tokens: join first")
    return session.layers


def _after_edit(slot: KVSlot, rows: SentRows) -> list[int]:
    """Return the parents of the tentative nodes that an edit keeps, after checks."""
    path, keep = (rows.edit.path, rows.edit.keep) if rows.edit is not None else ((), ())
    root = path[-1] if path else ROOT
    if not is_path(slot.parents, path) or not is_rooted(slot.parents, keep, root):
        raise FrameError(f"the edit of text {rows.text} is none of its tree", code="out_of_step")
    base = slot.length + len(path)
    if rows.length > base or (rows.edit is None and rows.length < base):
        raise FrameError(
            f"text {rows.text} has {base} tokens here, and the nodes follow {rows.length}: begin it again",
            code="out_of_step",
        )
    if rows.length < base:
        return []
    if rows.edit is None:
        return list(slot.parents)
    places = {node: place for place, node in enumerate(keep)} | {root: ROOT}
    return [places[slot.parents[node]] for node in keep]
