"""Drafters that `draft="auto"` can stand for, in the order in which they are tried for a loaded target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ModelLoadError
from draftree.heads.shipped import ShippedHead, config_facts, shipped_heads
from draftree.loading.load import LoadedModel
from draftree.loading.trained import trained_for
from draftree.loading.tuned import tuned_for
from draftree.remote.address import is_remote

__all__ = ["FALLBACK_DRAFTS", "TRAINED_DRAFTS", "AutoCandidate", "auto_candidates"]

TRAINED_DRAFTS = ("head:{name}+suffix", "head:{name}")
"""With a trained head of this package: merged with `suffix`; alone for verifiers that need draft distributions."""
FALLBACK_DRAFTS = ("suffix", "suffix,width=1")
"""Without one: lossless and without a second model; as a chain for targets and verifiers without trees."""
NO_RESULT = "this package has no trained drafter for this model"
ON_A_SERVER = "trained drafters are not chosen for a model on a verify server"


@dataclass(frozen=True, slots=True)
class AutoCandidate:
    """A drafter, and why it is tried.

    Attributes:
        draft: its spec.
        plan: the planner that belongs to it; None for the default.
        reason: why it is chosen, in words.
    """

    draft: str
    plan: str | None
    reason: str


def auto_candidates(loaded: LoadedModel) -> tuple[list[AutoCandidate], list[str]]:
    """Return the drafters to try for a target, best first, and sentences about what was left out.

    Args:
        loaded: the target.

    Raises:
        DraftreeError: a file of this package, or of `draftree tune`, is damaged.
    """
    left_out: list[str] = []
    found: list[AutoCandidate] = []
    kept, ignored = tuned_for(loaded)
    if ignored is not None:
        left_out.append(ignored)
    if kept is not None:
        measured = f"'draftree tune' measured {kept.speedup:.2f} times the speed of plain decoding"
        found.append(AutoCandidate(kept.draft, kept.plan, measured))
    own = None if is_remote(loaded.name) else trained_for(loaded.model.fingerprint)
    if own is not None and not Path(own.folder).is_dir():
        left_out.append(f"the head that was trained for this model is no longer in '{own.folder}'")
    elif own is not None:
        specs = [draft.format(name=own.folder) for draft in TRAINED_DRAFTS]
        reason = f"trained here for this model: {own.tokens_per_round:.2f} tokens per round on unseen texts"
        found.extend(AutoCandidate(spec, None, reason) for spec in specs)
    head, reason = _trained_head(loaded)
    if head is not None:
        specs = [draft.format(name=head.name) for draft in TRAINED_DRAFTS]
        found.extend(AutoCandidate(spec, None, "trained for this model") for spec in specs)
    else:
        left_out.append(reason)
    found.extend(AutoCandidate(draft, None, "needs no training") for draft in FALLBACK_DRAFTS)
    return found, left_out


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
