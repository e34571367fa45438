"""Completions of a beam search: the whole objects of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.beam.result import BeamResult, Hypothesis
from draftree.engine.sequence import TokenLogprob
from draftree.serve.render.head import Head
from draftree.serve.render.tokens import OffsetLogprobs, chat_logprobs, finite
from draftree.serve.schema.chat import ChatBody
from draftree.serve.schema.completions import CompletionBody
from draftree.text.detokenize import Detokenizer

FINISH_REASONS = {"length": "length"}
"""The API's names; every other end is a stop."""


@final
@dataclass(frozen=True, slots=True)
class BeamTexts:
    """The results of one request.

    Attributes:
        results: one for each prompt.
        num_choices: texts that were requested for each prompt; choice `prompt * num_choices + rank`.
        has_logprobs: whether choices have the log-probabilities of their tokens.
    """

    results: Sequence[BeamResult]
    num_choices: int
    has_logprobs: bool

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """All texts, best first for each prompt."""
        return [found for result in self.results for found in result.hypotheses]

    def usage(self) -> dict[str, Any]:
        """Return `usage`: the tokens of the prompts and of the returned texts."""
        prompts = sum(len(result.prompt_token_ids) for result in self.results)
        written = sum(len(found.tokens) for found in self.hypotheses)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _placed(self) -> list[tuple[int, BeamResult, Hypothesis]]:
        """Return the choices with their index and their result."""
        return [
            (place * self.num_choices + rank, result, found)
            for place, result in enumerate(self.results)
            for rank, found in enumerate(result.hypotheses)
        ]

    def completion(self, body: CompletionBody, head: Head, echoed: Sequence[str]) -> dict[str, Any]:
        """Return the object of a plain completion.

        Args:
            body: the request.
            head: identity of the response.
            echoed: the text of every prompt, if it is part of the texts; else empty.
        """
        texts, choices = head.model.texts if self.has_logprobs else None, []
        for index, result, found in self._placed():
            before = echoed[index // self.num_choices] if echoed else ""
            choice = {"index": index, "text": before + (found.text or ""), "logprobs": None, **_ending(found)}
            if texts is not None:
                detokenizer = None
                if texts.tokenizer is not None:
                    detokenizer = Detokenizer(
                        texts.tokenizer, skip_special_tokens=True, prompt_ids=result.prompt_token_ids
                    )
                choice["logprobs"] = OffsetLogprobs(texts, detokenizer).push(_entries(found), found.tokens)
            if body.return_token_ids:
                choice |= {"prompt_token_ids": list(result.prompt_token_ids), "token_ids": list(found.tokens)}
            choices.append(choice)
        return {**head.fields("text_completion"), "choices": choices, "usage": self.usage()}

    def chat(self, body: ChatBody, head: Head) -> dict[str, Any]:
        """Return the object of a chat completion."""
        choices = []
        for index, _, found in self._placed():
            logprobs = None
            if self.has_logprobs:
                logprobs = {"content": chat_logprobs(_entries(found), head.model.texts), "refusal": None}
            message = {"role": "assistant", "content": found.text or "", "refusal": None}
            choice = {"index": index, "message": message, "logprobs": logprobs, **_ending(found)}
            if body.return_token_ids:
                choice["token_ids"] = list(found.tokens)
            choices.append(choice)
        whole = {**head.fields("chat.completion"), "choices": choices, "usage": self.usage()}
        if body.service_tier is not None:
            whole["service_tier"] = "default"
        if body.return_token_ids:
            whole["prompt_token_ids"] = list(self.results[0].prompt_token_ids)
        return whole


def _ending(found: Hypothesis) -> dict[str, Any]:
    return {
        "finish_reason": FINISH_REASONS.get(found.finish_reason, "stop"),
        "stop_reason": found.stop_reason,
        "score": finite(found.score),
        "cumulative_logprob": finite(found.cumulative_logprob),
    }


def _entries(found: Hypothesis) -> tuple[TokenLogprob, ...]:
    """Return what each token added to the score."""
    return tuple(
        TokenLogprob(token, logprob, ()) for token, logprob in zip(found.tokens, found.token_logprobs, strict=True)
    )
