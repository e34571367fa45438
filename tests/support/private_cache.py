"""A cache of a test's own that shares the compiled libraries. Not a test itself."""

from __future__ import annotations

from pathlib import Path

from draftree.weights.cache import Cache


def private_cache(root: Path) -> str:
    """Make a cache that is empty but for the libraries of the present one, which are not built again; its path."""
    native = Cache().root / "native"
    native.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / "native").symlink_to(native)
    return str(root)
