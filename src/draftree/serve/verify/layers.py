"""Sequences of devices that run the first layers of a model: they send hidden states and get target tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.core.host import Clock
from draftree.core.tree import ROOT, depths, is_chain, is_path, is_rooted
from draftree.models.kv.slots import CLOSED, KVSlot
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.address import PICKS, STATES, FrameError
from draftree.remote.protocol import read_params
from draftree.remote.split.exchange import Probe
from draftree.remote.split.messages import SentRows, StateFormat, require_sendable
from draftree.sampling.controls import build_controls
from draftree.serve.errors import ApiError, unavailable
from draftree.serve.verify import VerifySettings
from draftree.serve.verify.layer_passes import LayerPasses, LayerText, LayerTexts, Work, probe_of
from draftree.serve.verify.sessions import Session

MAX_NODES = 1024  # most new nodes of one text in one frame, and of its tentative tree
ACTIVE_SECONDS = 5.0  # a server that drains waits for texts that were used within this time
MAX_LAYERS = 4  # most layers whose states are returned: drafters read three, and the last is for the logits
MEMORY_SHARE = 2  # texts of devices take at most one of so many parts of the memory for texts


@final
class LayerService:
    """Texts of all devices that run the first layers. For one event loop."""

    def __init__(self, settings: VerifySettings, clock: Clock, is_closed: Callable[[], bool]) -> None:
        self._settings, self._clock, self._is_closed = settings, clock, is_closed
        self._passes: dict[str, tuple[LayerPasses, SlottedModel, Probe]] = {}
        self._open: dict[LayerText, str] = {}  # open texts of all sessions, with the names of their models
        self.counts = Counter[str]()

    @property
    def num_active(self) -> int:
        """Texts whose devices sent something lately; a device keeps others for prompts that begin alike."""
        since = self._clock() - ACTIVE_SECONDS
        return sum(text.used > since for text in self._open)

    async def join(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let a session send states; the reply has facts of the model, and states that the device compares."""
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
        facts = {"split": split, "layers": target.num_layers, "hidden": probe.hidden, "recurrent": has_states(target)}
        return {"t": "joined", **facts, **probe.fields(texts.format)}

    async def begin(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        texts = _joined(session)
        if self._is_closed():
            raise unavailable("shutting_down")
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
        limits = [text.limit for text, model_name in self._open.items() if model_name == name]
        if limits and MEMORY_SHARE * sum(1 / max(1, engine.num_slots(each)) for each in [*limits, limit]) > 1:
            raise ApiError(
                429, "there is no memory for another text: retry later", code="texts_full", headers={"Retry-After": "1"}
            )
        text = texts.texts[number] = LayerText(limit, controls, self._clock())
        self._open[text] = name
        self.counts["begun"] += 1
        return {"t": "begun"}

    async def rows(self, session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run the later layers over new nodes, all texts of a frame in one pass."""
        texts, sent = _joined(session), message["x"]
        layers = self._layers(texts, message["layers"])
        most_drafted = session.model.llm.llm.engine.max_nodes
        works = [self._work(texts, rows, layers, most_drafted) for rows in sent]
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

    def _work(self, texts: LayerTexts, rows: SentRows, layers: tuple[int, ...], most_drafted: int) -> Work:
        text = texts.texts.get(rows.text)
        if text is None:
            raise FrameError(f"there is no open text {rows.text}: begin it again", code="text_lost")
        text.used = self._clock()
        settled = text.settled if has_states(texts.target) else None
        kept = _after_edit(text.slot or KVSlot(CLOSED), rows, settled=settled)
        if rows.settled and kept:
            raise FrameError(f"settled nodes of text {rows.text} follow a tree: only those after the prefix can be")
        most = min(MAX_NODES, rows.settled + 1 + most_drafted)
        if len(rows.parents) + len(kept) > most:
            raise FrameError(f"{len(rows.parents)} nodes were sent: at most {most} fit", code="too_many_nodes")
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
        text.settled = rows.settled if rows.settled or rows.edit is not None else text.settled
        return Work(
            *(text, rows.edit, rows.length, rows.parents, states, rows.wanted, rows.settled, texts.format, layers),
            since=self._clock(),
        )

    async def end(self, session: Session, numbers: Sequence[int] | None = None) -> int:
        """Close texts of a session, all for None; returns how many there were."""
        texts = session.layers
        if texts is None:
            return 0
        chosen = list(texts.texts) if numbers is None else numbers
        closed = [texts.texts.pop(number) for number in chosen if number in texts.texts]
        for text in closed:
            text.is_closed = True
            del self._open[text]
        if closed and session.model.llm.is_alive:
            await session.model.llm.between_steps(
                lambda: [texts.target.close(text.slot) for text in closed if text.slot is not None]
            )
        return len(closed)

    async def park(self, session: Session, *, before: float) -> int:
        """Close texts that were last used before a time; their devices send them again. Returns their number."""
        texts = {} if session.layers is None else session.layers.texts
        idle = [number for number, text in texts.items() if text.used <= before]
        return await self.end(session, idle) if idle else 0


def _joined(session: Session) -> LayerTexts:
    if session.layers is None:
        raise FrameError("the session sends tokens: join first")
    return session.layers


def has_states(target: SlottedModel) -> bool:
    """Return whether a model has recurrent layers, whose states cannot be cut."""
    return target.footprint.state > 0


def _after_edit(slot: KVSlot, rows: SentRows, *, settled: int | None) -> list[int]:
    """Return the parents of the tentative nodes that an edit keeps, after checks.

    `settled`: number of first nodes that a path has to begin with; None if the prefix can be cut instead.
    """
    path, keep = (rows.edit.path, rows.edit.keep) if rows.edit is not None else ((), ())
    root = path[-1] if path else ROOT
    if not is_path(slot.parents, path) or not is_rooted(slot.parents, keep, root):
        raise FrameError(f"the edit of text {rows.text} is none of its tree", code="out_of_step")
    base = slot.length + len(path)
    is_cut = rows.length < base or (rows.edit is not None and path[: settled or 0] != tuple(range(settled or 0)))
    if settled is not None and is_cut:
        raise FrameError(f"text {rows.text} has states, which are not cut: begin it again", code="out_of_step")
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
