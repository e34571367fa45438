"""Trees grown from the distributions of a model, level by level."""

from __future__ import annotations
