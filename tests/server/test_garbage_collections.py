"""Garbage collections of a server: objects of libraries and models are exempt once it is ready."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from draftree.serve.pool import ServedModel
from draftree.serve.run import Loading


def test_objects_that_exist_when_the_models_are_loaded_are_exempt_from_collections() -> None:
    opened: list[Sequence[ServedModel]] = []
    server: Any = SimpleNamespace(server=SimpleNamespace(open=opened.append), should_exit=False)
    loading = Loading(list, server)

    async def ready() -> None:
        is_ready = asyncio.Event()
        loading.start(is_ready.set)
        await is_ready.wait()

    before = gc.get_freeze_count()
    try:
        asyncio.run(ready())
        num_exempt = gc.get_freeze_count() - before
    finally:
        gc.unfreeze()  # this process goes on
    assert opened == [[]]
    assert loading.error is None
    assert num_exempt > 10_000, "the modules that are imported here"
