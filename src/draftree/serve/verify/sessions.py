"""Sessions: the texts of one device in the engine, a lease, and numbered requests that are answered once."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, final

from draftree.async_llm import AsyncLLM, Submission
from draftree.core.errors import EngineClosedError, GenerationError
from draftree.core.tree import TokenTree, depths, is_chain
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.remote.address import FrameError
from draftree.remote.protocol import DraftedText, WalkedText
from draftree.remote.target import crc_of
from draftree.serve.pool import ServedModel
from draftree.serve.records import ApiKey
from draftree.serve.verify.layer_passes import LayerTexts


@dataclass
class OpenText(ABC):
    """One open text; `used` is when the client last named it, in seconds of the service's clock."""

    number: int
    llm: AsyncLLM
    submission: Submission
    used: float

    @property
    def sequence(self) -> WritingSequence:
        return self.submission.sequences[0]

    @property
    def is_over(self) -> bool:
        """Whether the text has ended, and its client needs nothing more of it."""
        return self.sequence.is_finished

    def raise_failure(self) -> None:
        sequence = self.sequence
        if sequence.error is not None:
            raise sequence.error
        if sequence.finish_reason is FinishReason.ABORT:
            raise EngineClosedError("the text was ended by the server")

    @abstractmethod
    async def close(self) -> None:
        """End the text."""


@final
@dataclass
class DraftedByClient(OpenText):
    """A text that advances by one round for each draft of its client."""

    def check(self, draft: DraftedText, *, max_nodes: int, vocab_size: int, may_branch: bool) -> None:
        """Check a draft against the text; nothing has happened if it is refused."""
        history, tree = self.sequence.history, draft.tree
        self.raise_failure()
        if self.sequence.is_finished or draft.length != len(history) or draft.crc != crc_of(history):
            raise FrameError(
                f"text {draft.text} has {len(history)} tokens here, and the draft follows {draft.length} or others: "
                "open the text again",
                code="out_of_step",
            )
        if len(tree) > max_nodes:
            raise FrameError(
                f"the draft has {len(tree)} tokens: at most {max_nodes} are allowed", code="too_many_nodes"
            )
        if any(token >= vocab_size for token in tree.tokens):
            raise FrameError(f"the draft has a token beyond the vocabulary of {vocab_size}", code="bad_token")
        if len(tree) and max(depths(tree.parents)) >= self.sequence.room:
            raise FrameError(
                f"the draft is as deep as the text may still grow ({self.sequence.room}): the bonus needs room",
                code="too_deep",
            )
        if not may_branch and not is_chain(tree.parents):
            raise FrameError("this model scores chains only, and the draft branches", code="too_many_branches")

    async def verify(self, tree: TokenTree) -> WalkedText:
        await self.llm.give(self.submission, tree)
        async for update in self.submission:
            if update.rounds:
                record = update.rounds[-1]
                if record.bonus is None:
                    break
                return WalkedText(self.number, tuple(record.path), record.bonus, self.sequence.is_finished)
        self.raise_failure()
        raise GenerationError("the round gave no verdict")

    async def park(self) -> None:
        """Free the slot until the next draft."""
        await self.llm.park(self.submission)

    async def close(self) -> None:
        await self.submission.aclose()


@final
@dataclass
class WrittenAlone(OpenText):
    """A text that the server writes without its client, which reads what there is."""

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._is_read = False
        self._has_news = asyncio.Event()
        self._collecting = asyncio.create_task(self._collect())

    @property
    def is_over(self) -> bool:
        return self._is_read

    async def _collect(self) -> None:
        try:
            async for update in self.submission:
                self._tokens += update.token_ids
                self._has_news.set()
        finally:
            self._has_news.set()

    async def read(self, start: int) -> tuple[list[int], bool]:
        """Return the tokens from an index on, and whether the text has ended after them; waits for at least one."""
        while len(self._tokens) <= start and not self._collecting.done():
            self._has_news.clear()
            await self._has_news.wait()
        if start > len(self._tokens):
            raise FrameError(f"the text has {len(self._tokens)} tokens, and {start} were read", code="out_of_step")
        if len(self._tokens) <= start:
            self.raise_failure()
        self._is_read = self._collecting.done() and self.sequence.is_finished
        return self._tokens[start:], self._is_read

    async def close(self) -> None:
        await self.submission.aclose()
        self._collecting.cancel()


TOKEN_BYTES = 18


@final
@dataclass(eq=False)
class Session:
    """One device, until its lease `expires`. For one event loop.

    Other API keys cannot use the session; the secret `token` names it in later connections.
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
        return self._answer is not None and not self._answer.done()

    async def answered(self, number: int, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Return the answer to a numbered request; a repeated request gets the same answer, without other effects.

        The work goes on if the connection of the request ends.
        """
        if number == self._last and self._answer is not None:
            self.num_repeated += 1
            return await asyncio.shield(self._answer)
        if number != self._last + 1:
            raise FrameError(f"the request has number {number}, and {self._last + 1} is the next", code="out_of_order")
        if self.is_answering:
            raise FrameError("the request before is not answered: wait for its answer", code="out_of_order")

        self._last = number
        self._answer = asyncio.create_task(work())
        return await asyncio.shield(self._answer)

    async def close(self) -> None:
        texts, self.texts = list(self.texts.values()), {}
        for text in texts:
            await text.close()
        if self._answer is not None:
            self._answer.cancel()

    def expected(self, kind: type[Any], number: int) -> Any:
        text = self.texts.get(number)
        if text is None:
            raise FrameError(f"there is no open text {number}: open it again", code="text_lost")
        if not isinstance(text, kind):
            raise FrameError(
                f"text {number} is of the other kind: drafts are for texts without 'plain', reads for others"
            )
        return text


@dataclass(slots=True)
class Talk:
    """One connection, or one POST request; `num_bad` counts frames that could not be read."""

    key: ApiKey
    session: Session | None = None
    num_bad: int = 0
