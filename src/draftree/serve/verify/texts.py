"""The texts of a session in the engine: one that takes drafts, and one that the server writes alone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from draftree.async_llm import AsyncLLM
from draftree.core.errors import EngineClosedError, GenerationError
from draftree.core.tree import TokenTree, depths, is_chain
from draftree.core.types import SequenceRecord
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.remote.errors import FrameError
from draftree.remote.protocol import DraftedText, WalkedText
from draftree.remote.slots import crc_of
from draftree.submission import Submission

__all__ = ["DraftedByClient", "OpenText", "WrittenAlone"]


@dataclass
class OpenText(ABC):
    """One open text.

    Attributes:
        number: chosen by the client.
        llm: generates the text.
        submission: the text in the engine.
        used: when the client last named it, in seconds of the service's clock.
    """

    number: int
    llm: AsyncLLM
    submission: Submission
    used: float

    @property
    def sequence(self) -> WritingSequence:
        """The sequence in the engine."""
        return self.submission.sequences[0]

    @property
    def is_done(self) -> bool:
        """Whether the text has ended."""
        return self.sequence.is_finished

    @property
    def is_over(self) -> bool:
        """Whether the text has ended, and its client needs nothing more of it."""
        return self.is_done

    def raise_failure(self) -> None:
        """Raise the error of a text that failed, or was ended."""
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
        """Check a draft against the text; nothing has happened if it is refused.

        Raises:
            FrameError: other tokens before it, or a tree that the model cannot score.
        """
        history, tree = self.sequence.history, draft.tree
        self.raise_failure()
        if self.is_done or draft.length != len(history) or draft.crc != crc_of(history):
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
        """Verify one draft.

        Raises:
            DraftreeError: the text failed.
        """
        await self.llm.give(self.submission, tree)
        record = await self._round()
        if record is None or record.bonus is None:
            self.raise_failure()
            raise GenerationError("the round gave no verdict")
        return WalkedText(self.number, tuple(record.path), record.bonus, self.is_done)

    async def _round(self) -> SequenceRecord | None:
        """Return the record of the next round; None if the text ended without one."""
        async for update in self.submission:
            if update.rounds:
                return update.rounds[-1]
        return None

    async def park(self) -> None:
        """Free the slot until the next draft."""
        await self.llm.park(self.submission)

    async def close(self) -> None:
        """End the text."""
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
        """Whether the last tokens were read."""
        return self._is_read

    async def _collect(self) -> None:
        try:
            async for update in self.submission:
                self._tokens += update.token_ids
                self._has_news.set()
        finally:
            self._has_news.set()

    async def read(self, start: int) -> tuple[list[int], bool]:
        """Return the tokens from an index on, and whether the text has ended after them; waits for at least one.

        Raises:
            FrameError: the index is beyond the text.
            DraftreeError: the text failed.
        """
        while len(self._tokens) <= start and not self._collecting.done():
            self._has_news.clear()
            await self._has_news.wait()
        if start > len(self._tokens):
            raise FrameError(f"the text has {len(self._tokens)} tokens, and {start} were read", code="out_of_step")
        if len(self._tokens) <= start:
            self.raise_failure()
        self._is_read = self._collecting.done() and self.is_done
        return self._tokens[start:], self._is_read

    async def close(self) -> None:
        """End the text."""
        await self.submission.aclose()
        self._collecting.cancel()
