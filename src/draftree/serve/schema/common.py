"""Fields that several request bodies share: sampling, output format, stream and drafting options.

Every known field is either honoured or refused by name. A refused field passes if its value asks for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from draftree.prompts import DecoderOptions

TokenId = Annotated[int, Field(ge=0)]
Refused = dict[str, tuple[tuple[Any, ...], str]]
"""Field name to the values that ask for nothing, and what to do instead."""
MAX_STOPS = 64
"""Stop strings of one request."""
MAX_BAD_WORDS = 1024
"""Words of `bad_words`: each is encoded several times."""
MAX_LOGPROBS = 20
"""Most likely tokens per position."""


class Body(BaseModel):
    """A JSON object whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Refuse fields of the API that this server does not support; drop those that ask for nothing."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.refused:
                neutral, remedy = cls.refused[name]
                if value is not None and not any(value == allowed for allowed in neutral):
                    raise _refusal("unsupported_parameter", name, f"is not supported: {remedy}")
            elif name not in cls._names():
                raise _refusal("unknown_parameter", name, f"is unknown: {_hint(name, cls._names())}")
            else:
                kept[name] = value
        return kept

    @classmethod
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "remove it"


def _refusal(kind: str, field: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{reason}", {"field": field, "reason": reason})


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchemaFormat(Body):
    """A named JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """A constraint of the text; exactly one of them."""

    refused: ClassVar[Refused] = {
        "disable_any_whitespace": ((False,), "remove it"),
        "disable_additional_properties": ((False,), "write additionalProperties into the schema"),
        "disable_fallback": ((True, False), "remove it"),
        "whitespace_pattern": ((), "remove it"),
        "structural_tag": ((), "use 'grammar'"),
    }
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class PredictionPart(Body):
    """A part of the expected text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The expected text."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class DraftreeOptions(Body):
    """What is reported of the speculation."""

    pieces: bool = False
    rounds: bool = False


class SamplingBody(Body):
    """Sampling fields of OpenAI and vLLM that chat and plain completions share."""

    model: str | None = Field(None, description="name or alias of a served model; the first one by default")
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    ngram_scope: Literal["all", "generated"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)

    decoder_prompt: str | Annotated[list[TokenId], Field(min_length=1)] | None = Field(
        None, description="encoder-decoder models: what the decoder continues"
    )
    source_lang: str | None = Field(None, max_length=64, description="multilingual models: language of the prompt")
    target_lang: str | None = Field(None, max_length=64, description="multilingual models: language of the text")
    return_token_ids: bool | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")
    priority: int | None = Field(None, description="lower numbers go first among the waiting requests of an API key")
    prediction: Prediction | None = None
    draft: str | None = Field(None, description="'none', or one of the model's loaded drafters")
    draftree: DraftreeOptions | None = None

    @property
    def decoder(self) -> DecoderOptions:
        """The options of encoder-decoder models."""
        return {
            "decoder_prompt": self.decoder_prompt,
            "source_lang": self.source_lang,
            "target_lang": self.target_lang,
        }

    @property
    def reports(self) -> DraftreeOptions:
        """What is reported of the speculation."""
        return self.draftree or DraftreeOptions()


class BeamBody(SamplingBody):
    """Fields of vLLM's beam search, which completions share."""

    use_beam_search: bool | None = Field(None, description="return the 'n' best texts of a search with 'best_of' beams")
    best_of: int | None = Field(None, ge=1, description="beams of a beam search; 'n' by default")
    length_penalty: float | None = Field(None, ge=-100, le=100)
    early_stopping: bool | Literal["never"] | None = None
    beam_options: dict[str, Any] | None = Field(
        None, description="further parameters of a beam search, such as phrases, groups, prefixes and bounds of lengths"
    )


NO_BEAMS: Refused = {
    "use_beam_search": ((False,), "use /v1/chat/completions or /v1/completions"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "beam_options": (({},), "it belongs to beam search"),
}
"""Fields of beam search, for bodies of other endpoints."""
NOT_SUPPORTED: Refused = {
    "add_special_tokens": ((), "give token ids for full control of the prompt"),
    "logits_processors": (([],), "use 'logit_bias', 'bad_words' or 'allowed_token_ids'"),
    "guided_decoding_backend": ((), "the server has one grammar engine"),
    "guided_whitespace_pattern": ((), "remove it"),
    "structural_tag": ((), "use 'guided_grammar'"),
    "kv_transfer_params": ((), "remove it"),
    "vllm_xargs": (({},), "remove it"),
    "cache_salt": ((), "cached prefixes are shared by all requests of a server"),
    "lora_request": ((), "load the adapted model as its own model"),
    "mm_processor_kwargs": (({},), "only text is supported"),
    "return_tokens_as_token_ids": ((False,), "use 'return_token_ids'"),
    "logprob_token_ids": (([],), "use 'top_logprobs' or 'logprobs'"),
    "repetition_detection": ((), "use 'stop' or 'max_tokens'"),
    "thinking_token_budget": ((), "use 'max_tokens'"),
}
"""Extra fields of vLLM that are refused in both kinds of completions."""
