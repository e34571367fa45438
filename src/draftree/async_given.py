"""The part of `AsyncLLM` for texts whose drafts come from clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from draftree.core.tree import TokenTree
from draftree.engine.costs import costs_of
from draftree.engine.serving.driver import Driver
from draftree.submission import Submission

if TYPE_CHECKING:
    from draftree.llm import LLM

T = TypeVar("T")


class AsyncGiven:
    """The methods of `AsyncLLM` for submissions with `given` trees."""

    _llm: LLM
    _driver: Driver

    async def give(self, submission: Submission, tree: TokenTree) -> None:
        """Give a submission with `given` the tree of its next round."""
        (sequence,), held = submission.sequences, self._llm.engine.held
        arrived = held.gathering.clock()
        await self.between_steps(lambda: held.give(sequence, tree, arrived=arrived))

    async def park(self, submission: Submission) -> None:
        """Free the slot of a submission that waits for a tree; its beginning stays a cached prefix for a while."""
        (sequence,) = submission.sequences
        await self.between_steps(lambda: self._llm.engine.held.park(sequence))

    async def between_steps(self, action: Callable[[], T]) -> T:
        """Return the result of an action on the engine's thread, which may use the model, between two steps.

        Raises:
            EngineClosedError: the engine was closed, or failed.
        """
        found: T = await asyncio.wrap_future(self._driver.call(lambda: self._llm.engine.lock.run(action)))
        return found

    async def pass_costs(self, max_rows: int) -> Mapping[int, float]:
        """Return seconds of the target's passes by rows, up to at least `max_rows`; measured once."""
        model, gathering = self._llm.model, self._llm.engine.held.gathering

        def measured() -> Mapping[int, float]:
            costs = costs_of(model, max_rows=max_rows)
            gathering.fixed = costs[min(costs)]
            return costs

        return await self.between_steps(measured)
