"""The texts of one HTTP request: a submission for each prompt, and their updates in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from draftree.async_llm import Submission
from draftree.core.errors import InvalidRequestError, UnsatisfiableError
from draftree.core.host import SYSTEM_CLOCK
from draftree.engine.sequence import Update
from draftree.options import DecoderOptions
from draftree.outputs import Completion, CompletionStats, stats_of
from draftree.sampling.params import SamplingParams
from draftree.serve.errors import api_error
from draftree.serve.params import named_error
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How the texts of a job are generated.

    `drops_text` keeps only the prompt, and the generated token is not counted; `names` has the body's field of a
    library parameter, where it differs; `owner` is whose texts they are, for drafters that learn.
    """

    draft: str | None = None
    priority: int = 0
    request_id: str | None = None
    trace: bool = False
    drops_text: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    owner: str | None = ""
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    clips_tokens: bool = False
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    index: int
    update: Update


class Job:
    """Submissions of one request; leaving its context aborts what is unfinished. Read `updates` once, or `finish`."""

    def __init__(
        self, served: ServedModel, params: SamplingParams, options: JobOptions, submissions: Sequence[Submission]
    ) -> None:
        self.served = served
        self.params = params
        self.options = options
        self.submissions = tuple(submissions)
        self.first_time: float | None = None
        """When the first text arrived, on the server's clock."""

    @classmethod
    async def start(
        cls,
        served: ServedModel,
        prompts: Sequence[Any],
        params: SamplingParams,
        options: JobOptions,
        *,
        wait: bool = False,
    ) -> Job:
        submissions: list[Submission] = []
        try:
            for prompt in prompts:
                submissions.append(
                    await served.llm.submit(
                        prompt,
                        params,
                        draft=options.draft,
                        priority=options.priority,
                        wait=wait,
                        request_id=options.request_id,
                        trace=options.trace,
                        owner=options.owner,
                        **options.decoder,
                    )
                )
        except BaseException as error:
            for submission in submissions:
                await submission.aclose()
            if isinstance(error, InvalidRequestError):
                raise named_error(error, options.names) from error
            raise
        return cls(served, params, options, submissions)

    @property
    def draft(self) -> str:
        return self.options.draft or (self.served.drafts or ("none",))[0]

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
        async for found in self._merged():
            self._check(found.update)
            yield found

    async def _merged(self) -> AsyncIterator[ChoiceUpdate]:
        arrived: asyncio.Queue[ChoiceUpdate | BaseException | None] = asyncio.Queue()

        async def read(place: int, submission: Submission) -> None:
            try:
                async for update in submission:
                    arrived.put_nowait(ChoiceUpdate(place * self.params.n + update.sequence.index, update))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        readers = [asyncio.create_task(read(place, each)) for place, each in enumerate(self.submissions)]
        try:
            going = len(readers)
            while going:
                found = await arrived.get()
                if found is None:
                    going -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            for reader in readers:
                reader.cancel()

    def _check(self, update: Update) -> None:
        if self.first_time is None:
            self.first_time = SYSTEM_CLOCK()
        error = update.sequence.error if update.is_last else None
        if isinstance(error, InvalidRequestError | UnsatisfiableError):
            raise named_error(error, self.options.names) from error
        if error is not None:
            raise api_error(error) from error

    async def finish(self, on_update: Callable[[ChoiceUpdate], None] | None = None) -> list[Completion]:
        async for found in self.updates():
            if on_update is not None:
                on_update(found)
        return self.completions()

    async def further(self, prompt: Any, params: SamplingParams, decoder: DecoderOptions) -> Completion:
        """Queue a further prompt of the same request, which belongs to the job from then on, and wait for its text."""
        options = replace(self.options, decoder=decoder)
        more = await Job.start(self.served, [prompt], params, options, wait=True)
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
