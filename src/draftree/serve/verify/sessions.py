"""Sessions: the texts of one device, a lease, and numbered requests that are answered once."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, final

from draftree.remote.errors import FrameError
from draftree.serve.errors import ApiError
from draftree.serve.keys import ApiKey
from draftree.serve.pool import ServedModel
from draftree.serve.verify.layers import LayerTexts
from draftree.serve.verify.settings import VerifySettings
from draftree.serve.verify.texts import OpenText

__all__ = ["Session", "Talk", "require_room"]

FULL_RETRY_MS = 2000

TOKEN_BYTES = 18


@final
@dataclass(eq=False)
class Session:
    """One device. For one event loop.

    Attributes:
        key: API key of the device; others cannot use the session.
        model: the model of its texts.
        expires: end of the lease, in seconds of the service's clock.
        token: names the session in later connections; secret.
        texts: open texts by number.
        layers: texts of a device that runs the first layers; None for one that sends tokens.
    """

    key: ApiKey
    model: ServedModel
    expires: float
    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES))
    texts: dict[int, OpenText] = field(default_factory=dict)
    layers: LayerTexts | None = None
    num_repeated: int = 0
    _last: int = 0
    _answer: asyncio.Task[bytes] | None = None

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self._answer is not None and not self._answer.done()

    async def answered(self, number: int, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer to a numbered request; a repeated request gets the same answer, without other effects.

        The work goes on if the connection of the request ends.

        Args:
            number: 1 for the first request, then one more than that of the last.
            work: answers the request; raises nothing.

        Raises:
            FrameError: another number, or the last request is not answered.
        """
        if number == self._last and self._answer is not None:
            self.num_repeated += 1
            return await asyncio.shield(self._answer)
        if number != self._last + 1:
            raise FrameError(f"the request has number {number}, and {self._last + 1} is the next", code="out_of_order")
        if self.is_answering:
            raise FrameError("the request before is not answered: wait for its answer", code="out_of_order")

        async def run() -> bytes:
            return await work()

        self._last, self._answer = number, asyncio.create_task(run())
        return await asyncio.shield(self._answer)

    def text(self, number: int) -> OpenText:
        """Return an open text.

        Raises:
            FrameError: there is none of this number.
        """
        found = self.texts.get(number)
        if found is None:
            raise FrameError(f"there is no open text {number}: open it again", code="text_lost")
        return found

    async def close(self) -> None:
        """End all texts, and the request that is being answered."""
        texts, self.texts = list(self.texts.values()), {}
        for text in texts:
            await text.close()
        if self._answer is not None:
            self._answer.cancel()

    def expected(self, kind: type[Any], number: int) -> Any:
        """Return an open text of a kind.

        Raises:
            FrameError: there is none of this number and kind.
        """
        found = self.text(number)
        if not isinstance(found, kind):
            raise FrameError(
                f"text {number} is of the other kind: drafts are for texts without 'plain', reads for others"
            )
        return found


@dataclass(slots=True)
class Talk:
    """One connection, or one POST request.

    Attributes:
        key: its API key.
        session: named by an earlier frame; None before.
        num_bad: frames that could not be read.
    """

    key: ApiKey
    session: Session | None = None
    num_bad: int = 0


def require_room(sessions: Collection[Session], key: ApiKey, settings: VerifySettings, *, key_share: float) -> None:
    """Check that a key may open one more session.

    Raises:
        ApiError: 429, too many are open, of all keys or of this one.
    """
    own = sum(session.key.name == key.name for session in sessions)
    if len(sessions) >= settings.max_sessions or own >= max(1, math.ceil(settings.max_sessions * key_share)):
        raise ApiError(
            429,
            f"{len(sessions)} sessions are open, {own} with this API key: retry later",
            code="sessions_full",
            headers={"Retry-After": str(FULL_RETRY_MS // 1000)},
        )
