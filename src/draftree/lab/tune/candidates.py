"""Drafters that `draftree tune` compares: without training, trained heads, the user's, and merges with `suffix`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.drafters import DRAFTERS, drafts
from draftree.loading.auto_draft import AutoCandidate, auto_candidates
from draftree.loading.loaded import LoadedModel, require_layers
from draftree.options import AUTO_DRAFT, NO_DRAFT

VERIFY = "coupled"
WITHOUT_TRAINING = ("suffix", "ngram", "ngram+suffix", "lookahead", "lookahead+suffix")
MERGED = "suffix"
LENGTHS = (2, 6)
"""Lengths of drafts of models that are tried besides the drafter's own."""
SHAPES = ("best-8", "best-16")
"""Trees of drafters that run a model."""
PLANS = ("fixed", "heuristic", "threshold")
"""Planners besides the default."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter ("none": plain decoding) and its planner (None: the default), as specs."""

    draft: str
    plan: str | None = None

    @property
    def name(self) -> str:
        return self.draft if self.plan is None else f"{self.draft}@{self.plan}"

    @property
    def is_plain(self) -> bool:
        return not drafts(self.draft)


PLAIN = Candidate(NO_DRAFT)


def own_candidates(specs: Sequence[str]) -> list[Candidate]:
    """Return the drafters that the user names (`DRAFT` or `DRAFT@PLAN`), each alone and merged with `suffix`."""
    candidates: list[Candidate] = []
    for spec in specs:
        draft, _, plan = spec.partition("@")
        if draft in (NO_DRAFT, AUTO_DRAFT):
            raise ConfigurationError(f"draft '{spec}' is no drafter to measure: plain decoding is always measured")
        choose_methods(draft, VERIFY, plan or None)
        candidates.append(Candidate(draft, plan or None))
        if MERGED not in {re.split("[,:]", part)[0] for part in draft.split("+")}:
            candidates.append(Candidate(f"{draft}+{MERGED}", plan or None))
    return list(dict.fromkeys(candidates))


def first_candidates(loaded: LoadedModel, candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the drafters to measure first, and those that do not fit to the target, with the reason."""
    automatic = {
        Candidate(candidate.draft): candidate
        for candidate in auto_candidates(loaded)[0]
        if candidate.draft.startswith(("head:", "model:"))
    }
    listed = dict.fromkeys([*candidates, *automatic, *(Candidate(draft) for draft in WITHOUT_TRAINING)])
    reasons = {candidate: reason_against(candidate, loaded, automatic.get(candidate)) for candidate in listed}
    refused = {candidate.name: reason for candidate, reason in reasons.items() if reason is not None}
    return [candidate for candidate, reason in reasons.items() if reason is None], refused


def reason_against(candidate: Candidate, loaded: LoadedModel, automatic: AutoCandidate | None = None) -> str | None:
    """Return why a candidate is not measured; `automatic` is what `auto` knows of it."""
    try:
        if automatic is not None:
            automatic.require_fit(loaded, DRAFTERS.parse)
        traits = choose_methods(candidate.draft, VERIFY, candidate.plan).traits
        require_layers(traits.features, loaded)
    except DraftreeError as error:
        return str(error)
    if traits.reads_predictions or traits.reads_grammars:
        return "it drafts from a prediction or a grammar of the request"
    if traits.branches and not loaded.model.supports_trees:
        return "it drafts trees, and the model scores chains only"
    return None


def variants_of(candidate: Candidate, loaded: LoadedModel) -> list[Candidate]:
    """Return the same drafter with other planners, and with other lengths and shapes if its first part runs a model."""
    if candidate.is_plain:
        return []
    variants = [Candidate(candidate.draft, plan) for plan in PLANS] if candidate.plan is None else []
    first, plus, rest = candidate.draft.partition("+")
    has_shape = first.partition(":")[0] in ("head", "model", "early-exit", "layer-skip")
    if has_shape and ",k=" not in first and ",tree=" not in first:
        options = [*(f",k={length}" for length in LENGTHS), *(f",tree={shape}" for shape in SHAPES)]
        variants += [Candidate(f"{first}{option}{plus}{rest}", candidate.plan) for option in options]
    return [variant for variant in variants if reason_against(variant, loaded) is None]
