"""From specs to parts: methods are found, configured and matched first; weights are loaded last."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.registry import Spec
from draftree.core.tree import Draw
from draftree.drafters.base import DRAFTERS, DraftContext, Drafter, LoadedDraftModel
from draftree.engine.parts import Parts, agree
from draftree.models.loading import LoadedModel, load_model
from draftree.planners.base import PLANNERS, Planner
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers.base import VERIFIERS, Verifier

NO_DRAFT = "none"
DEFAULT_PLAN = "fixed"


@dataclass(frozen=True, slots=True)
class Methods:
    """Configured methods that fit together; nothing is loaded yet."""

    drafter: tuple[type[Drafter[Any]], Any] | None
    draw: Draw
    verifier: Verifier
    planner: Planner[Any]


def choose_methods(draft: str | None, verify: str, plan: str | None) -> Methods:
    """Find and configure methods.

    Raises:
        ConfigurationError: an unknown method or option, or methods that do not fit together.
    """
    verifier_class, verifier_config = VERIFIERS.configure(_only(VERIFIERS.parse(verify), "verifier", verify))
    drafter = None if draft is None or draft == NO_DRAFT else _drafter(draft)
    if drafter is None and plan is not None:
        raise ConfigurationError(
            f"planner '{plan}' was asked for, but there is no drafter to plan for: name one, such as ngram"
        )
    planner_class, planner_config = PLANNERS.configure(
        _only(PLANNERS.parse(plan or DEFAULT_PLAN), "planner", plan or DEFAULT_PLAN)
    )
    draw, depth = Draw.FREE, 0
    if drafter is not None:
        cls, config = drafter
        draw = agree(str(draft), cls.draws(config), verify, verifier_class.accepts)
        depth = cls.default_depth(config)
    return Methods(drafter, draw, verifier_class(verifier_config), planner_class(planner_config, default_depth=depth))


def _drafter(draft: str) -> tuple[type[Drafter[Any]], Any]:
    if draft.split(",")[0].split(":")[0] == NO_DRAFT:
        raise ConfigurationError(f"drafter '{draft}': 'none' means plain decoding and takes no options")
    return DRAFTERS.configure(_only(DRAFTERS.parse(draft), "drafter", draft))


def _only(specs: list[Spec], kind: str, text: str) -> Spec:
    if len(specs) > 1:
        raise ConfigurationError(f"{kind} '{text}' names {len(specs)} methods: name one")
    return specs[0]


def build_parts(
    methods: Methods, target: LoadedModel, tokenizer: Tokenizer | None, *, dtype: Any, device: str
) -> Parts:
    """Load what the methods need beside the target.

    Raises:
        ConfigurationError: the drafter does not fit the target.
        ModelError: the drafter's model can not be had or used.
    """
    if methods.drafter is None:
        return Parts(target.model, methods.verifier, methods.planner)

    def load(name: str) -> LoadedDraftModel:
        loaded = load_model(name, dtype=dtype, device=device)
        own = None if loaded.folder is None else Tokenizer.load(loaded.folder)
        return LoadedDraftModel(loaded.model, None if own is None else own.vocabulary(), os.fspath(name))

    cls, config = methods.drafter
    if cls.needs_trees and not target.model.supports_trees:
        raise ConfigurationError(
            f"this drafter guesses trees, but '{target.name}' scores chains only: take another drafter"
        )
    vocabulary = None if tokenizer is None else tokenizer.vocabulary()
    context = DraftContext(target.model, vocabulary, methods.draw, methods.verifier.shares_noise, load)
    return Parts(target.model, methods.verifier, methods.planner, cls(config, context))
