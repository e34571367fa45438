"""Draft models that run in threads behind pipes, as they run in processes otherwise. Not a test itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from draftree.drafters.base import LoadedDraftModel
from draftree.models.process import ProcessModel, serve_model
from draftree.models.table import TableLM, hashed, near

VOCAB = 12
TABLE = hashed(VOCAB, seed=5, scale=2.0)
NEAR = near(TABLE, seed=3, distance=0.2)


def piped_drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """While the generator is open, every model drafter uses `NEAR`; the list holds the ends of the served side."""
    ends: list[Connection] = []
    ours: list[Connection] = []

    def apart_reader(*_: Any, **__: Any) -> Any:
        def read(name: str) -> LoadedDraftModel:
            here, there = Pipe()
            ends.append(there)
            ours.append(here)
            threading.Thread(target=serve_model, args=(there, TableLM(NEAR)), daemon=True).start()
            return LoadedDraftModel(ProcessModel(here), None, name)

        return read

    monkeypatch.setattr("draftree.build.apart_reader", apart_reader)
    yield ends
    for end in ours:
        with suppress(OSError):
            end.close()
