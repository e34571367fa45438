"""From request bodies to the parameters of a beam search, with vLLM's meaning of its fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from draftree.beam.params import BeamSearchParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.params import SamplingParams
from draftree.serve.beam_options import FIELD, NAMES, BeamOptions, beam_options
from draftree.serve.errors import ApiError, invalid
from draftree.serve.params import chat_limit, checked_params, completion_limit, named_error
from draftree.serve.schema.chat import ChatBody
from draftree.serve.schema.common import BeamBody, DraftreeOptions, ResponseFormat
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.settings import ServerSettings

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
NO_SAMPLING = "leave it out, or set it and sampling in beam_options"
NO_FILTER = "a beam search has no such filter: leave it out"
NO_CONSTRAINT = "a beam search follows no format: leave it out, or leave use_beam_search out"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "the texts of a beam search are known at its end: set stream=false"),
    "stream_options": ((), "the texts of a beam search are known at its end: leave it out"),
    "top_p": ((1,), NO_SAMPLING),
    "top_k": ((0, -1), NO_SAMPLING),
    "min_p": ((0,), NO_FILTER),
    "presence_penalty": ((0,), "use no_repeat_ngram_size or length_penalty"),
    "frequency_penalty": ((0,), "use no_repeat_ngram_size or length_penalty"),
    "repetition_penalty": ((1,), "use no_repeat_ngram_size or length_penalty"),
    "logit_bias": (({},), "a beam search has no such rule: leave it out"),
    "allowed_token_ids": ((), "a beam search has no such rule: leave it out"),
    "bad_words": (([],), "a beam search has no such rule: leave it out"),
    "prompt_logprobs": ((), "send a request without use_beam_search"),
    "top_logprobs": ((0,), "log-probabilities are those of the chosen tokens: leave it out"),
    "skip_special_tokens": ((True,), "special tokens are never part of the texts: leave it out"),
    "spaces_between_special_tokens": ((True,), "special tokens are never part of the texts: leave it out"),
    "prediction": ((), "no drafter takes part in a beam search: leave it out"),
    "draft": (("none",), "no drafter takes part in a beam search: leave it out"),
    "draftree": ((DraftreeOptions(),), "a beam search has no rounds: leave it out"),
    "response_format": ((ResponseFormat.model_validate({"type": "text"}),), NO_CONSTRAINT),
    "structured_outputs": ((), NO_CONSTRAINT),
    "guided_json": ((), NO_CONSTRAINT),
    "guided_regex": ((), NO_CONSTRAINT),
    "guided_grammar": ((), NO_CONSTRAINT),
    "guided_choice": ((), NO_CONSTRAINT),
    "json_schema": ((), NO_CONSTRAINT),
    "regex": ((), NO_CONSTRAINT),
    "ebnf": ((), NO_CONSTRAINT),
    "grammar": ((), NO_CONSTRAINT),
    "tools": (([],), "calls are not parsed in the texts of a beam search: leave it out"),
    "tool_choice": (("none", "auto"), "calls are not parsed in the texts of a beam search: leave it out"),
}
"""Fields that a beam search cannot honour: values that ask for nothing, and what to do instead."""


@dataclass(frozen=True, slots=True)
class BeamRequest:
    """The parameters of a beam search in a body.

    Attributes:
        params: of the search, whose limit of tokens is 1 if the body has none.
        limit: maximum number of tokens of a text; None for as many as fit.
        names: body field of each parameter that has another name there.
        prompt: sampling parameters for the limits and the truncation of prompts.
        options: of the field `beam_options`.
        has_logprobs: whether the log-probabilities of the tokens are wanted.
    """

    params: BeamSearchParams
    limit: int | None
    prompt: SamplingParams
    options: BeamOptions
    has_logprobs: bool = False
    names: dict[str, str] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of beams."""
        return self.params.beam_width

    def for_prompt(self, settings: ServerSettings, length: int, context: int) -> BeamSearchParams:
        """Return the parameters for a prompt.

        Args:
            settings: limits of the server.
            length: tokens of the prompt.
            context: maximum number of tokens of prompt and text.

        Raises:
            ApiError: a text of the limit does not fit into the context.
        """
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
            found = replace(self.params, max_new_tokens=limit, min_new_tokens=self.prompt.min_tokens)
        except InvalidRequestError as error:
            raise named_error(error, self.names) from error
        if self.width * min(found.limit(length), room) > settings.max_beam_tokens:
            raise invalid(
                f"{self.width} beams of {min(found.limit(length), room)} tokens are more than the "
                f"{settings.max_beam_tokens} that this server allows in one search: lower {FIELD}.max_len_ratio",
                f"{FIELD}.max_len_ratio",
            )
        return found


def completion_request(body: CompletionBody, settings: ServerSettings) -> BeamRequest:
    """Return the beam search of a plain completion.

    Raises:
        ApiError: a value or a combination that cannot be honoured.
    """
    limit = completion_limit(body)
    if body.logprobs:
        raise _refused("logprobs", body.logprobs, "set it to 0 for the log-probabilities of the chosen tokens")
    if body.echo and body.logprobs is not None:
        raise _refused("echo", True, "the prompt has no log-probabilities here: leave 'logprobs' out")
    return _request(body, settings, limit, "max_tokens", has_logprobs=body.logprobs is not None)


def chat_request(body: ChatBody, settings: ServerSettings) -> BeamRequest:
    """Return the beam search of a chat completion.

    Raises:
        ApiError: a value or a combination that cannot be honoured.
    """
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
    options = beam_options(body.beam_options, body.seed)
    if options.phrases:
        names["force_words_ids"] = f"{FIELD}.force_phrases"
    if options.allowed:
        names["allowed_trie"] = f"{FIELD}.allowed_texts"
    if (body.n or 1) > width:
        raise _refused("n", body.n, f"at most best_of={width} texts are returned")
    _require_size(settings, width, limit, names)
    given = {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    # vLLM's older releases required temperature 0, which is the model's own distribution
    temperature = body.temperature or 1.0
    try:
        params = BeamSearchParams.preset(
            "vllm",
            beam_width=width,
            num_return_sequences=body.n or 1,
            max_new_tokens=1 if limit is None else limit,
            temperature=temperature,
            **given,
            **options.checked_as,
        )
    except InvalidRequestError as error:
        raise named_error(error, names) from error
    told = {"max_tokens": limit, "truncate_prompt_tokens": body.truncate_prompt_tokens, "min_tokens": body.min_tokens}
    prompt = checked_params({"n": width, **{name: value for name, value in told.items() if value is not None}}, names)
    return BeamRequest(params, limit, prompt, options, has_logprobs, names)


def _require_size(settings: ServerSettings, width: int, limit: int | None, names: dict[str, str]) -> None:
    """Refuse a search that is larger than the server allows."""
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
