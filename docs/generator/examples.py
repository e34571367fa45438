"""Folders that examples of methods name: a description reads their configuration."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from draftree.heads.config import HeadConfig
from draftree.heads.layouts.speculators import SpeculatorsLayout

__all__ = ["HEAD", "HEAD_CONFIG", "present"]

HEAD = "my-head"
HEAD_CONFIG = HeadConfig(
    kind="eagle3",
    features=(2, 15, 27),
    target_hidden=576,
    hidden=576,
    vocab_size=49152,
    draft_vocab_size=8192,
    depth=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate=1536,
    target_name="smollm2-135m-instruct",
)
"""A head of SmolLM2-135M-Instruct."""


@contextlib.contextmanager
def present() -> Iterator[None]:
    """The working directory is one with the folder of a head, without weights."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / HEAD
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SpeculatorsLayout().values(HEAD_CONFIG)), encoding="utf-8")
        with contextlib.chdir(place):
            yield
