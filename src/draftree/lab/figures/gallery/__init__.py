"""The figures: one file each, found by name."""

from __future__ import annotations
