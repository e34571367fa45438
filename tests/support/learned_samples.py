"""Tables of verified texts and their stores. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftree.drafters.learning.settings import parse_learning
from draftree.drafters.learning.store import LearningStore
from draftree.drafters.learning.tables import TextTables

VOCAB = 50
ORDERS = (1, 8)


def tables(*, memory: int = 1000, by_owner: bool = False) -> TextTables:
    return TextTables(ORDERS, memory=memory, vocab_size=VOCAB, identity="abc", by_owner=by_owner)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def followers(learned: TextTables, owner: str | None, tail: Sequence[int]) -> set[int]:
    table = learned.find(owner)
    if table is None:
        return set()
    return set(table.find(text(*tail), depth=1, limit=8).followers[:, 0].tolist())


def store_in(folder: Path, scope: str = "server", **options: object) -> LearningStore:
    extra = "".join(f",{key}={value}" for key, value in options.items())
    return LearningStore(parse_learning(f"{scope},folder={folder}{extra}"), "f00d")


def learner_of(store: LearningStore, memory: int = 1000) -> TextTables:
    return store.learner(
        "suffix",
        lambda: TextTables(
            ORDERS,
            memory=memory,
            vocab_size=VOCAB,
            identity=store.fingerprint,
            by_owner=store.is_by_key,
            lock=store.lock,
        ),
    )
