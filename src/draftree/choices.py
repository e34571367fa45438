"""Several drafters in one engine, of which each request chooses one: their methods and parts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from draftree.assembly import Methods, build_parts, choose_methods, model_reader
from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.errors import ConfigurationError
from draftree.core.routing import PLAIN
from draftree.drafters import NO_DRAFT, drafts
from draftree.drafters.learning.files import prepare_folder
from draftree.drafters.learning.settings import Learning, parse_learning
from draftree.drafters.learning.store import LearningStore
from draftree.drafters.wrappers.routed import RoutedDrafter
from draftree.engine.parts import Parts
from draftree.loading.load import LoadedModel
from draftree.models.base import LanguageModel
from draftree.planners.wrappers.routed import RoutedPlanner
from draftree.text.tokenizer import Tokenizer


def choose_each(draft: str | Sequence[str] | None, verify: str, plan: str | None) -> dict[str, Methods]:
    """Find and configure the methods of every drafter that a request can choose.

    Args:
        draft: one drafter, or several of which the first is the default; `none` is plain decoding.
        verify: the verifier of all.
        plan: the planner of each; None for its default.

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
    return {name: choose_methods(name, verify, plan if drafts(name) or not any_drafts else None) for name in names}


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
            f"learn is '{learn}', but no drafter learns ({', '.join(methods)}): use drafter 'suffix' with memory or a "
            "head that drafts level by level, or leave it out"
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
