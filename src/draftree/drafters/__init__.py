"""Drafters: propose a token tree for every sequence of a batch.

Each module of this folder but `base` is one method: its file name is its name in specs, and the registry lists it
without importing it or torch. `base` holds the interface: `Drafter`, which asks for one method, `draft_one`, with
`DraftTraits`, `DraftContext`, `SequenceView` and `Observation`. What methods share is in subpackages:

* `tree_builder`: trees grown level by level with a model, a head, or a part of the target;
* `lookup`: earlier occurrences of the last tokens, and trees of their continuations;
* `learning`: what is learned from verified texts, and its files;
* `wrappers`: several drafters merged, drafting while the target verifies.

Invariants: a draft never changes a text whose verifier guarantees it; a tree fits in its budget, and an empty tree is
always allowed; state of a sequence is in the object that `open` returns, and in no other place.

The engine and everything above it may import this package; it imports neither planners, verifiers nor the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from draftree.core.registry import Registry
from draftree.options import NO_DRAFT

if TYPE_CHECKING:
    from draftree.drafters.base import Drafter

DRAFTERS: Registry[Drafter] = Registry("draftree.drafters", "draftree.drafters.base:Drafter", kind="drafter")


def drafts(draft: str | None) -> TypeGuard[str]:
    """Return whether this names a drafter and not plain decoding."""
    return draft is not None and draft != NO_DRAFT
