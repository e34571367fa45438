"""Assembly of the parts from specs: methods are found, configured and checked first; weights are loaded last."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError, require_extra
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.registry import Spec
from draftree.core.tree import Draw
from draftree.drafters import AUTO_DRAFT, DRAFTERS, NO_DRAFT, drafts
from draftree.drafters.base import NO_DRAFTS, DraftContext, Drafter, DraftTraits, LoadedDraftModel
from draftree.drafters.learning.store import LearningStore
from draftree.drafters.model import apart_reader, model_reader
from draftree.drafters.wrappers.ahead import wrapped_apart
from draftree.drafters.wrappers.forced_tokens import ForcedTokenDrafter
from draftree.drafters.wrappers.several import MergedDrafter, part_draw
from draftree.engine.costs import costs_of
from draftree.engine.parts import Parts, agree, require_alternating, require_picks
from draftree.loading.auto_draft import FALLBACK_DRAFTS
from draftree.loading.encoder_decoder import is_encoder_decoder_target, require_drafter
from draftree.loading.load import LoadedModel
from draftree.loading.requirements import require_extras
from draftree.loading.targets import require_layers
from draftree.models.base import LanguageModel
from draftree.planners import PLANNERS
from draftree.planners.base import Planner, require_effect
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Verifier

logger = logging.getLogger(__name__)

DEFAULT_PLAN = "adaptive"
"""Default planner if no draft can change the text."""
REPEATABLE_PLAN = "fixed"
"""Default planner if the text depends on the draft: a time-dependent plan would change the text of a seed."""


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A configured drafter that is not built yet."""

    name: str
    cls: type[Drafter[Any]]
    config: Any

    @property
    def traits(self) -> DraftTraits:
        """Its static facts."""
        return self.cls.describe(self.config)

    @property
    def models(self) -> list[str]:
        """Names of the models that it loads."""
        fields = dataclasses.fields(self.config)
        return [str(getattr(self.config, field.name)) for field in fields if field.metadata.get("names_model")]


@dataclass(frozen=True, slots=True)
class Methods:
    """Configured methods that fit together; no weights are loaded yet.

    Attributes:
        drafters: none for plain decoding, several for a merged tree.
        draw: how children are drawn, as agreed between drafters and verifier.
        verifier: the verifier.
        planner: the planner.
        plan: the planner's spec.
    """

    drafters: tuple[DraftMethod, ...]
    draw: Draw
    verifier: Verifier
    planner: Planner[Any]
    plan: str

    @property
    def traits(self) -> DraftTraits:
        """Static facts of the drafters together."""
        return _traits(self.drafters)

    @property
    def draft_models(self) -> list[str]:
        """Names of the models that the drafters load."""
        return [name for method in self.drafters for name in method.models]


def choose_methods(draft: str | None, verify: str, plan: str | None) -> Methods:
    """Find and configure methods.

    For the drafter `auto`, which is chosen when the target is loaded, these are the methods of a stand-in without
    models: `suffix`, or plain decoding if that does not fit to the verifier.

    Raises:
        ConfigurationError: an unknown method or option, methods that do not fit together, or a missing extra.
        WeightsError: an extra for a drafter's model is missing.
    """
    if draft == AUTO_DRAFT:
        return _stand_in(verify, plan)
    verifier_class, verifier_config = VERIFIERS.configure(_only(VERIFIERS.parse(verify), "verifier", verify))
    drafters = _drafters(draft) if drafts(draft) else ()
    _require_extras(drafters)
    require_alternating((method.name, method.traits) for method in drafters)
    if not drafters and plan is not None:
        raise ConfigurationError(f"planner '{plan}' was given, but there is no drafter: name one, such as ngram")
    chosen_plan = _default_plan(drafters, verifier_class) if plan is None else plan
    planner_spec = _only(PLANNERS.parse(chosen_plan), "planner", chosen_plan)
    planner_class, planner_config = PLANNERS.configure(planner_spec)
    traits = _traits(drafters)
    draw = agree(str(draft), traits, verify, verifier_class) if drafters else Draw.FREE
    planner = planner_class(
        planner_config,
        default_depth=traits.depth,
        default_nodes=traits.nodes,
        parts=[method.traits.part(method.name) for method in drafters],
    )
    if drafters:
        require_effect(planner, plan=chosen_plan, draft=str(draft))
    return Methods(drafters, draw, verifier_class(verifier_config), planner, chosen_plan)


def _stand_in(verify: str, plan: str | None) -> Methods:
    """Return methods for `auto` before the target is known; raises for a wrong verifier or planner."""
    try:
        return choose_methods(FALLBACK_DRAFTS[0], verify, plan)
    except ConfigurationError:
        methods = choose_methods(None, verify, None)
        if plan is not None:
            PLANNERS.configure(_only(PLANNERS.parse(plan), "planner", plan))
        return methods


def _traits(drafters: tuple[DraftMethod, ...]) -> DraftTraits:
    """Those of the only drafter, or of all merged."""
    each = [method.traits for method in drafters]
    if not each:
        return NO_DRAFTS
    return each[0] if len(each) == 1 else MergedDrafter.describe(each)


def _require_extras(drafters: tuple[DraftMethod, ...]) -> None:
    """Refuse drafters for which a package is not installed, before the target is fetched or loaded."""
    if _traits(drafters).reads_grammars:
        require_extra("grammar", "drafter 'grammar' needs", error=ConfigurationError)
    for method in drafters:
        for name in method.models:
            require_extras(name)


def _default_plan(drafters: tuple[DraftMethod, ...], verifier: type[Verifier]) -> str:
    if _traits(drafters).works_ahead:
        return REPEATABLE_PLAN
    return DEFAULT_PLAN if drafters and verifier.lossless and not verifier.needs_distributions else REPEATABLE_PLAN


def _drafters(draft: str) -> tuple[DraftMethod, ...]:
    if AUTO_DRAFT in (re.split("[,:]", part)[0].strip() for part in draft.split("+")):
        raise ConfigurationError(
            f"drafter '{draft}': '{AUTO_DRAFT}' stands alone and takes no options: it chooses a drafter for the model. "
            "Name drafters to merge them; the planner of draft sizes is chosen by 'plan'"
        )
    specs = DRAFTERS.parse(draft)
    if not drafts(specs[0].name.partition("+")[0].strip()):
        raise ConfigurationError(f"drafter '{draft}': '{NO_DRAFT}' means plain decoding and takes no options")
    methods = [DraftMethod(str(spec), *DRAFTERS.configure(spec)) for spec in specs]
    names = [method.name for method in methods]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"drafter '{draft}' names '{twice}' twice: name it once")
    return tuple(methods)


def _only(specs: list[Spec], kind: str, text: str) -> Spec:
    if len(specs) > 1:
        raise ConfigurationError(f"{kind} '{text}' names {len(specs)} methods: name one")
    return specs[0]


def require_fit(methods: Methods, target: LoadedModel) -> None:
    """Check that a target can be used with the drafters; loads nothing.

    Raises:
        ConfigurationError: it scores chains only, has not the layers, or no such drafter works with its kind.
    """
    if methods.traits.branches and not target.model.supports_trees:
        raise ConfigurationError(
            f"this drafter drafts trees with branches, but '{target.name}' scores chains only: draft a chain"
        )
    if is_encoder_decoder_target(target):
        require_drafter("+".join(method.name for method in methods.drafters), methods.traits)
    require_layers(methods.traits.features, target)


def build_parts(
    methods: Methods,
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    *,
    dtype: Any,
    device: str,
    kernels: str = "auto",
    trust_remote_code: bool = False,
    load_draft: Callable[..., LoadedDraftModel] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    learning: LearningStore | None = None,
) -> Parts:
    """Load everything that the methods need besides the target.

    Args:
        methods: the chosen methods.
        target: the target model.
        tokenizer: the target's tokenizer, None if it has none.
        dtype: dtype of models that are loaded by name.
        device: their device.
        kernels: their kernels.
        trust_remote_code: whether Python code in their folders may run.
        load_draft: loads a drafter's model by name; None loads it from files.
        clock: clock of the planner.
        learning: store of what drafters learn; None to learn nothing beyond one engine's memory.

    Raises:
        ConfigurationError: the drafter does not fit the target.
        ModelError: the drafter's model cannot be found or used.
    """
    require_picks(target.model, methods.verifier, methods.traits)
    if not methods.drafters:
        return Parts(target.model, methods.verifier, methods.planner, clock=clock)
    if methods.planner.wants_costs:
        most = 1 + methods.planner.default_nodes
        methods.planner.learn_costs(costs_of(target.model, max_rows=most, clock=clock))
    require_fit(methods, target)

    read = load_draft or model_reader(target, dtype, device, kernels=kernels, trust_remote_code=trust_remote_code)

    def load(name: str, **weights: str) -> LoadedDraftModel:
        loaded = read(name, **weights)
        if methods.traits.branches and not loaded.model.supports_trees:
            raise ConfigurationError(f"drafter model '{name}' scores chains only: draft a chain with it")
        return loaded

    apart = apart_reader(target.quantization, trust_remote_code=trust_remote_code)
    drafter = _drafter(methods, target.model, tokenizer, load=load, apart=apart, clock=clock, learning=learning)
    return Parts(target.model, methods.verifier, methods.planner, drafter, methods.traits, clock)


def _drafter(
    methods: Methods,
    target: LanguageModel,
    tokenizer: Tokenizer | None,
    *,
    load: Callable[..., LoadedDraftModel],
    apart: Callable[..., LoadedDraftModel],
    clock: Clock,
    learning: LearningStore | None,
) -> ForcedTokenDrafter:
    """Return the drafter of all methods: merged, and wrapped for tokens that a grammar forces."""
    built: list[Drafter[Any]] = []
    num_drawing = 0
    for method in methods.drafters:
        draw = part_draw(method.traits.draws, methods.draw)
        shares = methods.verifier.shares_noise
        context = DraftContext(target, tokenizer, draw, shares, load, num_drawing, learning, apart)
        num_drawing += draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT)
        own = method.cls(method.config, context)
        built.append(wrapped_apart(own, method.traits, target, clock))
    names = [method.name for method in methods.drafters]
    drafter = built[0]
    if len(built) > 1:
        drafter = MergedDrafter(
            built,
            names,
            traits=[method.traits for method in methods.drafters],
            draw=methods.draw,
            vocab_size=target.vocab_size,
            clock=clock,
        )
    return ForcedTokenDrafter(
        drafter,
        "+".join(names),
        draw=methods.draw,
        may_branch=target.supports_trees and not methods.verifier.chains_only,
        vocab_size=target.vocab_size,
    )
