"""A submitted request: its updates as they arrive, and its completions at the end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, final

from draftree.completion import Completion, completions_of
from draftree.core.errors import GenerationError
from draftree.engine.sequence import FinishReason, Update, WritingSequence
from draftree.engine.serving.listening import Request


@final
class Submission:
    """A request in the engine: an async iterator of the updates of its n texts, in order of arrival.

    The iteration ends when all texts are finished. A slow reader receives all unread output of a text in one update.
    A text that fails alone has its error in `Update.sequence.error`; `completions` raises it. Leaving the context, or
    `aclose`, aborts unfinished texts.

    Args:
        request: accepted by the engine.
        leave: aborts the unfinished sequences of a request.
    """

    def __init__(self, request: Request, leave: Callable[[Request], None]) -> None:
        self._request = request
        self._leave = leave

    @property
    def request_id(self) -> str:
        """The name of the request in records, errors and updates."""
        return self.sequences[0].request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt, after truncation."""
        return self.sequences[0].prompt_ids

    @property
    def decoder_prompt_ids(self) -> tuple[int, ...]:
        """Token ids that the text continues: those of the prompt, or the decoder's prompt if the prompt is a source."""
        history = self.sequences[0].history
        return tuple(history.tokens[: history.prompt_length].tolist())

    @property
    def sequences(self) -> tuple[WritingSequence, ...]:
        """The n sequences; written on the engine's thread until they are finished."""
        return self._request.sequences

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        update = await self._request.next()
        if update is None:
            raise StopAsyncIteration
        return update

    def completions(self) -> list[Completion]:
        """Return the n completions, in the order of their index; call it after the last update.

        Raises:
            GenerationError: the updates were not read to the end, or the request was aborted.
            DraftreeError: as `AsyncLLM.generate`.
        """
        if not self._request.is_over or any(s.finish_reason is FinishReason.ABORT for s in self.sequences):
            raise GenerationError(
                f"request {self.request_id} is not finished, or was aborted: read its updates to the end first"
            )
        return completions_of([self.sequences])

    async def aclose(self) -> None:
        """Abort unfinished texts within one round; does not wait for it."""
        self._leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
