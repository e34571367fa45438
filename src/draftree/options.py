"""What a user passes to `LLM`, `AsyncLLM` and their methods: the options, and the checks of prompts and parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypedDict, TypeVar, overload

from draftree.core.errors import ConfigurationError, InvalidRequestError, blaming, suggestion
from draftree.core.host import SYSTEM_CLOCK, Clock, parse_size
from draftree.sampling.params import SamplingParams, names_are_checked
from draftree.text.chat.messages import MESSAGE_KEYS, check_messages

TextPrompt = str | Sequence[int]
Prompt = TextPrompt | Mapping[str, Any]
"""A text, token ids, or {"text": …, "images": […]}: a text with a model's placeholder for each image."""
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None

NO_DRAFT = "none"
"""Names plain decoding in place of a drafter."""
AUTO_DRAFT = "auto"
"""Stands for a drafter that is chosen when the target is loaded: `draftree.build.decide`."""
KERNELS = ("auto", "native", "torch", "graphs")
QUANTIZATIONS = ("int8", "int4")
KV_DTYPES = ("int8",)
GENERATION_CONFIGS = ("auto", "none")
PREFILL_TOKENS_BUSY = 64
"""Default prompt tokens per pass while any sequence is decoding: on two cores the inter-token latency is then 35 ms
instead of 12, and a prompt of 1,024 tokens takes 0.6 s; 256 would give 95 ms and 0.4 s."""
PREFIX_CACHE_SIZE = 8
"""Default maximum number of finished sequences whose slots are kept."""


SPECULATION = "Speculation"
EXECUTION = "Execution"
SAMPLING = "Sampling"
TEXT = "Text"
"""Panels of options in the help of commands."""


def _option(default: Any, text: str, panel: str, word: str | None = None, *, loads: bool = False) -> Any:
    """Return a field that commands offer as an option.

    Args:
        word: placeholder of its value in the help.
        loads: whether it has no effect once the model is loaded.
    """
    return dataclasses.field(default=default, metadata={"help": text, "panel": panel, "word": word, "loads": loads})


def _loaded_with(default: Any, text: str, word: str | None = None) -> Any:
    return _option(default, text, EXECUTION, word, loads=True)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits of an engine: the part of `ModelOptions` that it reads.

    Raises:
        ConfigurationError: a limit is not a whole number, or too small.
    """

    max_batch_size: int | None = _option(
        None, "Sequences in one batch; as many as memory allows, up to 32, if not given.", EXECUTION, "N"
    )
    max_waiting: int | None = None
    prefill_chunk_size: int = _option(
        PREFILL_TOKENS_BUSY, "Prompt tokens per pass while others decode.", EXECUTION, "N"
    )
    prefix_cache_size: int = _option(
        PREFIX_CACHE_SIZE, "Finished sequences kept for prompts that begin alike.", EXECUTION, "N"
    )
    sequence_memory: int | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name, None)
            if value is not None:
                require_count(name, value, least=least)


LEAST = {
    "max_batch_size": 1,
    "max_waiting": 0,
    "prefill_chunk_size": 1,
    "prefix_cache_size": 0,
    "sequence_memory": 1,
    "threads": 1,
    "tp": 1,
    "pp": 1,
}


def require_count(name: str, value: object, *, least: int) -> None:
    """Raise unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}: it must be a whole number of at least {least}")


@dataclass(frozen=True)
class ModelOptions(EngineLimits):
    """What is loaded and how it runs: the arguments of `LLM`, which describes them, for all that load a model.

    Devices and dtypes are checked where torch is imported: `loading.options.resolve_place`.

    Raises:
        ConfigurationError: a value that is not allowed, or options that exclude each other.
    """

    model: Any
    draft: str | Sequence[str] | None = _option(
        AUTO_DRAFT,
        "The drafter: auto (chosen for the model), none, ngram, suffix, prediction, model:NAME, head:NAME; "
        "options after commas (ngram,k=4).",
        SPECULATION,
        "SPEC",
    )
    _: KW_ONLY
    verify: str = _option("coupled", "The verifier.", SPECULATION, "RULE")
    plan: str | None = _option(
        None, "The planner of draft sizes, such as fixed:4 or heuristic; auto if not given.", SPECULATION, "POLICY"
    )
    download_drafter: bool = _option(
        False, "With drafter auto: download a drafter that is known for the model, if none is here.", SPECULATION
    )
    learn: str | None = _option(
        None,
        "Whose verified texts drafters learn from: server (all requests) or key (those of the same API key); "
        "server,folder=PATH keeps what was learned for later runs.",
        SPECULATION,
        "SCOPE",
    )
    dtype: Any = _loaded_with("auto", "auto, float32, bfloat16, float16 or float64.", "NAME")  # noqa: RUF009, immutable
    device: str = _loaded_with("auto", "auto, cpu, cuda, cuda:N, xpu or mps.", "NAME")
    kernels: str = _loaded_with("auto", "Implementation of passes: auto, native, torch or graphs.", "NAME")
    quantization: str | None = _loaded_with(
        None, "int8 or int4 weights: faster, but a different model; unquantized by default.", "NAME"
    )
    offload: str | int | None = _loaded_with(
        None, "Memory for weights, such as 8GB: other layers are read from a file in every pass.", "SIZE"
    )
    kv_dtype: str | None = _loaded_with(
        None, "int8 for 8-bit keys and values: half the memory, but other texts; the model's dtype by default.", "NAME"
    )
    tp: int = _loaded_with(1, "Processes of torchrun that share each layer (tensor parallel).", "N")
    pp: int = _loaded_with(1, "Stages of layers (pipeline parallel); each has --tp processes.", "N")
    strict_sums: bool = _loaded_with(
        False, "Add the partial sums of processes in one order, whatever else is in a pass."
    )
    threads: int | None = _loaded_with(
        None, "CPU threads of passes; if not given, one for each fast core of a memory node, within the quota.", "N"
    )
    affinity: str | None = _loaded_with(
        None,
        "Processors of all threads: auto (those that 'draftree doctor' shows), none, or a list such as 0-3,8. If "
        "not given: auto on machines with several memory nodes or kinds of cores.",
        "LIST",
    )
    trust_remote_code: bool = _option(
        False, "Allow Python code from the model's folder, for models that need it.", EXECUTION
    )
    exact: bool = _option(False, "Refuse to run unless logits are bit-identical in every batch and tree.", EXECUTION)
    allow_control_tokens: bool = _option(
        False,
        "Encode control tokens such as <|im_end|> in a chat prompt as such; spelled as text if not given.",
        TEXT,
    )
    generation_config: str = _option(
        "auto",
        "auto: sampling defaults of the model, in its generation_config.json; none: no defaults of the model.",
        SAMPLING,
        "auto|none",
    )
    tokenizer: Any = None
    on_round: Callable[[Any], None] | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_member("kernels", KERNELS)
        self._require_member("quantization", (None, *QUANTIZATIONS))
        self._require_member("kv_dtype", (None, *KV_DTYPES))
        self._require_member("generation_config", GENERATION_CONFIGS)
        for name in ("quantization", "kv_dtype"):
            value = getattr(self, name)
            if value is not None and not self.allows_native:
                raise ConfigurationError(f"{name} '{value}' needs native kernels: leave kernels at 'auto'")
        named = (self.draft,) if self.draft is None or isinstance(self.draft, str) else self.draft
        if self.download_drafter and AUTO_DRAFT not in named:
            raise ConfigurationError(
                f"download_drafter fetches a drafter for '{AUTO_DRAFT}', and draft is {self.draft!r}: leave out one of "
                "them"
            )
        if self.offload is not None:
            parse_size(self.offload)
        if self.offload is not None and self.kernels == "graphs":
            raise ConfigurationError(
                "kernels 'graphs' replay fixed addresses, and offloaded weights move: use 'auto', or leave offload out"
            )
        if self.strict_sums and self.tp == 1:
            raise ConfigurationError("strict_sums orders the sums of several processes, and tp is 1: leave it out")
        if self.is_parallel and self.offload is not None:
            raise ConfigurationError(
                f"offload is {self.offload!r}, but a model that processes share stays in their memory: leave out "
                "offload, or tp and pp"
            )
        if self.is_parallel and self.kv_dtype is not None:
            raise ConfigurationError(
                f"kv_dtype is '{self.kv_dtype}', but processes that share a model store keys and values in its dtype: "
                "leave out kv_dtype, or tp and pp"
            )

    def _require_member(self, name: str, allowed: Sequence[str | None]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigurationError(f"unknown {name} '{value}': {suggestion(str(value), list(filter(None, allowed)))}")

    @property
    def allows_native(self) -> bool:
        """Whether passes may run on native kernels."""
        return self.kernels in ("auto", "native")

    @property
    def requires_native(self) -> bool:
        """Whether a model without native kernels is refused."""
        return self.kernels == "native" or self.quantization is not None

    @property
    def num_processes(self) -> int:
        """Number of processes that share the model."""
        return self.tp * self.pp

    @property
    def is_parallel(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def division(self) -> str:
        """The division among processes, for messages."""
        return f"tp={self.tp}, pp={self.pp}"

    @property
    def loading(self) -> dict[str, Any]:
        """The options that have no effect once the model is loaded, by name."""
        return {field.name: getattr(self, field.name) for field in _LOADING}

    def over(self, model: Any, **changes: Any) -> Self:
        """Return the options for a model that was loaded by them."""
        unset: dict[str, Any] = {field.name: field.default for field in _LOADING}
        return dataclasses.replace(self, model=model, **unset | changes)


_LOADING = tuple(field for field in dataclasses.fields(ModelOptions) if field.metadata.get("loads"))


@dataclass(frozen=True, slots=True)
class WholeStart:
    """A decoder's prompt that is complete: the model's start token is not put before it."""

    tokens: Sequence[int]


class DecoderOptions(TypedDict, total=False):
    """Options of requests to encoder-decoder models; None is as left out. Causal models refuse them."""

    decoder_prompt: TextPrompt | WholeStart | None
    """What the decoder continues, a text or token ids, after its start token."""
    source_lang: str | None
    """Language of the source, if it is a text: a code of the model's multilingual tokenizer."""
    target_lang: str | None
    """Language of the text to be written: its token follows the decoder's start token, before `decoder_prompt`."""


def require_decoder_options(names: Iterable[str]) -> None:
    """Raise for the name of an option that a beam search does not have."""
    for name in names:
        if name not in DecoderOptions.__annotations__:
            raise InvalidRequestError(
                f"unknown option '{name}' of a beam search, whose parameters are BeamSearchParams: "
                f"{suggestion(name, DecoderOptions.__annotations__)}",
                param=name,
            )


class RequestKeywords(DecoderOptions, total=False):
    """Keywords of all methods that write texts, each a field of `RequestOptions`."""

    draft: str | None
    priority: int
    request_id: str | None
    trace: bool
    owner: str | None


@names_are_checked
@dataclass(frozen=True, slots=True)
class RequestOptions(SamplingParams):
    """What a request wants, of the library and of the server: its sampling parameters, and how its texts are written.

    Raises:
        InvalidRequestError: as `SamplingParams`, or another wrong value.
    """

    draft: str | None = None
    """One of the loaded drafters, or "none" for plain decoding; None for the default."""
    priority: int = 0
    """Lower numbers are served first."""
    decoder_prompt: TextPrompt | WholeStart | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    request_id: str | None = None
    """Name in records and errors; None for a new one."""
    trace: bool = False
    """Whether updates hold a record of every round."""
    owner: str | None = ""
    """Whose texts they are, for drafters that learn; None for texts that nothing is learned from."""
    written: Sequence[int] = ()
    """Tokens of the text that were written before, elsewhere."""
    drafted_by_client: bool = False
    """Whether `AsyncLLM.give` supplies the trees, in place of a drafter; for one text with draft "none"."""

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(
                f"priority is {shown_value(self.priority)}: it must be a whole number, lower goes first",
                param="priority",
            )
        if self.request_id is not None and (not isinstance(self.request_id, str) or not self.request_id):
            raise InvalidRequestError(
                f"request_id is {shown_value(self.request_id)}: give a text that is not empty", param="request_id"
            )

    @classmethod
    def of(cls, params: SamplingParams | None, **keywords: Any) -> RequestOptions:
        """Return the options of a request with these parameters; the default ones for None.

        Raises:
            InvalidRequestError: as the constructor; or `params` has another type.
        """
        if params is None:
            return cls(**keywords)
        if isinstance(params, Mapping):
            raise InvalidRequestError(
                "the sampling parameters are a dictionary: give SamplingParams(**parameters)", param="params"
            )
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"the sampling parameters are {shown_value(params)}: give SamplingParams, "
                "such as SamplingParams(temperature=0)",
                param="params",
            )
        if not isinstance(params, cls):
            # its values are checked already, and checking a large schema takes milliseconds
            values = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
            params = object.__new__(cls)
            for field in dataclasses.fields(cls):
                object.__setattr__(params, field.name, values.get(field.name, field.default))
        return dataclasses.replace(params, **keywords) if keywords else params

    def require_single(self) -> None:
        """Raise for several texts in a stream of one."""
        if self.n != 1:
            raise InvalidRequestError(
                f"n={self.n} texts cannot be streamed as one: set n=1, or use generate", param="n"
            )

    def require_text(self) -> None:
        """Raise for a stream of text from a request without text."""
        if not self.detokenize:
            raise InvalidRequestError(
                "detokenize=False gives no text to stream: use stream_updates or AsyncLLM.submit, whose updates have "
                "token_ids, or generate",
                param="detokenize",
            )


def options_for(params: Params, count: int, **keywords: Any) -> list[RequestOptions]:
    """Return the options of `count` requests with these parameters, for all or one for each.

    Raises:
        InvalidRequestError: their number differs; or as `RequestOptions.of`.
    """
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [RequestOptions.of(params, **keywords)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(params)} sampling parameters: give one for each, or one", param="params"
        )
    return [RequestOptions.of(each, **keywords) for each in params]


Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


class _Decorator(Protocol[Arguments]):
    @overload
    def __call__(self, function: Callable[[ModelOptions], Result], /) -> Callable[Arguments, Result]: ...
    @overload
    def __call__(
        self, function: Callable[[Owner, ModelOptions], Result], /
    ) -> Callable[Concatenate[Owner, Arguments], Result]: ...


def takes_arguments_of(options: Callable[Arguments, ModelOptions]) -> _Decorator[Arguments]:
    """Let a function or method with a parameter `options` take their arguments instead, or the options as `model`.

    Arguments besides the options are changes of them.
    """
    signature = inspect.signature(options)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        owner = [p for p in inspect.signature(function).parameters.values() if p.name == "self"]

        @functools.wraps(function)
        def with_arguments(*arguments: Any, **keywords: Any) -> Any:
            return function(*arguments[: len(owner)], _options_of(*arguments[len(owner) :], **keywords))

        with_arguments.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*owner, *signature.parameters.values()]
        )
        return with_arguments

    def _options_of(*arguments: Any, **keywords: Any) -> ModelOptions:
        unknown = next((name for name in keywords if name not in signature.parameters), None)
        if unknown is not None:
            raise TypeError(
                f"unexpected keyword argument '{unknown}': {suggestion(unknown, list(signature.parameters))}"
            )
        if arguments and isinstance(arguments[0], ModelOptions):
            changes = signature.bind_partial(*arguments, **keywords).arguments
            return dataclasses.replace(changes.pop("model"), **changes)
        return ModelOptions(*arguments, **keywords)

    return decorate


def prompt_list(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list; arrays and tensors of token ids are treated as lists.

    Raises:
        InvalidRequestError: the value is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        _refuse_messages([prompts])
        if "images" in prompts:
            return [prompts]
    if not is_row(prompts):
        hint = "give its input_ids" if isinstance(prompts, Mapping) else "give a text, token ids, or a list of either"
        raise InvalidRequestError(f"prompts is {shown_value(prompts)}: {hint}", param="prompts")
    listed = list(prompts)
    _refuse_messages(listed)
    is_one_of_ids = bool(listed) and all(map(is_id, listed))
    return [listed] if is_one_of_ids else listed


def _refuse_messages(prompts: Sequence[Any]) -> None:
    """Raise for a conversation, or a list of them, in place of prompts."""
    rows = (row if isinstance(row, list | tuple) else [row] for row in prompts)
    if any(isinstance(item, Mapping) and not item.keys().isdisjoint(MESSAGE_KEYS) for row in rows for item in row):
        raise InvalidRequestError(
            "prompts holds messages with 'role' and 'content', and generate takes texts or token ids: "
            "call chat(messages), which formats them by the model's chat template",
            param="prompts",
        )


def is_id(value: Any) -> bool:
    """Return whether the value is one whole number, such as a token id."""
    # arrays and tensors of any size have __index__
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def is_row(value: Any) -> bool:
    """Return whether the value is an ordered iterable; mappings would give their keys, bytes their numbers."""
    return isinstance(value, Iterable) and not isinstance(value, Mapping | Set | bytes | bytearray)


def shown_value(value: Any) -> str:
    """Return the value for a message: its type if its text is long."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"


def require_keys(prompt: Mapping[str, Any]) -> None:
    """Raise unless a prompt has the form of a text with images."""
    images = prompt.get("images")
    is_whole = prompt.keys() == {"text", "images"} and isinstance(prompt["text"], str)
    if not is_whole or not isinstance(images, list | tuple) or not images:
        raise InvalidRequestError(
            f"the prompt is {shown_value(dict(prompt))}: give a text, token ids, or a text with images, "
            '{"text": "…", "images": [image]}',
            param="prompt",
        )


def require_one_prompt(prompt: Any) -> None:
    """Raise for a list of prompts or of conversations in place of one."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    if isinstance(first, list | tuple) and first and isinstance(first[0], Mapping):
        raise InvalidRequestError(
            f"the prompt is a list of {len(prompt)} conversations, and a call takes one: call chat(messages), or this "
            "method, once for each, for example with asyncio.gather",
            param="prompt",
        )
    if isinstance(first, str | list | tuple):
        raise InvalidRequestError(
            f"the prompt is a list of {len(prompt)} prompts, and a call takes one: call it once for each, for example "
            "with asyncio.gather",
            param="prompt",
        )


def require_one_conversation(messages: object) -> None:
    """Raise unless the value is one conversation; `generate` would treat a text or token ids as a prompt."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        raise InvalidRequestError(
            f"chat takes one conversation per call, and this is a list of {len(messages)}: "
            "call it once for each, for example with asyncio.gather",
            param="messages",
        )
    with blaming("messages"):
        check_messages(messages)
