"""Drafters, one per file. The registry lists them without importing them or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.drafters.base import Drafter

DRAFTERS: Registry[Drafter] = Registry("draftree.drafters", "draftree.drafters.base:Drafter", kind="drafter")

NO_DRAFT = "none"
"""Names of plain decoding in place of a drafter."""
AUTO_DRAFT = "auto"
"""Stands for a drafter that is chosen when the target is loaded: `draftree.choices.decide`."""


def drafts(draft: str | None) -> TypeGuard[str]:
    """Return whether this names a drafter and not plain decoding."""
    return draft is not None and draft != NO_DRAFT
