"""Drafters that `draft="auto"` can stand for: tuned or trained here, shipped, published and found, or untrained."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftree.core.errors import ConfigurationError, DraftreeError, ModelLoadError
from draftree.core.files import MALFORMED, config_folder, read_json, write_json
from draftree.core.host import cpu_name, usable_cores
from draftree.core.registry import Spec
from draftree.heads.shipped import ShippedHead, config_facts, head_folder, shipped_heads
from draftree.loading.known_drafters import (
    IN_PACKAGE,
    SIBLING,
    FoundDrafter,
    Target,
    describe_target,
    find_drafters,
    place_of,
    reason_against,
    require_head,
    wrong_lists,
)
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import hub_folder, resolve_model
from draftree.remote.address import is_remote
from draftree.version import __version__
from draftree.weights.catalogue import CATALOGUE

logger = logging.getLogger(__name__)
T = TypeVar("T")
TUNED_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedDraft:
    model: str  # name of the model when it was measured
    fingerprint: str  # identity of its weights
    draft: str  # spec of the fastest drafter; "none" for plain decoding
    plan: str | None  # spec of its planner; None for the default
    speedup: float  # median over texts of its speed divided by that of plain decoding
    spread: tuple[float, float]  # first and third quartile of the same
    texts: int
    prompts: str  # what the texts answer
    temperatures: tuple[float, ...]  # temperatures of the texts
    conditions: Mapping[str, Any]  # machine, threads, dtype, kernels and versions, from `conditions_of`
    date: str  # when it was measured, in UTC

    @property
    def gain(self) -> str:
        low, high = self.spread
        return (
            f"{self.speedup:.2f} times plain decoding in the median of {self.texts} texts of {self.prompts} "
            f"(quartiles {low:.2f}–{high:.2f})"
        )

    def difference(self, conditions: Mapping[str, Any]) -> str | None:
        """Return the first difference to other conditions in words; None if there is none."""
        for key in dict.fromkeys((*self.conditions, *conditions)):
            then, now = self.conditions.get(key), conditions.get(key)
            if then != now:
                return f"{key} was {then}, and is {now}"
        return None


def conditions_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return what speeds of a loaded model depend on, besides its weights."""
    device = loaded.model.device
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "kernels": loaded.kernels,
        "quantization": loaded.quantization,
        "draftree": __version__,
        "torch": torch.__version__,
    }


def tuned_folder() -> Path:
    folder = config_folder()
    if folder is None:
        raise ConfigurationError("there is no home folder to keep results in: set DRAFTREE_CONFIG to a folder of yours")
    return folder / "tuned"


def _tuned_file(fingerprint: str) -> Path:
    return tuned_folder() / f"{fingerprint}.json"


def all_tuned() -> list[TunedDraft]:
    if config_folder() is None:
        return []
    results = [result for path in sorted(tuned_folder().glob("*.json")) for result in _read_tuned(path)]
    return sorted(results, key=lambda result: result.date)


def tuned_for(loaded: LoadedModel) -> tuple[TunedDraft | None, str | None]:
    """Return the kept result of a model, and a sentence if results of it exist that do not count here."""
    if config_folder() is None or not loaded.model.fingerprint:
        return None, None
    difference = None
    conditions = conditions_of(loaded)
    for result in _read_tuned(_tuned_file(loaded.model.fingerprint)):
        difference = result.difference(conditions)
        if difference is None:
            return result, None
    return None, difference and f"the result of 'draftree tune' is ignored, because {difference}"


def keep_tuned(result: TunedDraft) -> Path:
    """Keep a result; replaces one of the same model under the same conditions. Returns the file."""
    place = _tuned_file(result.fingerprint)
    others = [other for other in _read_tuned(place) if other.difference(result.conditions) is not None]
    _write(place, {"format": TUNED_FORMAT, "results": [dataclasses.asdict(each) for each in (*others, result)]})
    return place


def forget_tuned(fingerprint: str) -> int:
    """Remove the results of a model, under all conditions; returns their number."""
    place = _tuned_file(fingerprint)
    count = len(_read_tuned(place))
    try:
        place.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"'{place}' cannot be removed: {error.strerror}") from error
    return count


def _read_tuned(path: Path) -> list[TunedDraft]:
    with _undamaged(path, "draftree tune"):
        if not path.exists():
            return []
        values = read_json(path)
        if values["format"] != TUNED_FORMAT:
            raise ConfigurationError(
                f"'{path}' has format {values['format']!r}, and this program reads {TUNED_FORMAT}: delete it"
            )
        tuples = ("spread", "temperatures")
        return [TunedDraft(**each | {name: tuple(each[name]) for name in tuples}) for each in values["results"]]


@contextmanager
def _undamaged(place: Path, command: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(f"'{place}', kept by '{command}', is damaged or unreadable: delete it") from error


def _write(place: Path, content: Mapping[str, Any]) -> None:
    try:
        write_json(place, content, indent=2)
    except OSError as error:
        raise ConfigurationError(
            f"'{place}' cannot be written ({error.strerror}): set DRAFTREE_CONFIG to a writable folder"
        ) from error


LEAST_TOKENS = 1.1
"""Tokens per round below which a head is a loss even if it and the wider pass cost a tenth of a plain pass."""


@dataclass(frozen=True, slots=True)
class TrainedHead:
    folder: str  # of the head; it must stay where it is
    tokens_per_round: float  # acceptance length on unseen texts, at the temperature where it is highest


def keep_trained(fingerprint: str, head: TrainedHead) -> Path | None:
    """Remember a head for the weights with this fingerprint, in place of an earlier one; None without a home folder."""
    place = _trained_file(fingerprint)
    if place is not None:
        _write(place, dataclasses.asdict(head))
    return place


def trained_for(fingerprint: str) -> TrainedHead | None:
    place = _trained_file(fingerprint)
    if place is None:
        return None
    with _undamaged(place, "draftree train"):
        if not place.exists():
            return None
        values = read_json(place)
        return TrainedHead(str(values["folder"]), float(values["tokens_per_round"]))


def _trained_file(fingerprint: str) -> Path | None:
    folder = config_folder()
    return None if folder is None or not fingerprint else folder / "heads" / f"{fingerprint}.json"


RACE_DRAFT = "{}+suffix"
"""With one or more drafters that run a model; alone for verifiers that need draft distributions."""
FALLBACK_DRAFTS = ("suffix", "suffix,width=1")
"""Without one: lossless and without a second model; as a chain for targets and verifiers without trees."""
NO_RESULT = "this package has no trained drafter for this model"
ON_A_SERVER = "trained drafters are not chosen for a model on a verify server"


@dataclass(frozen=True, slots=True)
class AutoCandidate:
    draft: str  # its spec; empty if there is nothing to try, and `reason` says why
    plan: str | None  # the planner that belongs to it; None for the default
    reason: str  # why it is chosen, in words
    # the head or model that no one has measured here
    found: FoundDrafter | None = None
    rival: str = ""  # the drafter alone, if it may be merged with other candidates

    @property
    def can_be_fetched(self) -> bool:
        """Whether it is published, but not on this machine."""
        return self.found is not None and self.found.place is None

    def require_fit(self, loaded: LoadedModel, parse: Callable[[str], Sequence[Spec]]) -> None:
        """Read its heads, whose files may be damaged or for another model; raises if one cannot be used.

        Those of this package are not read, nor those of candidates that it is merged with.
        """
        model = loaded.model
        if is_remote(loaded.name):
            return
        for spec in parse(self.rival or self.draft):
            folder = Path(spec.argument or "")
            if spec.name != "head" or head_folder(spec.argument or "") != folder:
                continue
            if self.found is not None:
                _require_recipe(folder, model.fingerprint)
            # a model that was loaded elsewhere has no folder
            width = model.output_head().shape[1] if loaded.folder is None else _target_of(loaded).shape.hidden_size
            require_head(folder, width=width, vocab_size=model.vocab_size, num_layers=model.num_layers)


def auto_candidates(loaded: LoadedModel) -> tuple[Iterator[AutoCandidate], list[str]]:
    """Return the drafters to try for a target, best first, and sentences about what was left out.

    Published drafters are searched for when those before them were tried.
    """
    kept, ignored = _unless_damaged(lambda: tuned_for(loaded)) or (None, None)
    left_out = [] if ignored is None else [ignored]
    candidates: list[AutoCandidate] = []
    if kept is not None:
        candidates.append(AutoCandidate(kept.draft, kept.plan, f"'draftree tune' measured {kept.gain}"))

    def add_head(name: str, reason: str) -> None:
        candidates.extend(_with_and_without_suffix(f"head:{name}", reason))

    fingerprint = loaded.model.fingerprint
    trained = None if is_remote(loaded.name) else _unless_damaged(lambda: trained_for(fingerprint))
    if trained is not None and not Path(trained.folder).is_dir():
        left_out.append(f"the head that was trained for this model is no longer in '{trained.folder}'")
    elif trained is not None:
        tokens = f"{trained.tokens_per_round:.2f} tokens per round"
        add_head(trained.folder, f"trained here for this model: {tokens} on unseen texts")
    head, reason = _trained_head(loaded)
    if head is not None:
        add_head(head.name, "trained for this model")
    else:
        left_out.append(reason)

    def all_candidates() -> Iterator[AutoCandidate]:
        yield from candidates
        yield from _found_candidates(loaded)
        yield from (AutoCandidate(draft, None, "needs no training") for draft in FALLBACK_DRAFTS)

    return all_candidates(), left_out


def _unless_damaged(read: Callable[[], T]) -> T | None:
    """Return what a file of the user's configuration holds; None with a warning if it is damaged."""
    try:
        return read()
    except ConfigurationError as error:
        _warn(str(error))
        return None


def _warn(reason: str) -> None:
    logger.warning("%s (this start does without it)", reason)


def _require_recipe(folder: Path, fingerprint: str) -> None:
    """Raise for a head of `draftree train` that is for other weights or does not pay; others have no recipe."""
    try:
        recipe = read_json(folder / "recipe.json")
        weights = recipe["fingerprint"]
        lengths = [mode["rounds"]["all"]["acceptance_length"] for mode in recipe["unseen"].values()]
    except (OSError, *MALFORMED):
        return
    if fingerprint and weights != fingerprint:
        raise ConfigurationError("it was trained for other weights")
    if lengths and max(lengths) < LEAST_TOKENS:
        raise ConfigurationError(f"it writes {max(lengths):.2f} tokens per round on unseen texts")


def _target_of(loaded: LoadedModel) -> Target:
    return describe_target(loaded.name, loaded.folder)


def _found_candidates(loaded: LoadedModel) -> Iterator[AutoCandidate]:
    """Yield published drafters that are here, the first one that is not, and what does not fit with the reason."""
    if loaded.folder is None or is_remote(loaded.name):
        return
    for reason in wrong_lists():
        _warn(reason)
    offered = False
    for found in find_drafters(_target_of(loaded)):
        if found.where == IN_PACKAGE:
            continue  # it was tried before, by the weights that it was trained for
        if found.place is not None:
            yield from _candidates_of(found)
        elif found.known.id and found.reason is None and not offered:
            offered = True
            yield AutoCandidate(
                "", None, f"{found.description} is published for it: --download-drafter fetches it", found
            )


def _candidates_of(found: FoundDrafter) -> Iterator[AutoCandidate]:
    """Yield the specs for a drafter on this machine, or why it cannot be used."""
    reason = found.reason
    if reason is None and "," in str(found.place):
        reason = f"the path '{found.place}' has a comma, which begins an option"
    if reason is not None:
        yield AutoCandidate("", None, f"{found.description} {found.where} does not fit: {reason}")
        return
    # the path of a model at the hub, whose id would be looked up there at every start
    name = found.known.id if found.known.id in CATALOGUE else found.place
    kind = "model" if found.known.kind == SIBLING else "head"
    yield from _with_and_without_suffix(f"{kind}:{name}", f"{found.description} {found.where}", found)


def _with_and_without_suffix(draft: str, reason: str, found: FoundDrafter | None = None) -> list[AutoCandidate]:
    merged = AutoCandidate(RACE_DRAFT.format(draft), None, reason, found, rival=draft)
    return [merged, AutoCandidate(draft, None, reason, found)]


def fetched_candidates(candidate: AutoCandidate, loaded: LoadedModel) -> list[AutoCandidate]:
    """Download a published drafter from the hub or a registry; returns its candidates, or why there are none."""
    found = candidate.found
    assert found is not None, "only published drafters can be fetched"
    try:
        if found.known.id in CATALOGUE:
            resolve_model(found.known.id)
        else:
            hub_folder(found.known.id, fetch=True, revision=found.known.revision)
    except DraftreeError as error:
        return [AutoCandidate("", None, f"{found.description} cannot be fetched: {error}")]
    place, where = place_of(found.known)
    here = dataclasses.replace(found, place=place, where=where)
    return list(_candidates_of(dataclasses.replace(here, reason=reason_against(here, _target_of(loaded)))))


def _trained_head(loaded: LoadedModel) -> tuple[ShippedHead | None, str]:
    """Return the head of this package for a target, or None and the reason."""
    if is_remote(loaded.name):
        return None, ON_A_SERVER
    fingerprint = loaded.model.fingerprint
    try:
        config = None if loaded.folder is None else config_facts(loaded.folder)
    except ModelLoadError as error:
        return None, str(error)
    heads = shipped_heads()
    for head in heads:
        if head.reason_against(fingerprint, config) is None:
            return head, ""
    alike = next((head for head in heads if head.fingerprint == fingerprint or head.config == config), None)
    return None, NO_RESULT if alike is None else str(alike.reason_against(fingerprint, config))
