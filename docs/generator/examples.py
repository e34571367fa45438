"""Folders that examples of methods name: a description reads their configuration."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from draftree.heads.config import HeadConfig
from draftree.heads.folders import head_class, write_head
from draftree.heads.vocabulary import DraftVocabulary

__all__ = ["HEAD", "HEAD_CONFIG", "present"]

HEAD = "my-head"
HEAD_CONFIG = HeadConfig(
    kind="eagle3",
    features=(2, 15, 27),
    target_hidden=8,
    hidden=8,
    vocab_size=16,
    draft_vocab_size=16,
    depth=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate=8,
)
"""A head with the levels and hidden states of one for SmolLM2-135M-Instruct, in small sizes."""


@contextlib.contextmanager
def present() -> Iterator[None]:
    """The working directory is one with the folder of a head, with random weights."""
    head = head_class(HEAD_CONFIG.kind)(HEAD_CONFIG, DraftVocabulary.full(HEAD_CONFIG.vocab_size))
    with tempfile.TemporaryDirectory() as place:
        write_head(head, Path(place) / HEAD)
        with contextlib.chdir(place):
            yield
