"""Options that several commands share: the model, how it runs, its drafter, and the completion of their values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

from typer.models import OptionInfo, ParameterInfo

from draftree.cli.layout import OUTPUT, argument, option
from draftree.cli.render import Colour, waiting
from draftree.core.errors import ConfigurationError
from draftree.core.host import spare_collection, without_collection
from draftree.core.registry import Registry
from draftree.drafters import DRAFTERS
from draftree.options import AUTO_DRAFT, NO_DRAFT, TEXT, ModelOptions
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE

if TYPE_CHECKING:
    from draftree.build import Methods
    from draftree.llm import LLM
    from draftree.loading.loaded import LoadedModel

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


MODEL: Any = argument(
    ..., "A name of 'draftree models', a folder, a GGUF file or a hub id.", "MODEL", complete=complete_model
)
PROMPT: Any = argument(
    None, "The prompt; '-', or none with a pipe: standard input without its final line break.", "PROMPT"
)
CHAT: Any = option(
    None,
    "Treat the prompt as a message or as plain text; default: a message if the model has a chat template.",
    panel=TEXT,
    names="--chat/--no-chat",
)
SYSTEM: Any = option(None, "System message of the chat.", "TEXT", TEXT)
IMAGES: Any = option(
    [], "Image that the prompt is about, for models that read images; may be repeated.", "FILE", TEXT, names="--image"
)
AS_JSON: Any = option(False, "Print one JSON object and nothing else.", panel=OUTPUT, names="--json")
COLOUR: Any = option(
    Colour.AUTO, "Colour accepted tokens: auto, always or never.", "WHEN", OUTPUT, names="--colour --color"
)


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
    name: str, make: Callable[..., Any], *, fixed: Mapping[str, Any] = MappingProxyType({}), **defaults: Any
) -> Callable[[Command], Command]:
    """Replace the parameter `name` of a function by the parameters of `make`, whose result it gets.

    Parameters in `fixed` are no options of the command and have these values; `defaults` are other defaults.
    """
    parameters = evaluated(make)
    strange = (fixed.keys() | defaults.keys()) - parameters.keys()
    assert not strange, f"'{make.__name__}' has no parameters {strange}"
    added = [
        with_default(parameter, defaults[key]) if key in defaults else parameter
        for key, parameter in parameters.items()
        if key not in fixed
    ]

    def decorate(command: Command) -> Command:
        declared = evaluated(command, without=name)
        assert name in declared, f"'{command.__name__}' has no parameter '{name}'"
        merged = [each for key, parameter in declared.items() for each in (added if key == name else [parameter])]

        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            options = {parameter.name: values.pop(parameter.name) for parameter in added}
            return command(**values, **{name: make(**options, **fixed)})

        # typer takes the order of arguments from the signature: the model first
        merged.sort(key=lambda each: (each.kind is inspect.Parameter.KEYWORD_ONLY, each.name != "model"))
        with_options.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
        return with_options

    return decorate


def with_default(parameter: inspect.Parameter, default: Any) -> inspect.Parameter:
    shown = copy.copy(parameter.default)
    shown.default = default
    return parameter.replace(default=shown)


def evaluated(function: Callable[..., Any], *, without: str = "") -> dict[str, inspect.Parameter]:
    """Return the parameters of a function with evaluated annotations; that of `without` may be of a type that is
    imported for type checkers only, like that of the result.
    """
    names = vars(sys.modules[inspect.unwrap(function).__module__])
    return {
        key: parameter
        if key == without or not isinstance(parameter.annotation, str)
        else parameter.replace(annotation=eval(parameter.annotation, names))
        for key, parameter in inspect.signature(function).parameters.items()
    }


def values_of(group: type) -> Callable[..., dict[str, Any]]:
    """Return a function for `takes` that makes the values of a class of options, by name; lists become tuples."""

    def make(**values: Any) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    kind = inspect.Parameter.KEYWORD_ONLY
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, kind, default=getattr(group, name), annotation=hint)
            for name, hint in get_type_hints(group).items()
        ]
    )
    return make


def import_engine() -> None:
    """Import torch and all modules that decode; to be called after all checks that need neither."""
    if "torch" in sys.modules:
        return  # the command was called by another program, whose objects are its own
    with waiting("importing torch"), without_collection():
        import_module("draftree.cli.runs")
    spare_collection()


@dataclass(frozen=True)
class Setup(ModelOptions):
    """The options of a command's model and methods."""

    auto_note: str = ""
    """What `auto` stood for and why; empty if the user named a drafter."""

    @property
    def is_plain(self) -> bool:
        """Whether no drafter is configured."""
        return self.draft is None or self.draft == NO_DRAFT

    def plainly(self) -> Setup:
        """Return the same setup without a drafter."""
        return dataclasses.replace(self, draft=None, plan=None, download_drafter=False, learn=None, auto_note="")

    def decided(self, loaded: LoadedModel) -> Setup:
        """Return the same setup with a named drafter instead of `auto`, and the reason in `auto_note`."""
        from draftree.build import decide

        if self.draft != AUTO_DRAFT:
            return self
        choice = decide(loaded, self.verify, self.plan, download=self.download_drafter)
        return dataclasses.replace(
            self, draft=choice.draft, plan=choice.plan, download_drafter=False, auto_note=choice.note
        )

    def llm(self, loaded: LoadedModel, **changes: Any) -> LLM:
        """Return the model, which was loaded by this setup, with its methods."""
        from draftree.llm import LLM

        return LLM(self.over(loaded, **changes))

    def methods(self) -> Methods:
        """Find and check the methods; loads nothing. For `auto`, those of a stand-in."""
        from draftree.build import choose_methods, learning_of

        assert not isinstance(self.draft, Sequence) or isinstance(self.draft, str), "commands take one drafter"
        methods = choose_methods(self.draft, self.verify, self.plan)
        learning_of(self.learn, [methods])
        return methods


EXECUTION_OPTIONS = (
    "dtype",
    "device",
    "kernels",
    "quantization",
    "offload",
    "kv_dtype",
    "threads",
    "affinity",
    "trust_remote_code",
)
ALL_OPTIONS = (
    "draft",
    "verify",
    "plan",
    "download_drafter",
    "learn",
    "allow_control_tokens",
    "generation_config",
    *EXECUTION_OPTIONS,
    "exact",
)
PARALLEL_OPTIONS = ("tp", "pp", "strict_sums")
COMPLETIONS = {"draft": complete_draft, "verify": complete_verify, "plan": complete_plan}


def takes_setup(*names: str, **others: Any) -> Callable[[Command], Command]:
    """Replace the parameter `setup` of a command by the model and by options for these fields of `ModelOptions`.

    `others` are values of other fields; an option or argument among them is one of the command.
    """
    special = {"model": MODEL} | {name: value for name, value in others.items() if isinstance(value, ParameterInfo)}
    fixed = {name: value for name, value in others.items() if name not in special}

    def make(**values: Any) -> Setup:
        return Setup(**values, **fixed)

    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            option_of(field, special.get(field.name))
            for field in dataclasses.fields(ModelOptions)
            if field.name in (*names, *special)
        ]
    )
    return takes("setup", make)


def option_of(field: dataclasses.Field[Any], shown: Any = None) -> inspect.Parameter:
    """Return a field of `ModelOptions` as a parameter for typer, with an option of its own or that of a command."""
    kind: Any = bool if field.type == "bool" else int if str(field.type).startswith("int") else str
    shown = shown or option(
        field.default,
        field.metadata["help"],
        field.metadata["word"],
        field.metadata["panel"],
        names="--" + field.name.replace("_", "-"),
        complete=COMPLETIONS.get(field.name),
    )
    place = inspect.Parameter.KEYWORD_ONLY if isinstance(shown, OptionInfo) else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(
        field.name, place, default=shown, annotation=kind if shown.default is not None else kind | None
    )


class DecoderFlags:
    decoder_prompt: str | None = option(
        None, "Encoder-decoder models: what the decoder continues; its tokens are not part of the text.", "TEXT", TEXT
    )
    source_lang: str | None = option(
        None,
        "Multilingual models: language of the prompt, as the tokenizer writes it (en, en_XX, eng_Latn).",
        "CODE",
        TEXT,
    )
    target_lang: str | None = option(
        None, "Multilingual models: language of the text, as the tokenizer writes it.", "CODE", TEXT
    )
