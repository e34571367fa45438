"""Verifiers, one per file. The registry lists them without imports, also of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.core.registry import Registry

if TYPE_CHECKING:
    from draftree.verifiers.base import Verifier

VERIFIERS: Registry[Verifier] = Registry("draftree.verifiers", "draftree.verifiers.base:Verifier", kind="verifier")
