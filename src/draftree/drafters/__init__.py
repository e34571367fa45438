"""Drafters: one file each. The registry needs none of them, and no torch, to list them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.drafters.base import Drafter

DRAFTERS: Registry[Drafter] = Registry("draftree.drafters", "draftree.drafters.base:Drafter", kind="drafter")

NO_DRAFT = "none"
"""How a user names plain decoding where a drafter could stand."""


def drafts(draft: str | None) -> TypeGuard[str]:
    """Whether this names a drafter; otherwise it is plain decoding."""
    return draft is not None and draft != NO_DRAFT
