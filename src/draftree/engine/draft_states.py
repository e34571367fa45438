"""The drafter's states of running sequences and of cached prefixes: they go where the target's slots go."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

from draftree.core.errors import is_out_of_memory
from draftree.drafters.base import Drafter, SequenceView

logger = logging.getLogger(__name__)


@final
class DraftStates:
    """Opens, copies, hands over and closes states; does nothing, with None as every state, without a drafter.

    Args:
        drafter: whose states they are.
    """

    def __init__(self, drafter: Drafter[Any] | None) -> None:
        self._drafter = drafter

    def reserve(self, count: int, length: int) -> None:
        """Make room for so many states of texts of so many tokens."""
        if self._drafter is not None:
            self._drafter.reserve(count, length)

    def open(self, view: SequenceView) -> Any:
        """State for a new sequence."""
        return None if self._drafter is None else self._drafter.open(view)

    def fork(self, state: Any, view: SequenceView, length: int) -> Any:
        """State for a new sequence whose first `length` tokens are those of another; opened anew from None."""
        if self._drafter is None or state is None:
            return self.open(view)
        return self._drafter.fork(state, view, length)

    def attach(self, state: Any, view: SequenceView, length: int) -> Any:
        """As `fork`, from the state of a cached prefix that is not kept any longer."""
        if self._drafter is None or state is None:
            return self.open(view)
        return self._drafter.attach(state, view, length)

    def detach(self, state: Any, length: int) -> Any:
        """The state of a finished sequence, for a cached prefix of so many tokens; None if nothing of it is kept."""
        if self._drafter is None or state is None:
            return None
        try:
            return self._drafter.detach(state, length)
        except Exception as error:
            # a drafter cannot change the text, and must not stop other sequences
            _log("the drafter could not keep a state with its cached prefix", error)
            return None

    def close(self, state: Any) -> None:
        """Close a state."""
        if self._drafter is None or state is None:
            return
        try:
            self._drafter.close(state)
        except Exception as error:
            # as above
            _log("the drafter could not close a state", error)

    def check_integrity(self, states: Sequence[Any]) -> None:
        """Raise AssertionError if a state has two owners, or the drafter's bookkeeping contradicts itself."""
        held = [state for state in states if state is not None]
        assert self._drafter is not None or not held, "states belong to a drafter"
        if self._drafter is not None:
            self._drafter.check_integrity(held)


def _log(text: str, error: Exception) -> None:
    """Log what failed; a lack of memory is reported by the request that it ends, and has no traceback."""
    if is_out_of_memory(error):
        logger.info("%s: there is not enough memory", text)
    else:
        logger.error(text, exc_info=error)
