"""Plain completions: the whole object, and chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, final

from draftree.completion import Completion
from draftree.engine.sequence import Update
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.render.head import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.render.tokens import OffsetLogprobs, prompt_logprobs_json
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.sse import ChunkEncoder
from draftree.text.detokenize import Detokenizer

KIND = "text_completion"


@final
class CompletionWriter:
    """The JSON of the continuations of some prompts.

    Args:
        job: the texts.
        body: of the request.
        head: identity of the response.
        echoed: the text of every prompt, if it is part of the texts; else empty.
    """

    def __init__(self, job: Job, body: CompletionBody, head: Head, echoed: Sequence[str]) -> None:
        self._job, self._body, self._echoed = job, body, echoed
        self._fields = head.fields(KIND)
        self._report = Report(job, body)
        self._offsets: dict[int, OffsetLogprobs] = {}
        self._begun: set[int] = set()
        self._num_sent = 0

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """Return the response object of finished texts."""
        choices = [self._choice(index, done) for index, done in enumerate(completions)]
        return {**self._fields, "choices": choices, **closing_fields(self._job)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded chunks of a stream, one for each update of a text."""
        encoder = ChunkEncoder(self._fields)
        async for found in self._job.updates():
            self._num_sent += len(found.update.token_ids)
            chunk = self._chunk(found)
            if chunk is not None:
                yield encoder.event(chunk)
        last = last_chunk(self._job, self._body)
        if last is not None:
            yield encoder.event(last)

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        body, drops = self._body, self._job.options.drops_text
        text, ids, entries = ("", (), ()) if drops else (done.text, done.token_ids, done.logprobs or ())
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + text,
            "logprobs": None,
            "finish_reason": "length" if drops else done.finish_reason,
            "stop_reason": None if drops else done.stop_reason,
        }
        prompt = done.prompt_logprobs or ()
        if body.logprobs is not None:
            choice["logprobs"] = self._begin_offsets(index, prompt).push(entries, ids)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(prompt, self._job.served.texts)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(self._prompt_ids(index)), "token_ids": list(ids)}
        return choice

    def _chunk(self, found: ChoiceUpdate) -> dict[str, Any] | None:
        """Return the own fields of the chunk of an update; None if it has nothing to show."""
        body, index, update = self._body, found.index, found.update
        drops, is_first = self._job.options.drops_text, index not in self._begun
        self._begun.add(index)
        report = self._report.part(found)
        text = "" if drops else "".join(piece.text for piece in update.pieces)
        if is_first:
            text = self._echo(index) + text
        if not (text or update.is_last or report or body.logprobs is not None or body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if update.is_last:
            choice["finish_reason"] = "length" if drops else str(update.sequence.finish_reason)
            choice["stop_reason"] = None if drops else update.sequence.stop_reason
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, update, is_first=is_first)
        if body.return_token_ids:
            choice["token_ids"] = [] if drops else list(update.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(self._prompt_ids(index))
        chunk = {"choices": [choice], **usage_so_far(self._job, body, self._num_sent)}
        return {**chunk, "draftree": report} if report else chunk

    def _logprobs(self, index: int, update: Update, *, is_first: bool) -> dict[str, Any]:
        if is_first:
            # those of the prompt are complete before the first token is written
            self._offsets[index] = self._begin_offsets(index, update.sequence.prompt_logprobs)
        ids, entries = ((), ()) if self._job.options.drops_text else (update.token_ids, update.logprobs)
        return self._offsets[index].push(entries, ids)

    def _begin_offsets(self, index: int, prompt: Sequence[Any]) -> OffsetLogprobs:
        """Return the writer of log-probabilities of a text, whose first result begins with an echoed prompt."""
        texts = self._job.served.texts
        params = self._job.params
        detokenizer = None
        if texts.tokenizer is not None:
            before = self._job.submissions[index // params.n].decoder_prompt_ids
            detokenizer = Detokenizer(
                texts.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=before
            )
        found = OffsetLogprobs(texts, detokenizer)
        if self._body.echo:
            found.begin(prompt, self._prompt_ids(index), self._echo(index))
        return found

    def _prompt_ids(self, index: int) -> tuple[int, ...]:
        return self._job.submissions[index // self._job.params.n].prompt_ids

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._job.params.n] if self._echoed else ""
