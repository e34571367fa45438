"""Several drafters in one engine, of which each request chooses one: their methods and parts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from draftree.assembly import Methods, build_parts, choose_methods, require_fit
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.types import PLAIN
from draftree.drafters import AUTO_DRAFT, NO_DRAFT, drafts
from draftree.drafters.learning.store import Learning, LearningStore, parse_learning, prepare_folder
from draftree.drafters.model import model_reader
from draftree.drafters.wrappers.several import RoutedDrafter
from draftree.engine.parts import Parts, require_alternating
from draftree.loading.auto_draft import AutoCandidate, auto_candidates
from draftree.loading.encoder_decoder import is_encoder_decoder_target, require_drafter
from draftree.loading.load import LoadedModel
from draftree.loading.resolve import resolve_model
from draftree.models.base import LanguageModel
from draftree.planners.base import RoutedPlanner
from draftree.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The methods in the place of `draft="auto"` for one target, verifier and planner.

    Attributes:
        draft: spec of the drafter; "none" if no drafter can be used.
        plan: spec of the planner; None for the default.
        note: the drafter and the reasons in one sentence.
    """

    draft: str
    plan: str | None
    note: str


def decide(loaded: LoadedModel, verify: str, plan: str | None) -> AutoChoice:
    """Choose the drafter of a loaded target for `draft="auto"`.

    In this order: the result that `draftree tune` kept for this model on this machine; a trained head of this package;
    `suffix`; plain decoding. A drafter that does not fit to the target, the verifier or the planner is left out.

    Args:
        loaded: the target.
        verify: spec of the verifier.
        plan: spec of the planner; None for the one that belongs to the drafter.

    Raises:
        ConfigurationError: a planner was given, and no drafter fits.
    """
    candidates, left_out = auto_candidates(loaded)
    refused: DraftreeError | None = None
    for candidate in candidates:
        chosen = candidate.plan if plan is None else plan
        try:
            _require_fit(candidate, loaded, verify, chosen)
        except DraftreeError as error:
            refused = error
            left_out.append(f"'{candidate.draft}' cannot be used: {error}")
            continue
        return AutoChoice(candidate.draft, chosen, _note(candidate.draft, [candidate.reason, *left_out]))
    if plan is not None and refused is not None:
        raise ConfigurationError(f"draft '{AUTO_DRAFT}' finds no drafter for planner '{plan}': {refused}") from refused
    return AutoChoice(NO_DRAFT, None, _note("plain decoding", left_out))


def _note(draft: str, reasons: Sequence[str]) -> str:
    return f"draft {AUTO_DRAFT}: {draft} ({'; '.join(reasons)})"


def _require_fit(candidate: AutoCandidate, loaded: LoadedModel, verify: str, plan: str | None) -> None:
    """Raise if a candidate cannot be used; its weights are not loaded."""
    if not drafts(candidate.draft):
        if plan is not None:
            raise ConfigurationError(f"a planner needs a drafter: '{plan}'")
        return
    methods = choose_methods(candidate.draft, verify, plan)
    require_fit(methods, loaded)
    for name in methods.draft_models:
        resolve_model(name, fetch=False)


def choose_each(
    draft: str | Sequence[str] | None, verify: str, plan: str | None, *, target: Any = None
) -> dict[str, Methods]:
    """Find and configure the methods of every drafter that a request can choose.

    Args:
        draft: one drafter, or several of which the first is the default; `none` is plain decoding. `auto` has the
            methods of a stand-in until the target is loaded: see `decide_each`.
        verify: the verifier of all.
        plan: the planner of each; None for its default.
        target: the model argument of `LLM`; drafters that cannot work with it are refused before it is loaded.

    Returns:
        Methods by name of the drafter, the default first.

    Raises:
        ConfigurationError: as `choose_methods`; no drafter, or the same one twice.
    """
    given = NO_DRAFT if draft is None else draft
    names = [given] if isinstance(given, str) else list(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"draft is {draft!r}: give the name of a drafter, or a list of at least one name")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"draft names '{twice}' twice: name it once")
    any_drafts = any(map(drafts, names))
    each = {name: choose_methods(name, verify, plan if drafts(name) or not any_drafts else None) for name in names}
    require_alternating((own.name, own.traits) for methods in each.values() for own in methods.drafters)
    if is_encoder_decoder_target(target):
        for name, methods in each.items():
            require_drafter(name, methods.traits)
    return each


def decide_each(
    each: Mapping[str, Methods], loaded: LoadedModel, verify: str, plan: str | None, learn: str | None
) -> tuple[dict[str, Methods], AutoChoice | None]:
    """Replace `auto` by the drafter that is chosen for a loaded target.

    Args:
        each: as returned by `choose_each`.
        loaded: the target.
        verify: as for `choose_each`.
        plan: as for `choose_each`.
        learn: as for `learning_of`.

    Returns:
        Methods by name of the drafter, in the same order; what `auto` stands for, None if it is not among them.

    Raises:
        ConfigurationError: as `decide` and `learning_of`.
    """
    if AUTO_DRAFT not in each:
        return dict(each), None
    choice = decide(loaded, verify, plan)
    logger.info("'%s': %s", loaded.name, choice.note)
    found: dict[str, Methods] = {}
    for name, methods in each.items():
        if name == AUTO_DRAFT:
            found.setdefault(choice.draft, choose_methods(choice.draft, verify, choice.plan))
        else:
            found.setdefault(name, methods)
    learning_of(learn, found)
    return found, choice


def learning_of(learn: str | None, methods: Mapping[str, Methods]) -> Learning | None:
    """Read the settings of learning, and check them against the drafters; creates the folder.

    Args:
        learn: a spec as for `parse_learning`; None to learn nothing.
        methods: as `choose_each` returns them.

    Raises:
        ConfigurationError: a malformed spec, a folder that cannot be used, or no drafter that learns.
    """
    if learn is None:
        return None
    learning = parse_learning(learn)
    if not any(own.traits.learns for own in methods.values()):
        raise ConfigurationError(
            f"learn is '{learn}', but no drafter learns ({', '.join(methods)}): use drafter 'suffix' with memory, "
            "'early-exit' or a head that drafts level by level, or leave it out"
        )
    if learning.options.folder is not None:
        prepare_folder(learning.options.folder)
    return learning


def store_of(learning: Learning | None, target: LanguageModel, *, user: object) -> LearningStore | None:
    """Return the store of one engine, which is saved and closed when its user or the process ends; None for None.

    Raises:
        ConfigurationError: the target has no fingerprint to bind files to.
    """
    if learning is None:
        return None
    store = LearningStore(learning, target.fingerprint)
    weakref.finalize(user, store.close)
    return store


def build_each(
    each: Mapping[str, Methods],
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    *,
    kernels: str = "auto",
    trust_remote_code: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    learning: LearningStore | None = None,
) -> Parts:
    """Load what the methods of every drafter need besides the target; a model that several name is loaded once.

    Args:
        each: methods by name of the drafter, the default first.
        target: as for `build_parts`.
        tokenizer: as for `build_parts`.
        kernels: as for `build_parts`.
        trust_remote_code: as for `build_parts`.
        clock: as for `build_parts`.
        learning: as for `build_parts`; shared by all drafters.

    Raises:
        DraftreeError: as `build_parts`.
    """
    model = target.model
    dtype, device = model.dtype, str(model.device)
    load = cache(model_reader(target, dtype, device, kernels=kernels, trust_remote_code=trust_remote_code))

    def build(methods: Methods) -> Parts:
        return build_parts(
            methods,
            target,
            tokenizer,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            load_draft=load,
            clock=clock,
            learning=learning,
        )

    return _joined({name: build(methods) for name, methods in each.items()})


def _joined(each: Mapping[str, Parts]) -> Parts:
    """Join the parts of several drafters to those of one engine, in which each request chooses its drafter.

    Args:
        each: parts by the name of the drafter, the default first; all with the same target and rule.
    """
    default, first = next(iter(each.items()))
    choices = {name: own.traits for name, own in each.items()}
    drafting = {name: own for name, own in each.items() if own.drafter is not None}
    if not drafting:
        return replace(first, choices=choices)
    index = {NO_DRAFT: PLAIN, **{name: place for place, name in enumerate(drafting)}}
    index[""] = index[default]
    traits = [own.traits for own in drafting.values()]
    drafter = RoutedDrafter(
        [own.drafter for own in drafting.values() if own.drafter is not None],
        index,
        traits=traits,
        num_parts=[len(own.planner.parts) for own in drafting.values()],
        clock=first.clock,
    )
    planner = RoutedPlanner({name: own.planner for name, own in drafting.items()}, index)
    whole = traits[0] if len(traits) == 1 else RoutedDrafter.describe(traits)
    return Parts(first.target, first.verifier, planner, drafter, whole, first.clock, choices)
