"""Options that several commands share: the model, how it runs, its drafter, and the completion of their values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from draftree.cli.layout import argument, option
from draftree.cli.render import Colour, waiting
from draftree.core.errors import ConfigurationError
from draftree.core.host import spare_collection, without_collection
from draftree.core.registry import Registry
from draftree.drafters import AUTO_DRAFT, DRAFTERS, NO_DRAFT
from draftree.parallel.options import ParallelOptions
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE

if TYPE_CHECKING:
    from draftree.cli.runs import Setup
    from draftree.engine.prompts import DecoderOptions

NEEDS_MODEL = "model"
"""The drafter whose name is completed together with its colon."""

Completed = list[tuple[str, str]]


def complete_model(incomplete: str) -> Completed:
    """Return names of the catalogue and of the cache; for a path nothing, so that the shell completes files."""
    others = {name: "in the cache" for name in Cache().names() if name not in CATALOGUE}
    return starting(incomplete, [*((e.name, e.description) for e in CATALOGUE.values()), *others.items()])


def complete_cached(incomplete: str) -> Completed:
    return starting(incomplete, [(name, "in the cache") for name in Cache().names()])


def complete_draft(incomplete: str) -> Completed:
    """Return drafters, also after a plus sign, and models after `model:`."""
    before, plus, last = incomplete.rpartition("+")
    head = before + plus
    if last.startswith(f"{NEEDS_MODEL}:"):
        return [(f"{head}{NEEDS_MODEL}:{name}", text) for name, text in complete_model(last[len(NEEDS_MODEL) + 1 :])]
    known = [(f"{name}:" if name == NEEDS_MODEL else name, text) for name, text in summaries(DRAFTERS)]
    if not head:
        known += [(AUTO_DRAFT, "Chosen for the model."), (NO_DRAFT, "Plain decoding.")]
    return [(head + name, text) for name, text in starting(last, known)]


def complete_verify(incomplete: str) -> Completed:
    return starting(incomplete, summaries(VERIFIERS))


def complete_plan(incomplete: str) -> Completed:
    return starting(incomplete, summaries(PLANNERS))


def summaries(registry: Registry[Any]) -> Completed:
    return [(method.name, method.summary) for method in registry.methods()]


def starting(incomplete: str, known: Iterable[tuple[str, str]]) -> Completed:
    return [(name, text) for name, text in known if name.startswith(incomplete)]


TEXT = "Text"
RUNNING = "Execution"
SAMPLING = "Sampling"
SPECULATION = "Speculation"
OUTPUT = "Output"

Model = Annotated[
    str, argument("A name of 'draftree models', a folder, a GGUF file or a hub id.", "MODEL", complete=complete_model)
]
Prompt = Annotated[
    str | None, argument("The prompt; '-', or none with a pipe: standard input without its final line break.", "PROMPT")
]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N.", "NAME", RUNNING)]
Dtype = Annotated[str, option("auto, float32, bfloat16, float16 or float64.", "NAME", RUNNING)]
Kernels = Annotated[str, option("Implementation of passes: auto, native, torch or graphs.", "NAME", RUNNING)]
Quantization = Annotated[
    str | None,
    option(
        "int8 or int4 for weights of 8 or 4 bits: faster, but a different model; unquantized if not given.",
        "NAME",
        RUNNING,
    ),
]
Offload = Annotated[
    str | None,
    option("Memory for weights, such as 8GB: other layers are read from a file in every pass.", "SIZE", RUNNING),
]
KvDtype = Annotated[
    str | None,
    option(
        "int8 for keys and values of 8 bits: half the memory, but other texts; the model's dtype if not given.",
        "NAME",
        RUNNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    option(
        "Allow Python code from the model's folder, for models that need it.",
        panel=RUNNING,
        names="--trust-remote-code",
    ),
]
Threads = Annotated[
    int | None,
    option(
        "CPU threads of passes; if not given, one for each fast core of a memory node, within the quota.", "N", RUNNING
    ),
]
Affinity = Annotated[
    str | None,
    option(
        "Processors of all threads: auto (those that 'draftree doctor' shows), none, or a list such as 0-3,8. If "
        "not given: auto on machines with several memory nodes or kinds of cores.",
        "LIST",
        RUNNING,
    ),
]
Verify = Annotated[str, option("The verifier.", "RULE", SPECULATION, complete=complete_verify)]
Draft = Annotated[
    str,
    option(
        "The drafter: auto (chosen for the model), none, ngram, suffix, prediction, model:NAME, head:NAME; "
        "options after commas (ngram,k=4).",
        "SPEC",
        SPECULATION,
        complete=complete_draft,
    ),
]
Plan = Annotated[
    str | None,
    option(
        "The planner of draft sizes, such as fixed:4 or heuristic; auto if not given.",
        "POLICY",
        SPECULATION,
        complete=complete_plan,
    ),
]
Learn = Annotated[
    str | None,
    option(
        "Drafters learn from verified texts: server; server,folder=PATH keeps what was learned for later runs.",
        "SCOPE",
        SPECULATION,
    ),
]
Chat = Annotated[
    bool | None,
    option(
        "Treat the prompt as a message or as plain text; default: a message if the model has a chat template.",
        panel=TEXT,
        names="--chat/--no-chat",
    ),
]
System = Annotated[str | None, option("System message of the chat.", "TEXT", TEXT)]
AllowControlTokens = Annotated[
    bool,
    option(
        "Encode control tokens such as <|im_end|> in a chat prompt as such; spelled as text if not given.",
        panel=TEXT,
        names="--allow-control-tokens",
    ),
]
GenerationConfig = Annotated[
    str,
    option(
        "auto: sampling defaults of the model, in its generation_config.json; none: no defaults of the model.",
        "auto|none",
        SAMPLING,
    ),
]
AsJson = Annotated[bool, option("Print one JSON object and nothing else.", panel=OUTPUT, names="--json")]
When = Annotated[
    Colour, option("Colour accepted tokens: auto, always or never.", "WHEN", OUTPUT, names="--colour --color")
]


def require_new(output: Path | None) -> None:
    """Refuse an output path that exists or is not writable, before anything is loaded or measured."""
    if output is None:
        return
    if output.exists():
        raise ConfigurationError(f"'{output}' already exists, and files are never overwritten: choose another path")
    if not output.absolute().parent.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigurationError(
            f"'{output}' cannot be written: its folder is missing or not writable; choose another path"
        )


Command = Callable[..., Any]


def takes(
    name: str, make: Callable[..., Any], *, fixed: Mapping[str, Any] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Replace the parameter `name` of a function by the parameters of `make`, whose result it gets.

    Parameters in `fixed` are no options of the command and have these values; `defaults` are other defaults.
    """
    values = dict(fixed or {})
    parameters = evaluated(make)
    strange = (values.keys() | defaults.keys()) - parameters.keys()
    assert not strange, f"'{make.__name__}' has no parameters {strange}"
    added = [
        one.replace(default=defaults.get(key, one.default)) for key, one in parameters.items() if key not in values
    ]

    def decorate(command: Command) -> Command:
        own = evaluated(command, without=name)
        assert name in own, f"'{command.__name__}' has no parameter '{name}'"
        whole = [each for key, one in own.items() for each in (added if key == name else [one])]

        @functools.wraps(command)
        def with_options(**given: Any) -> Any:
            options = {one.name: given.pop(one.name) for one in added}
            return command(**given, **{name: make(**options, **values)})

        # positional parameters first: typer takes their order from the signature
        ordered = sorted(whole, key=lambda one: one.kind is inspect.Parameter.KEYWORD_ONLY)
        with_options.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in ordered}
        return with_options

    return decorate


def evaluated(function: Callable[..., Any], *, without: str = "") -> dict[str, inspect.Parameter]:
    """Return the parameters of a function with annotations for typer; the type of one, or of the result, may be one
    that is imported for type checkers only.
    """
    names = inspect.unwrap(function).__globals__
    return {
        key: one
        if key == without or not isinstance(one.annotation, str)
        else one.replace(annotation=eval(one.annotation, names))
        for key, one in inspect.signature(function).parameters.items()
    }


LOADING = ("dtype", "device", "kernels", "quantization", "kv_dtype", "trust_remote_code")

Exact = Annotated[
    bool,
    option("Refuse to run unless logits are bit-identical in every batch and tree.", panel=RUNNING, names="--exact"),
]


def import_engine() -> None:
    """Import torch and all modules that decode; to be called after all checks that need neither."""
    if "torch" in sys.modules:
        return  # the command was called by another program, whose objects are its own
    with waiting("importing torch"), without_collection():
        import_module("draftree.cli.runs")
    spare_collection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The options as given; their names are those of `Setup` and of all settings that name a model."""

    dtype: str
    device: str
    kernels: str
    quantization: str | None
    offload: str | None
    kv_dtype: str | None
    threads: int | None
    affinity: str | None
    trust_remote_code: bool

    @property
    def values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def loading(self) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name in LOADING}

    def setup(self, model: str, **others: Any) -> Setup:
        """Return the setup of a model, with other fields of `Setup`; imports torch."""
        from draftree.cli.runs import Setup

        return Setup(model, **self.values, **others)


def execution_of(
    *,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    offload: Offload = None,
    kv_dtype: KvDtype = None,
    threads: Threads = None,
    affinity: Affinity = None,
    trust_remote_code: TrustRemoteCode = False,
) -> Execution:
    return Execution(
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        offload=offload,
        kv_dtype=kv_dtype,
        threads=threads,
        affinity=affinity,
        trust_remote_code=trust_remote_code,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class How(Execution):
    """The options of a command whose drafter the user names."""

    draft: str
    verify: str
    plan: str | None
    learn: str | None
    allow_control_tokens: bool
    generation_config: str
    exact: bool


@takes("execution", execution_of)
def how_of(
    *,
    draft: Draft = AUTO_DRAFT,
    verify: Verify = "coupled",
    plan: Plan = None,
    learn: Learn = None,
    allow_control_tokens: AllowControlTokens = False,
    generation_config: GenerationConfig = "auto",
    execution: Execution,
    exact: Exact = False,
) -> How:
    return How(
        **execution.values,
        draft=draft,
        verify=verify,
        plan=plan,
        learn=learn,
        allow_control_tokens=allow_control_tokens,
        generation_config=generation_config,
        exact=exact,
    )


DecoderPrompt = Annotated[
    str | None,
    option("Encoder-decoder models: what the decoder continues; its tokens are not part of the text.", "TEXT", TEXT),
]
SourceLang = Annotated[
    str | None,
    option(
        "Multilingual models: language of the prompt, as the tokenizer writes it (en, en_XX, eng_Latn).", "CODE", TEXT
    ),
]
TargetLang = Annotated[
    str | None, option("Multilingual models: language of the text, as the tokenizer writes it.", "CODE", TEXT)
]


def decoder_of(
    *, decoder_prompt: DecoderPrompt = None, source_lang: SourceLang = None, target_lang: TargetLang = None
) -> DecoderOptions:
    return {"decoder_prompt": decoder_prompt, "source_lang": source_lang, "target_lang": target_lang}


TensorParallel = Annotated[
    int, option("Processes of torchrun that share each layer (tensor parallel).", "N", RUNNING, names="--tp")
]
PipelineParallel = Annotated[
    int, option("Stages of layers (pipeline parallel); each has --tp processes.", "N", RUNNING, names="--pp")
]
StrictSums = Annotated[
    bool,
    option(
        "Add the partial sums of processes in one order, whatever else is in a pass.",
        panel=RUNNING,
        names="--strict-sums",
    ),
]


def parallel_of(
    *, tp: TensorParallel = 1, pp: PipelineParallel = 1, strict_sums: StrictSums = False
) -> ParallelOptions:
    return ParallelOptions(tp=tp, pp=pp, strict_sums=strict_sums)
