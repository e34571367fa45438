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
from draftree.engine.prompts import DecoderOptions
from draftree.engine.sequence import Update
from draftree.outputs import Completion, CompletionStats, stats_of
from draftree.sampling.params import SamplingParams
from draftree.serve.errors import api_error
from draftree.serve.params import named_error
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Reasoning


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How the texts of a job are generated.

    Attributes:
        draft: one of the model's drafters or "none"; None for its default.
        priority: lower numbers are served first.
        request_id: id in records and logs.
        trace: whether updates hold the rounds.
        drops_text: whether only the prompt is wanted; the generated token is not counted.
        names: body field of a library parameter, where it differs.
        owner: whose texts they are, for drafters that learn.
        decoder: options of encoder-decoder models.
        clips_tokens: whether a `max_tokens` that does not fit is reduced.
        reasoning: of the answers to a conversation; None for a model that does not reason.
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
    """New text and tokens of one choice."""

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
        """Queue the prompts."""
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
        """The drafter of these texts; "none" for plain decoding."""
        return self.options.draft or (self.served.drafts or ("none",))[0]

    @property
    def is_plain(self) -> bool:
        """Whether the texts are written without a drafter."""
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
        """Wait for all texts, and return them in the order of the choices.

        Args:
            on_update: called with every update.
        """
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
        """Return the finished texts in the order of the choices."""
        return [done for submission in self.submissions for done in submission.completions()]

    def stats(self) -> list[CompletionStats]:
        """Return the statistics of all choices so far."""
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
