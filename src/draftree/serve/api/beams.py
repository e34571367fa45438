"""Beam searches of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from starlette.requests import Request

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult, Hypothesis
from draftree.beam.searcher import beam_opening
from draftree.beam.trie import TokenTrie
from draftree.core.errors import InvalidRequestError, suggestion
from draftree.core.host import SYSTEM_CLOCK
from draftree.engine.sequence import TokenLogprob
from draftree.options import DecoderOptions, RequestOptions
from draftree.serve.errors import ApiError, invalid, named_error
from draftree.serve.logprobs import OffsetLogprobs, chat_logprobs, finite
from draftree.serve.pool import ServedModel
from draftree.serve.records import RequestRecord
from draftree.serve.render import Head
from draftree.serve.request import (
    CONSTRAINTS,
    Encode,
    chat_limit,
    checked_options,
    completion_limit,
    longest_prompt,
    prompt_encoder,
    server_of,
    within_limits,
)
from draftree.serve.schema import BeamBody, ChatBody, CompletionBody, DraftreeOptions, ResponseFormat
from draftree.serve.settings import ServerSettings

FIELD = "beam_options"
MAX_PHRASES = 64  # required phrases of one request; every one is followed for every candidate
MAX_TEXTS = 4096
SAME_NAME = (
    "length_penalty",
    "early_stopping",
    "include_stop_str_in_output",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "no_repeat_ngram_size",
    "ngram_scope",
)
"""Fields with the name of a parameter of the search; null means the preset's value."""
ELSEWHERE = {
    "beam_width": "'n' or 'best_of'",
    "num_return_sequences": "'n'",
    "max_new_tokens": "'max_tokens'",
    "min_new_tokens": "'min_tokens'",
    **{name: f"'{name}'" for name in (*SAME_NAME, "temperature", "seed")},
}
OF_THE_LIBRARY = ("prefix_allowed_tokens_fn", "allowed_trie", "models", "lm_model", "lm_weight", "return_attention")
"""Parameters that are objects, or results that a response has no place for."""
TEXTS = {"force_phrases": MAX_PHRASES, "allowed_texts": MAX_TEXTS}
"""Options that are texts, encoded by the model's tokenizer, and how many there may be."""
NAMES = tuple(
    field.name
    for field in dataclasses.fields(BeamSearchParams)
    if field.name not in ELSEWHERE and field.name not in OF_THE_LIBRARY
)


def _texts(name: str, value: object, most: int) -> list[str]:
    path = f"{FIELD}.{name}"
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise invalid(f"'{path}' must be a list of texts, each with at least one character", path)
    if len(value) > most:
        raise invalid(f"'{path}' has {len(value)} texts: give at most {most}", path)
    return value


NO_SAMPLING = "leave it out, or set it and sampling in beam_options"
NO_FILTER = "a beam search has no such filter: leave it out"
NO_CONSTRAINT = "a beam search follows no format: leave it out, or leave use_beam_search out"
NO_PENALTY = "use no_repeat_ngram_size or length_penalty"
NO_RULE = "a beam search has no such rule: leave it out"
NO_SPECIALS = "special tokens are never part of the texts: leave it out"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "the texts of a beam search are known at its end: set stream=false"),
    "stream_options": ((), "the texts of a beam search are known at its end: leave it out"),
    "top_p": ((1,), NO_SAMPLING),
    "top_k": ((0, -1), NO_SAMPLING),
    "min_p": ((0,), NO_FILTER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ((0,), NO_PENALTY)),
    "repetition_penalty": ((1,), NO_PENALTY),
    "logit_bias": (({},), NO_RULE),
    "allowed_token_ids": ((), NO_RULE),
    "bad_words": (([],), NO_RULE),
    "prompt_logprobs": ((), "send a request without use_beam_search"),
    "top_logprobs": ((0,), "log-probabilities are those of the chosen tokens: leave it out"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), ((True,), NO_SPECIALS)),
    "prediction": ((), "no drafter takes part in a beam search: leave it out"),
    "draft": (("none",), "no drafter takes part in a beam search: leave it out"),
    "draftree": ((DraftreeOptions(),), "a beam search has no rounds: leave it out"),
    "response_format": ((ResponseFormat.model_validate({"type": "text"}),), NO_CONSTRAINT),
    **dict.fromkeys(("structured_outputs", *CONSTRAINTS), ((), NO_CONSTRAINT)),
    "tools": (([],), "calls are not parsed in the texts of a beam search: leave it out"),
    "tool_choice": (("none", "auto"), "calls are not parsed in the texts of a beam search: leave it out"),
}
"""Fields that a beam search cannot honour: values that ask for nothing, and what to do instead."""


@dataclass(frozen=True, slots=True)
class BeamRequest:
    """The parameters of a beam search in a body.

    If the body has no limit of tokens, `limit` is None, and that of `params` is 1. `prompt` has what limits and
    truncates prompts, `names` the body's fields of parameters that have another name there. A result contains all
    `phrases`, and is one of the texts of `allowed` if there are any; `params` has placeholders until `encoded`.
    """

    params: BeamSearchParams
    limit: int | None
    prompt: RequestOptions
    names: Mapping[str, str]
    phrases: Sequence[str]
    allowed: Sequence[str]
    has_logprobs: bool

    @property
    def width(self) -> int:
        return self.params.beam_width

    async def encoded(self, encode: Callable[[str], Awaitable[Sequence[int]]]) -> BeamRequest:
        """Return the request with the token ids of its texts."""
        params = self.params
        if self.phrases:
            params = replace(params, force_words_ids=await _ids("force_phrases", self.phrases, encode))
        if self.allowed:
            params = replace(params, allowed_trie=TokenTrie(await _ids("allowed_texts", self.allowed, encode)))
        return replace(self, params=params)

    def for_prompt(self, settings: ServerSettings, length: int, context: int) -> BeamSearchParams:
        room = context - length
        name = self.names["max_new_tokens"]
        if room < 1:
            message = f"the prompt has {length} tokens, but the context holds {context}, the text included: shorten it"
            raise invalid(message, "prompt", code="context_length_exceeded")
        if self.limit is not None and self.limit > room:
            raise invalid(
                f"a prompt of {length} tokens and {name}={self.limit} do not fit into the model's context of "
                f"{context}: set {name} to {room} at most",
                name,
                code="context_length_exceeded",
            )
        limit = min(room, settings.max_beam_tokens // self.width) if self.limit is None else self.limit
        try:
            params = replace(self.params, max_new_tokens=limit, min_new_tokens=self.prompt.min_tokens)
        except InvalidRequestError as error:
            raise named_error(error, self.names) from error
        if self.width * min(params.limit(length), room) > settings.max_beam_tokens:
            raise invalid(
                f"{self.width} beams of {min(params.limit(length), room)} tokens are more than the "
                f"{settings.max_beam_tokens} that this server allows in one search: lower {FIELD}.max_len_ratio",
                f"{FIELD}.max_len_ratio",
            )
        return params


async def _ids(
    name: str, texts: Sequence[str], encode: Callable[[str], Awaitable[Sequence[int]]]
) -> list[Sequence[int]]:
    ids = [await encode(text) for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        if not tokens:
            raise invalid(f"{FIELD}.{name}: {text!r} has no tokens: leave it out", f"{FIELD}.{name}")
    return ids


def completion_request(body: CompletionBody, settings: ServerSettings) -> BeamRequest:
    limit = completion_limit(body)
    if body.logprobs:
        raise _refused("logprobs", body.logprobs, "set it to 0 for the log-probabilities of the chosen tokens")
    if body.echo and body.logprobs is not None:
        raise _refused("echo", True, "the prompt has no log-probabilities here: leave 'logprobs' out")
    return _request(body, settings, limit, "max_tokens", has_logprobs=body.logprobs is not None)


def chat_request(body: ChatBody, settings: ServerSettings) -> BeamRequest:
    limit, name = chat_limit(body)
    return _request(body, settings, limit, name, has_logprobs=bool(body.logprobs))


def _request(
    body: BeamBody, settings: ServerSettings, limit: int | None, limit_name: str, *, has_logprobs: bool
) -> BeamRequest:
    for name, (neutral, remedy) in REFUSED.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == allowed for allowed in neutral):
            raise _refused(name, value, remedy)
    width = body.best_of or body.n or 1
    names = {
        "beam_width": "n" if body.best_of is None else "best_of",
        "num_return_sequences": "n",
        "max_new_tokens": limit_name,
        "max_tokens": limit_name,
        "min_new_tokens": "min_tokens",
        **{name: f"{FIELD}.{name}" for name in NAMES},
    }
    options, phrases, allowed = _options(body)
    if phrases:
        names["force_words_ids"] = f"{FIELD}.force_phrases"
    if allowed:
        names["allowed_trie"] = f"{FIELD}.allowed_texts"
    if (body.n or 1) > width:
        raise _refused("n", body.n, f"at most best_of={width} texts are returned")
    _require_size(settings, width, limit, names)
    options |= {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    try:
        params = BeamSearchParams.preset(
            "vllm",
            beam_width=width,
            num_return_sequences=body.n or 1,
            max_new_tokens=1 if limit is None else limit,
            # vLLM's older releases required temperature 0, which is the model's own distribution
            temperature=body.temperature or 1.0,
            **options,
        )
    except InvalidRequestError as error:
        raise named_error(error, names) from error
    limits = {"max_tokens": limit, "truncate_prompt_tokens": body.truncate_prompt_tokens, "min_tokens": body.min_tokens}
    limits = {name: value for name, value in limits.items() if value is not None}
    prompt = checked_options({"n": width, **limits}, names)
    return BeamRequest(params, limit, prompt, names, phrases, allowed, has_logprobs)


def _options(body: BeamBody) -> tuple[dict[str, Any], Sequence[str], Sequence[str]]:
    """Return the parameters of `beam_options`, the required phrases and the allowed texts.

    A phrase of one token and a trie of one sequence stand for the texts. Null values are those of the preset.
    """
    options = {name: value for name, value in (body.beam_options or {}).items() if value is not None}
    for name in options:
        path = f"{FIELD}.{name}"
        if name in ELSEWHERE:
            raise invalid(f"'{path}' is a field of the body: set {ELSEWHERE[name]}", path)
        if name in OF_THE_LIBRARY:
            message = f"'{path}' is a parameter of the library only: leave it out"
            raise invalid(message, path, code="unsupported_parameter")
        if name not in NAMES and name not in TEXTS:
            hint = suggestion(name, [*NAMES, *TEXTS])
            raise invalid(f"'{path}' is unknown: {hint}", path, code="unknown_parameter")
    phrases, allowed = (
        _texts(name, options.pop(name), most) if name in options else () for name, most in TEXTS.items()
    )
    words = options.get("force_words_ids")
    path = f"{FIELD}.force_words_ids"
    if phrases and words is not None:
        raise invalid(f"{path} and {FIELD}.force_phrases both require phrases: give one of them", path)
    if isinstance(words, list) and len(words) > MAX_PHRASES:
        raise invalid(f"{path} has {len(words)} phrases: give at most {MAX_PHRASES}", path)
    if body.seed is not None and options.get("sampling", "none") != "none":
        options["seed"] = body.seed % 2**63
    if phrases:
        options["force_words_ids"] = [[0]]
    if allowed:
        options["allowed_trie"] = TokenTrie([[0]])
    return options, phrases, allowed


def _require_size(settings: ServerSettings, width: int, limit: int | None, names: dict[str, str]) -> None:
    most, name = settings.max_beam_tokens, names["beam_width"]
    if not most:
        raise invalid("this server runs no beam searches: leave 'use_beam_search' out", "use_beam_search")
    if width > settings.max_choices:
        raise invalid(f"{name}={width}: this server allows at most {settings.max_choices} beams", name)
    if width * (limit or 1) > most:
        field_name = names["max_new_tokens"]
        raise invalid(
            f"{width} beams of {limit} tokens are {width * (limit or 1)}: this server allows at most {most} in one "
            f"search; lower {field_name} to {max(1, most // width)}, or use fewer beams",
            field_name,
        )


def _refused(name: str, value: object, remedy: str) -> ApiError:
    shown = f"={value!r}" if isinstance(value, bool | int | float | str) else ""
    return invalid(
        f"'{name}'{shown} cannot be honoured with use_beam_search: {remedy}", name, code="unsupported_parameter"
    )


@final
@dataclass(frozen=True, slots=True)
class BeamTexts:
    """The results of all prompts; choice `prompt * num_choices + rank`."""

    results: Sequence[BeamResult]
    num_choices: int
    has_logprobs: bool

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """All texts, best first for each prompt."""
        return [hypothesis for result in self.results for hypothesis in result.hypotheses]

    def usage(self) -> dict[str, Any]:
        prompts = sum(len(result.prompt_token_ids) for result in self.results)
        written = sum(len(hypothesis.tokens) for hypothesis in self.hypotheses)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _placed(self) -> Iterator[tuple[int, BeamResult, Hypothesis]]:
        for place, result in enumerate(self.results):
            for rank, hypothesis in enumerate(result.hypotheses, place * self.num_choices):
                yield rank, result, hypothesis

    def completion(self, body: CompletionBody, head: Head, echoed: Sequence[str]) -> dict[str, Any]:
        texts, choices = head.model.texts if self.has_logprobs else None, []
        for index, result, hypothesis in self._placed():
            before = echoed[index // self.num_choices] if echoed else ""
            choice = {"index": index, "text": before + (hypothesis.text or ""), "logprobs": None, **_ending(hypothesis)}
            if texts is not None:
                offsets = OffsetLogprobs(texts, skip_special_tokens=True, prompt_ids=result.prompt_token_ids)
                choice["logprobs"] = offsets.push(_entries(hypothesis), hypothesis.tokens, is_last=True)
            if body.return_token_ids:
                choice |= {"prompt_token_ids": list(result.prompt_token_ids), "token_ids": list(hypothesis.tokens)}
            choices.append(choice)
        return {**head.fields("text_completion"), "choices": choices, "usage": self.usage()}

    def chat(self, body: ChatBody, head: Head) -> dict[str, Any]:
        choices = []
        for index, _, hypothesis in self._placed():
            logprobs = None
            if self.has_logprobs:
                logprobs = {"content": chat_logprobs(_entries(hypothesis), head.model.texts), "refusal": None}
            message = {"role": "assistant", "content": hypothesis.text or "", "refusal": None}
            choice = {"index": index, "message": message, "logprobs": logprobs, **_ending(hypothesis)}
            if body.return_token_ids:
                choice["token_ids"] = list(hypothesis.tokens)
            choices.append(choice)
        whole = {**head.fields("chat.completion"), "choices": choices, "usage": self.usage()}
        if body.service_tier is not None:
            whole["service_tier"] = "default"
        if body.return_token_ids:
            whole["prompt_token_ids"] = list(self.results[0].prompt_token_ids)
        return whole


def _ending(hypothesis: Hypothesis) -> dict[str, Any]:
    return {
        "finish_reason": "length" if hypothesis.finish_reason == "length" else "stop",
        "stop_reason": hypothesis.stop_reason,
        "score": finite(hypothesis.score),
        "cumulative_logprob": finite(hypothesis.cumulative_logprob),
    }


def _entries(hypothesis: Hypothesis) -> tuple[TokenLogprob, ...]:
    """Return what each token added to the score."""
    return tuple(
        TokenLogprob(token, logprob, ())
        for token, logprob in zip(hypothesis.tokens, hypothesis.token_logprobs, strict=True)
    )


async def searched(
    request: Request,
    model: ServedModel,
    *,
    prompts: Sequence[Any],
    search: BeamRequest,
    priority: int,
    response_id: str,
    decoder: DecoderOptions,
    encode: Encode | None = None,
) -> BeamTexts:
    """Admit a request, search all its prompts, and return the texts; cancelling the task ends the searches.

    A request takes a place at the gate for each beam.
    """
    server = server_of(request)
    record = server.record_of(request)
    record.response_id, record.draft = response_id, "none"
    encode = prompt_encoder(model, encode, decoder.get("source_lang"))
    async with server.admit(request, texts=len(prompts) * search.width, priority=priority):
        try:
            encode_text = partial(model.llm.prompts.encode_text, add_special_tokens=False)
            search = await search.encoded(encode_text)
            most = longest_prompt(server.settings, model, search.prompt)
            ids = [await encode(prompt, most=most) for prompt in prompts]
            limited = within_limits(server.settings, model, prompts=ids, options=search.prompt)
            ids = [model.llm.llm.requests.truncated(tokens, limited) for tokens in ids]
            rest = DecoderOptions(decoder_prompt=decoder.get("decoder_prompt"), target_lang=decoder.get("target_lang"))
            start = await model.llm.prompts.encode_start(RequestOptions(**rest))
            lengths = [len(beam_opening(model.llm.llm.model, tokens, start).tokens) for tokens in ids]
            jobs = [
                (tokens, search.for_prompt(server.settings, length, model.max_context))
                for tokens, length in zip(ids, lengths, strict=True)
            ]
            record.prompt_tokens = sum(map(len, ids))
            results = await _results(model, jobs, rest)
        except InvalidRequestError as error:
            raise named_error(error, search.names) from error
        if search.has_logprobs:
            await model.prepare_texts()
        texts = BeamTexts(results, search.params.num_return_sequences, search.has_logprobs)
        _note(record, texts)
        if server.settings.log_prompts:
            record.prompt = list(prompts)
            record.texts = [hypothesis.text or "" for hypothesis in texts.hypotheses]
        return texts


async def _results(
    model: ServedModel, jobs: Sequence[tuple[Sequence[int], BeamSearchParams]], decoder: DecoderOptions
) -> list[BeamResult]:
    """Search all prompts at the same time; if one fails, the others end."""
    tasks = [asyncio.ensure_future(model.llm.beam_search(list(ids), params, **decoder)) for ids, params in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note(record: RequestRecord, texts: BeamTexts) -> None:
    record.cached_tokens = record.accepted_tokens = 0
    record.completion_tokens = sum(len(hypothesis.tokens) for hypothesis in texts.hypotheses)
    record.rounds = sum(result.num_steps for result in texts.results)
    record.finish_reasons = [hypothesis.finish_reason for hypothesis in texts.hypotheses]
    record.note_first_token(SYSTEM_CLOCK())
