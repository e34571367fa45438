"""The texts of one HTTP request: a submission for each prompt, and their updates in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.async_llm import Submission
from draftree.core.errors import InvalidRequestError, UnsatisfiableError
from draftree.core.host import SYSTEM_CLOCK
from draftree.engine.sequence import Update
from draftree.options import RequestOptions
from draftree.outputs import Completion, CompletionStats, stats_of
from draftree.serve.errors import api_error, named_error
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    index: int
    update: Update

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.update.pieces)


class Job:
    """Submissions of one request; `aclose` aborts what is unfinished. Read `updates` once, or `finish`."""

    def __init__(
        self,
        served: ServedModel,
        options: RequestOptions,
        submissions: Sequence[Submission],
        *,
        names: Mapping[str, str],
    ) -> None:
        self.served = served
        self.options = options
        self.submissions = tuple(submissions)
        self.names = names  # the body's field of an option, where it has another name
        self.reasoning: Reasoning | None = None
        self.drops_text = False  # whether only the prompt is wanted; the generated token is not counted
        self.first_time: float | None = None

    @classmethod
    async def start(
        cls,
        served: ServedModel,
        prompts: Sequence[Any],
        options: RequestOptions,
        *,
        names: Mapping[str, str],
        wait: bool = False,
    ) -> Job:
        submissions: list[Submission] = []
        try:
            for prompt in prompts:
                submissions.append(await served.llm.submit(prompt, options, wait=wait))
        except BaseException as error:
            for submission in submissions:
                await submission.aclose()
            if isinstance(error, InvalidRequestError):
                raise named_error(error, names) from error
            raise
        return cls(served, options, submissions, names=names)

    @property
    def draft(self) -> str:
        return self.options.draft or self.served.default_draft

    @property
    def is_plain(self) -> bool:
        return self.draft == "none"

    async def updates(self) -> AsyncIterator[ChoiceUpdate]:
        """Yield the updates of all choices; choice `prompt * n + index`."""
        if len(self.submissions) == 1:
            async for update in self.submissions[0]:
                self._check(update)
                yield ChoiceUpdate(update.sequence.index, update)
            return
        async for choice in self._merged():
            self._check(choice.update)
            yield choice

    async def _merged(self) -> AsyncIterator[ChoiceUpdate]:
        arrived: asyncio.Queue[ChoiceUpdate | BaseException | None] = asyncio.Queue()

        async def read(place: int, submission: Submission) -> None:
            try:
                async for update in submission:
                    arrived.put_nowait(ChoiceUpdate(place * self.options.n + update.sequence.index, update))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        readers = [asyncio.create_task(read(place, each)) for place, each in enumerate(self.submissions)]
        try:
            going = len(readers)
            while going:
                item = await arrived.get()
                if item is None:
                    going -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    def _check(self, update: Update) -> None:
        if self.first_time is None:
            self.first_time = SYSTEM_CLOCK()
        error = update.sequence.error if update.is_last else None
        if isinstance(error, InvalidRequestError | UnsatisfiableError):
            raise named_error(error, self.names) from error
        if error is not None:
            raise api_error(error) from error

    async def finish(self, on_update: Callable[[ChoiceUpdate], None] | None = None) -> list[Completion]:
        async for choice in self.updates():
            if on_update is not None:
                on_update(choice)
        return self.completions()

    async def further(self, prompt: Any, options: RequestOptions) -> Completion:
        """Queue a further prompt of the same request, which belongs to the job from then on, and wait for its text."""
        more = await Job.start(self.served, [prompt], options, names=self.names, wait=True)
        self.submissions += more.submissions
        (done,) = await more.finish()
        return done

    def completions(self) -> list[Completion]:
        return [done for submission in self.submissions for done in submission.completions()]

    def stats(self) -> list[CompletionStats]:
        return [stats_of(sequence) for submission in self.submissions for sequence in submission.sequences]

    async def aclose(self) -> None:
        """Abort what is unfinished; it leaves the engine within one round."""
        for submission in self.submissions:
            await submission.aclose()
