"""Request bodies: the fields that several APIs share, and what happens to fields that this server does not have.

Every known field is honoured, ignored with a note, or refused by name. An ignored field cannot change the meaning of a
response: it asks for less, or for nothing, and is named in a `Warning` header and the log; with `--strict-fields` it is
an error. A refused field would change the response: only values that ask for nothing are accepted. The page
`guides/fields.md` is made from these tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftree.options import DecoderOptions
from draftree.serve.errors import invalid
from draftree.serve.records import current_record


def note(field: str, reason: str) -> None:
    """Note once that a field of the current request has no effect, or not its whole effect.

    The `reason` is the rest of the sentence, such as "is ignored: models stay loaded".
    """
    record = current_record()
    if record is None:
        return
    if record.is_strict:
        raise invalid(
            f"'{field}' {reason}; this server has --strict-fields: remove it", field, code="ignored_parameter"
        )
    record.notes.setdefault(field, f"'{field}' {reason}")


@dataclass(frozen=True, slots=True)
class Effect:
    """What the server does with a field; `neutral` values ask for nothing, as null does."""

    reason: str
    neutral: tuple[Any, ...]
    is_ignored: bool


def ignored(reason: str, *neutral: Any) -> Effect:
    return Effect(reason, neutral, is_ignored=True)


def refused(reason: str, *neutral: Any) -> Effect:
    return Effect(reason, neutral, is_ignored=False)


_CACHE = "cached prefixes are kept while there is memory, for all requests"
_TEXT_ONLY = "only text is supported"
_PROCESSOR = "the processor of the model decides how images are read"
_ADAPTERS = "serve the adapted model under a name of its own"
_NO_TRANSFER = "keys and values are not transferred between servers"
_NO_ROUTING = "requests are not routed by it"
_NO_SAMPLER = "the server has no such sampler"
_DRAFTING = "drafting never changes the text; choose a loaded drafter with 'draft'"
_NO_TIMINGS = "'usage', 'metrics' and /metrics have the statistics"
_APART = "reasoning is always apart from the answer"
_TOKEN_IDS = "use 'return_token_ids'"

ELSEWHERE: Mapping[str, Mapping[str, Effect]] = {
    "OpenAI": {
        **dict.fromkeys(("user", "safety_identifier"), ignored("requests are not attributed to end users")),
        "metadata": ignored("nothing is stored", {}),
        "store": ignored("nothing is stored", False),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), ignored(_CACHE)),
        "prompt_cache_options": ignored(_CACHE, {}),
        "verbosity": refused("the models have no such setting", "medium"),
        "moderation": refused("nothing is moderated"),
    },
    "vLLM": {
        "cache_salt": refused("cached prefixes are shared by all requests"),
        **dict.fromkeys(("ec_transfer_params", "kv_transfer_params"), refused(_NO_TRANSFER, {})),
        "guided_decoding_backend": ignored("there is one grammar engine"),
        "guided_whitespace_pattern": refused("write the whitespace into a 'guided_regex' or 'guided_grammar'"),
        "logits_processors": refused("use 'logit_bias', 'bad_words' or 'allowed_token_ids'", []),
        "logprob_token_ids": refused("use 'top_logprobs' or 'logprobs'", []),
        "lora_request": refused(_ADAPTERS),
        **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ignored(_PROCESSOR, {})),
        "repetition_detection": refused("use 'stop' or 'max_tokens'"),
        "return_mm_kwargs": ignored(_PROCESSOR),
        "return_prompt_text": refused("use /tokenize with 'return_token_strs'", False),
        "return_token_offsets": ignored("generated texts have no such offsets", False),
        "return_tokens_as_token_ids": refused(_TOKEN_IDS, False),
        "routed_experts_prompt_start": ignored("routed experts are not returned", 0),
        "session_id": ignored(_NO_ROUTING),
        "stream_interval": ignored("every round is sent at once"),
        "structural_tag": refused("use 'guided_grammar'"),
        "thinking_token_budget": refused("use 'max_tokens'", -1),
        "truncation_side": refused("'truncate_prompt_tokens' keeps the end of the prompt", "left"),
        "vllm_xargs": refused("the server has no such extensions", {}),
        "watermarking": refused("texts are not marked", False),
    },
    "SGLang": {
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), refused(_NO_TRANSFER)),
        "custom_labels": ignored("metrics have labels of their own", {}),
        "custom_logit_processor": refused("use 'logit_bias', 'bad_words' or 'allowed_token_ids'"),
        "custom_params": refused("the server has no such extensions", {}),
        **dict.fromkeys(("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"), ignored(_NO_ROUTING)),
        "extra_key": refused("cached prefixes are shared by all requests"),
        "images_config": ignored(_PROCESSOR, {}),
        "input_ids": refused("use 'prompt' of /v1/completions"),
        "lora_path": refused(_ADAPTERS),
        **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), ignored(_PROCESSOR)),
        "ngram_corpus_id": ignored(_DRAFTING),
        "no_stop_trim": refused("use 'include_stop_str_in_output'", False),
        **dict.fromkeys(("return_cached_tokens_details", "return_meta_info"), ignored(_NO_TIMINGS, False)),
        "return_hidden_states": refused("hidden states are not returned", False),
        "return_prompt_token_ids": refused(_TOKEN_IDS, False),
        "return_routed_experts": refused("routed experts are not returned", False),
        "rid": ignored("the id of a request is 'request_id'"),
        "routed_experts_start_len": ignored("routed experts are not returned", 0),
        "separate_reasoning": refused(_APART, True),
        "session_params": refused("send the whole conversation", {}),
        "stop_regex": refused("use 'stop'", []),
        "stream_reasoning": ignored("reasoning is streamed as it comes", True),
        "task": refused("the server has no such tasks"),
        "use_audio_in_video": ignored(_TEXT_ONLY, False),
    },
    "llama.cpp": {
        **dict.fromkeys(
            [
                "adaptive_decay",
                "dry_allowed_length",
                "dry_base",
                "dry_penalty_last_n",
                "dry_sequence_breakers",
                "dynatemp_exponent",
                "mirostat_eta",
                "mirostat_tau",
                "repeat_last_n",
                "xtc_threshold",
            ],
            ignored("it has no effect without its sampler, which the server does not have"),
        ),
        "adaptive_target": refused(_NO_SAMPLER, -1),
        "backend_sampling": ignored("it does not change the text"),
        **dict.fromkeys(("cache_prompt", "n_cache_reuse"), ignored("cached prefixes never change the text")),
        "dry_multiplier": refused("use 'no_repeat_ngram_size' or 'repetition_penalty'", 0),
        "dynatemp_range": refused("use 'temperature'", 0),
        "grammar_lazy": refused("a grammar holds from the first token", False),
        "grammar_triggers": refused("a grammar holds from the first token", []),
        **dict.fromkeys(("id_slot", "slot_id"), ignored("requests have no fixed slots")),
        "lora": refused(_ADAPTERS, []),
        "min_keep": refused("'top_p' and 'min_p' keep at least one token", 0, 1),
        "mirostat": refused("use 'top_p' or 'min_p'", 0),
        "n_cmpl": refused("use 'n'", 1),
        **dict.fromkeys(("n_discard", "n_keep"), ignored("a prompt that does not fit is refused")),
        "n_indent": refused("use 'guided_regex'", 0),
        "n_predict": refused("use 'max_tokens'"),
        "n_probs": refused("use 'logprobs'", 0),
        "parse_tool_calls": refused("calls of tools are always parsed", True),
        "post_sampling_probs": refused("log-probabilities are those of the model", False),
        "preserved_tokens": ignored("markers of calls are always kept", []),
        "reasoning_control": ignored("there is no endpoint to control a running request", False),
        "reasoning_format": refused(_APART, "auto", "deepseek"),
        "repeat_penalty": refused("use 'repetition_penalty', which reads the whole text", 1),
        "response_fields": ignored("responses are complete", []),
        "return_progress": ignored("the progress of reading a prompt is not reported", False),
        "return_tokens": refused(_TOKEN_IDS, False),
        "samplers": refused("the order of the sampling filters is fixed"),
        **dict.fromkeys(
            [
                "speculative.n_max",
                "speculative.n_min",
                "speculative.ngram_m_hits",
                "speculative.ngram_size_m",
                "speculative.ngram_size_n",
                "speculative.p_min",
                "speculative.type",
            ],
            ignored(_DRAFTING),
        ),
        "sse_ping_interval": ignored("silent streams have a comment every 15 seconds"),
        "t_max_predict_ms": refused("use 'max_tokens'", 0),
        "timings_per_token": ignored(_NO_TIMINGS, False),
        "top_n_sigma": refused("use 'top_p' or 'min_p'", 0, -1),
        "typical_p": refused("use 'top_p' or 'min_p'", 1),
        "xtc_probability": refused(_NO_SAMPLER, 0),
    },
    "Ollama, LM Studio": {
        "_debug_render_only": refused("use /tokenize with 'return_token_strs'", False),
        "context": refused("send the whole conversation", []),
        "draft_model": ignored(_DRAFTING),
        "format": refused("use 'response_format'", ""),
        "images": refused("send parts of a message of the type 'image_url'", []),
        **dict.fromkeys(("keep_alive", "ttl"), ignored("models stay loaded")),
        "num_ctx": ignored("the context is that of the model"),
        "num_predict": refused("use 'max_tokens'"),
        "options": refused("set the fields of the body, such as 'temperature'", {}),
        "raw": refused("use /v1/completions", False),
        **dict.fromkeys(("shift", "truncate"), ignored("a prompt that does not fit is refused")),
        "system": refused("send a message of the role system", ""),
        "template": refused("templates of clients are not run", ""),
        "think": ignored("use 'reasoning_effort'"),
    },
}
SHARED: Mapping[str, Effect] = {name: effect for fields in ELSEWHERE.values() for name, effect in fields.items()}
CHAT: Mapping[str, Effect] = {
    "add_special_tokens": refused("the chat template writes the special tokens", False),
    "audio": refused(_TEXT_ONLY),
    "chat_template": refused("templates of clients are not run"),
    "documents": refused("put the documents into a message", []),
    "echo": refused("use /v1/completions", False),
    "function_call": refused("use 'tool_choice'", "none", "auto"),
    "functions": refused("use 'tools'", []),
    "reasoning": ignored("use 'reasoning_effort'", {}),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "prompt": refused("use 'messages', or /v1/completions"),
    "suffix": refused("use /v1/completions", ""),
    "web_search_options": refused("the server has no web search"),
}
COMPLETIONS: Mapping[str, Effect] = {
    "add_special_tokens": refused("give token ids for full control of the prompt", True),
    "max_completion_tokens": refused("use 'max_tokens'"),
    "messages": refused("use /v1/chat/completions"),
    "reasoning": ignored("a continuation is returned as it is", {}),
    "reasoning_effort": ignored("a continuation is returned as it is", "none"),
    "prompt_embeds": refused("give texts or token ids as 'prompt'"),
    "tool_choice": refused("use /v1/chat/completions", "none", "auto"),
    "tools": refused("use /v1/chat/completions", []),
}
RESPONSES: Mapping[str, Effect] = {
    "access_programs": ignored("the server has no such programs", {}),
    "background": refused("keep the connection open, or use 'stream'", False),
    "background_options": ignored("requests do not run in the background", {}),
    "beam_options": refused("it belongs to beam search", {}),
    "context_management": ignored("a conversation that does not fit is refused", []),
    "conversation": refused("the server stores no conversations: send the whole conversation as 'input'"),
    "early_stopping": refused("it belongs to beam search", False),
    "enable_response_messages": refused("use 'return_token_ids' of /v1/chat/completions", False),
    "image": ignored(_TEXT_ONLY, {}),
    "length_penalty": refused("it belongs to beam search", 1),
    "logprobs": refused("use 'include' with \"message.output_text.logprobs\"", False),
    **dict.fromkeys(
        ("max_completion_tokens", "max_tokens", "n_predict", "num_predict"), refused("use 'max_output_tokens'")
    ),
    "max_tool_calls": ignored("the server runs no tools"),
    "messages": refused("use 'input'"),
    "n": refused("send one request for each text", 1),
    "previous_input_messages": refused("send the whole conversation as 'input'", []),
    "previous_response": refused("send the whole conversation as 'input'"),
    "prompt": refused("the server stores no prompts: use 'instructions' and 'input'"),
    "prompt_logprobs": refused("use /v1/completions"),
    "reasoning_effort": refused("use 'reasoning'", "none"),
    "response_format": refused("use 'text'", {"type": "text"}),
    "return_token_ids": refused("use /v1/chat/completions", False),
    "truncation": ignored("a conversation that does not fit is refused", "disabled"),
    "use_beam_search": refused("use /v1/chat/completions or /v1/completions", False),
}


TokenId = Annotated[int, Field(ge=0)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item ends the check: a million errors would stop the event loop for seconds."""
MAX_NAME_CHARS = 64
MAX_LOGPROBS = 20


Biases = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]
"""Numbers by token id, which `SamplingParams` checks: here every wrong one would be an error of its own."""


class Body(BaseModel):
    """A JSON object whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    elsewhere: ClassVar[Mapping[str, Effect]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            effect = cls.elsewhere.get(name)
            if effect is not None:
                if value is None or value in effect.neutral:
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
        name = name[:MAX_NAME_CHARS]
        close = difflib.get_close_matches(name, cls._names(), n=1, cutoff=0.6)
        reason = f"is unknown: did you mean '{close[0]}'?" if close else "is unknown: remove it"
        raise _refusal("unknown_parameter", name, reason)

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


AnyBody = TypeVar("AnyBody", bound=Body)


def validated(kind: type[AnyBody], values: Mapping[str, Any]) -> AnyBody:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(wrong) from error


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
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class DraftreeOptions(Body):
    """What is reported of the speculation."""

    pieces: bool = False
    rounds: bool = False


class SamplingFields(Body):
    """Sampling fields that have the same meaning in most APIs."""

    stop: str | Items[str] | None = None
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)


class SamplingBody(SamplingFields):
    """Sampling fields of OpenAI and vLLM that chat and plain completions share."""

    model: str | None = Field(None, description="name or alias of a served model; the first one by default")
    max_tokens: int | None = Field(None, ge=-1, description="-1: as many as fit into the context")
    n: int | None = Field(None, ge=1)
    logit_bias: Biases | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

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
        return {"decoder_prompt": self.decoder_prompt, "source_lang": self.source_lang, "target_lang": self.target_lang}

    @property
    def reports(self) -> DraftreeOptions:
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


class TextPart(Body):
    """A text part of a message."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "annotations": ignored("a text part is its text", []),
        "cache_control": ignored("prefixes are cached without it"),
        "prompt_cache_breakpoint": ignored("prefixes are cached without it"),
    }
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """The address of an image."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "detail": ignored("the processor of the model decides the size", "auto"),
        "media_type": ignored("the file says it"),
    }
    url: str = Field(description="a data URL, or a file of the server's image folder")


class ImagePart(Body):
    """An image in a message, for models that read images."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "cache_control": ignored("prefixes are cached without it"),
        "prompt_cache_breakpoint": ignored("prefixes are cached without it"),
        "uuid": ignored("images are known by their content"),
    }
    type: Literal["image_url"]
    image_url: ImageUrl | str
    _place: str | None = PrivateAttr(None)

    @classmethod
    def of(cls, url: str, place: str) -> Self:
        """Return the image that a field of another protocol's body names."""
        part = cls(type="image_url", image_url=url)
        part._place = place
        return part

    @property
    def place(self) -> str | None:
        """The field of another protocol's body."""
        return self._place


class Message(Body):
    """One message of a conversation; its role and its further fields are those of the chat template."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "audio": refused("only text is supported"),
        "refusal": refused("send it as 'content'"),
        "function_call": refused("use 'tool_calls'"),
        "annotations": ignored("only the text of a message is read", []),
        "cache_control": ignored("prefixes are cached without it"),
    }
    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @classmethod
    def _take_unknown(cls, name: str, value: Any, kept: dict[str, Any]) -> None:
        """Keep the field: the chat template may read it."""
        kept[name] = value


class ChatBody(BeamBody):
    """A conversation to continue."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {**SHARED, **CHAT}
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        None, max_length=32, description="for chat templates that read it, or a switch"
    )
    enable_thinking: bool | None = Field(None, description="for chat templates with a switch for reasoning")
    include_reasoning: bool | None = Field(None, description="whether the response has the reasoning; true by default")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None


Prompts = str | Items[str] | Items[TokenId] | Items[Items[TokenId]]


def prompts_of(prompts: Prompts) -> list[Any]:
    """Return a list of texts and lists of token ids."""
    return [prompts] if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int) else prompts


class CompletionBody(BeamBody):
    """Prompts to continue."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {**SHARED, **COMPLETIONS}
    prompt: Prompts
    suffix: str | None = Field(None, description="text after the gap, for models with fill-in-the-middle")
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(Body):
    """A text or a conversation to encode."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "chat_template": refused("templates of clients are not run"),
        "mm_processor_kwargs": ignored("only text is supported", {}),
    }
    model: str | None = Field(None, description="name or alias of a served model; may be left out if there is one")
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="of a prompt: true by default; of messages: false, since the template writes them"
    )
    add_generation_prompt: bool | None = Field(None, description="of messages: true by default")
    continue_final_message: bool | None = Field(None, description="leave the last message open")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = Field(None, description="name or alias of a served model; may be left out if there is one")
    tokens: Items[TokenId]
