"""Fields that several request bodies share: sampling, output format, stream and drafting options.

Every known field is honoured, ignored with a note, or refused by name: `elsewhere` has those that are not honoured.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from draftree.prompts import DecoderOptions
from draftree.serve.notes import note
from draftree.serve.schema.elsewhere import Effect, ignored, refused

TokenId = Annotated[int, Field(ge=0)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item ends the check: a million errors would stop the event loop for seconds."""
MAX_NAME_CHARS = 64
"""Characters of an unknown field's name that a message repeats."""
MAX_LOGPROBS = 20
"""Most likely tokens per position."""


Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]
"""Numbers by token id, which `SamplingParams` checks: here every wrong one would be an error of its own."""


class Body(BaseModel):
    """A JSON object whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    elsewhere: ClassVar[Mapping[str, Effect]] = {}
    """Fields that other servers have and this one does not."""

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, data: Any) -> Any:
        """Note or refuse fields that this server does not have."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            effect = cls.elsewhere.get(name)
            if effect is not None:
                if effect.asks_for_nothing(value):
                    continue
                if not effect.is_ignored:
                    raise _refusal("unsupported_parameter", name, f"is not supported: {effect.reason}")
                note(name, f"is ignored: {effect.reason}")
            elif name in cls._names():
                kept[name] = value
            else:
                cls._take_unknown(name, value, kept)
        return kept

    @classmethod
    def _take_unknown(cls, name: str, value: Any, kept: dict[str, Any]) -> None:
        """Process a field that no server has."""
        raise _refusal("unknown_parameter", name[:MAX_NAME_CHARS], f"is unknown: {_hint(name, cls._names())}")

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


AnyBody = TypeVar("AnyBody", bound=Body)


def validated(kind: type[AnyBody], values: Mapping[str, Any]) -> AnyBody:
    """Return a body of these fields.

    Raises:
        RequestValidationError: a wrong value, as of a body that a client sent.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(wrong) from error


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "remove it"


def _refusal(kind: str, field: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{reason}", {"field": field, "reason": reason})


def _service_tier(tier: str) -> str:
    if tier not in ("auto", "default"):
        note("service_tier", "is ignored: the order of requests depends on 'priority' alone")
    return tier


ServiceTier = Annotated[str, AfterValidator(_service_tier)]


class StreamOptions(Body):
    """Options of a stream."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {"include_obfuscation": ignored("chunks are not padded", False)}
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


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
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="llama.cpp's place of the schema")


class StructuredOutputs(Body):
    """A constraint of the text; exactly one of them."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "backend": ignored("there is one grammar engine"),
        "disable_any_whitespace": refused("write a 'regex' or 'grammar' without whitespace", False),
        "disable_additional_properties": refused("write additionalProperties into the schema", False),
        "disable_fallback": ignored("there is one grammar engine", False),
        "whitespace_pattern": refused("write the whitespace into a 'regex' or 'grammar'"),
        "structural_tag": refused("use 'grammar'"),
    }
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None


class PredictionPart(Body):
    """A part of the expected text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The expected text."""

    type: Literal["content"]
    content: str | Items[PredictionPart]

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
    max_tokens: int | None = Field(None, ge=-1, description="-1: as many as fit into the context")
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: str | Items[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logit_bias: Biases | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    allowed_token_ids: Items[TokenId] | None = Field(None, min_length=1)
    bad_words: Items[str] | None = None
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    ngram_scope: Literal["all", "generated"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Items[str] | None = Field(None, min_length=1)
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    decoder_prompt: str | Annotated[Items[TokenId], Field(min_length=1)] | None = Field(
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

    @property
    def has_strict_schema(self) -> bool:
        """Whether the format of the text must be enforced in full."""
        schema = self.response_format.json_schema if self.response_format is not None else None
        return schema is not None and schema.strict is True


class BeamBody(SamplingBody):
    """Fields of vLLM's beam search, which completions share."""

    use_beam_search: bool | None = Field(None, description="return the 'n' best texts of a search with 'best_of' beams")
    best_of: int | None = Field(None, ge=1, description="beams of a beam search; 'n' by default")
    length_penalty: float | None = Field(None, ge=-100, le=100)
    early_stopping: bool | Literal["never"] | None = None
    beam_options: dict[str, Any] | None = Field(
        None, description="further parameters of a beam search, such as phrases, groups, prefixes and bounds of lengths"
    )
