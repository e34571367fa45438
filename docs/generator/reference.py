"""The reference: what a user can import, set, read, catch and type."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import draftree
from draftree import options
from draftree.async_llm import AsyncLLM, Submission
from draftree.cli import main
from draftree.cli.commands import COMMANDS, Entry
from draftree.core import errors
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.prompts import AsyncPromptEncoder
from draftree.engine.sequence import Piece, TokenLogprob, Update
from draftree.llm import LLM
from draftree.outputs import Completion, CompletionStats
from draftree.sampling.params import SamplingParams
from generator.docstrings import attributes, parse
from generator.markdown import code, fence, listed, page, table

__all__ = ["make"]

METHODS = ("generate", "chat", "stream", "stream_updates")
ASYNC_METHODS = (
    *("submit", "generate", "chat", "stream", "stream_updates"),
    *("on_round", "forget", "drain", "close"),
)
PROMPT_METHODS = ("encode", "encode_chat", "encode_text", "decode")
RESULTS = (
    *(Completion, CompletionStats, TokenLogprob, Submission, Update, Piece),
    *(PrefixStats, RoundRecord, SequenceRecord),
)
ALIASES = ("Prompt", "Messages", "Params")
TREE_INDENT = "    "
SAMPLING = {field.name: field.metadata["help"] for field in dataclasses.fields(SamplingParams)}
"""Meanings of the sampling parameters by name."""


def make() -> str:
    """The whole page."""
    return page(
        "# Reference",
        "<!-- Made by docs/build.py from src/draftree/: change it there, then `make docs`. -->",
        f"Names of the package: {', '.join(f'`{name}`' for name in draftree.__all__ if not name.startswith('_'))}. "
        "Drafters, verifiers and planners have [pages of their own](methods/README.md).",
        *language_model(),
        *async_language_model(),
        *sampling_params(),
        *results(),
        *error_tree(),
        *command_line(),
    )


def language_model() -> Iterator[str]:
    doc = parse(LLM.__doc__)
    yield "## LLM"
    yield doc.text
    yield fence(signature(LLM.__init__, "LLM"), "python")
    yield entries_table("argument", doc.entries("Args"))
    yield raises(doc.entries("Raises"))
    yield "Types of arguments below:"
    yield fence("\n".join(aliases()), "python")
    yield from methods_of(LLM, METHODS)
    yield "### Properties of LLM"
    properties = {name: parse(value.__doc__).text for name, value in vars(LLM).items() if isinstance(value, property)}
    properties["is_lossless"] = "Whether the verifier keeps the model's distribution."
    yield entries_table("property", properties)


def async_language_model() -> Iterator[str]:
    doc = parse(AsyncLLM.__doc__)
    yield "## AsyncLLM"
    yield doc.text
    yield fence(signature(AsyncLLM.__init__, "AsyncLLM"), "python")
    yield from arguments_of(doc.entries("Args"))
    yield from methods_of(AsyncLLM, ASYNC_METHODS)
    properties = {n: parse(value.__doc__).text for n, value in vars(AsyncLLM).items() if isinstance(value, property)}
    yield "### Properties of AsyncLLM"
    yield entries_table("property", properties)
    yield from methods_of(AsyncPromptEncoder, PROMPT_METHODS)


def methods_of(cls: type, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        method = getattr(cls, name)
        described = parse(method.__doc__)
        yield f"### {cls.__name__}.{name}"
        yield fence(signature(method, name), "python")
        yield described.text
        yield from arguments_of(described.entries("Args"))
        returned = described.sections.get("Returns", "")
        yield f"Returns: {' '.join(returned.split())}" if returned else ""
        yield raises(described.entries("Raises"))


def arguments_of(entries: dict[str, str]) -> Iterator[str]:
    """A table of arguments, and one line for those that another method describes."""
    same: dict[str, list[str]] = {}
    for name, text in entries.items():
        if text.startswith("as for `"):
            same.setdefault(text.rstrip("."), []).append(name)
    yield entries_table("argument", {n: text for n, text in entries.items() if not text.startswith("as for `")})
    yield ". ".join(f"{listed(names, none='')}: {text}" for text, names in same.items()) + "." if same else ""


def signature(function: Callable[..., Any], name: str) -> str:
    """A signature as its file writes it, without `self`."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    arguments.args = [argument for argument in arguments.args if argument.arg != "self"]
    returns = "" if node.returns is None or name.endswith("LLM") else f" -> {ast.unparse(node.returns)}"
    one_line = f"{name}({ast.unparse(arguments)}){returns}"
    if len(one_line) <= 100:
        return one_line
    return f"{name}(\n{''.join(f'    {part},{chr(10)}' for part in parts(arguments))}){returns}"


def parts(arguments: ast.arguments) -> Iterator[str]:
    """Every argument with its default, one by one."""
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    for argument, default in zip(arguments.args, [*defaults, *arguments.defaults], strict=True):
        yield with_default(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield with_default(argument, default)


def with_default(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def aliases() -> Iterator[str]:
    for line in ast.parse(inspect.getsource(options)).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) in ALIASES:
            yield ast.unparse(line)


def sampling_params() -> Iterator[str]:
    doc = parse(SamplingParams.__doc__)
    types = {attribute.name: attribute.type for attribute in attributes(SamplingParams)}
    yield "## SamplingParams"
    yield doc.text
    yield table(
        ("parameter", "type", "default", "meaning"),
        [
            (code(field.name), code(types[field.name]), code(field.default), field.metadata["help"])
            for field in dataclasses.fields(SamplingParams)
        ],
    )
    yield raises(doc.entries("Raises"))


def results() -> Iterator[str]:
    for cls in RESULTS:
        yield f"## {cls.__name__}"
        yield parse(cls.__doc__).text
        fields = [(code(a.name), code(a.type), a.text) for a in attributes(cls)]
        properties = [
            (code(name), code(returned(value)), parse(value.__doc__).text)
            for name, value in vars(cls).items()
            if isinstance(value, property)
        ]
        yield table(("field", "type", "meaning"), [*fields, *properties])
        for name, method in vars(cls).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield f"`{signature(method, name)}`: {parse(method.__doc__).text}"


def returned(value: property) -> str:
    return str(inspect.get_annotations(value.fget)["return"]) if value.fget else ""


def error_tree() -> Iterator[str]:
    yield "## Errors"
    yield "All errors are in `draftree.core.errors`; brackets show the built-in error that each one also is."
    tree = [line for line in (errors.__doc__ or "").splitlines() if line.startswith(TREE_INDENT)]
    yield fence(textwrap.dedent("\n".join(tree)))
    yield "A message names the wrong value, what is allowed, and what to do."
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.DraftreeError):
            yield entries_table(f"attribute of {error.__name__}", parse(error.__doc__).entries("Attributes"))


@dataclass(frozen=True, slots=True)
class Command:
    """A command or subcommand, as typed after `draftree`."""

    name: str
    click: Any
    about: str

    @property
    def group(self) -> str:
        return self.name.partition(" ")[0]


def command_line() -> Iterator[str]:
    yield "## Commands"
    yield next(
        part for part in inspect.cleandoc(main.main.__doc__ or "").split("\n\n") if part.startswith("Exit status")
    )
    commands = [command for name, entry in COMMANDS.items() for command in with_subcommands(name, entry)]
    users: dict[tuple[str, ...], list[Command]] = {}
    for command in commands:
        for option in command.click.params:
            users.setdefault(key_of(option), []).append(command)
    homes = {key: home_of(names) for key, names in users.items()}
    yield from shared_options(commands, homes)
    for command in commands:
        yield f"{'####' if ' ' in command.name else '###'} draftree {command.name}"
        yield command.about
        yield from options_of(command, homes)
        if command.name in COMMANDS:
            yield fence("\n".join(COMMANDS[command.name].examples), "sh")


def with_subcommands(name: str, entry: Entry) -> Iterator[Command]:
    command = entry.load()
    yield Command(name, command, command.help or entry.summary)
    for below, sub in getattr(command, "commands", {}).items():
        yield Command(f"{name} {below}", sub, sub.help or "")


def key_of(option: Any) -> tuple[str, ...]:
    """Equal for options of several commands that one row can describe."""
    return (*option.opts, *option.secondary_opts, option.help or "")


def home_of(users: list[Command]) -> str:
    """The command whose table describes an option; empty for the table of shared options."""
    return "" if len({command.group for command in users}) > 2 else users[0].name


def sampling_field(option: Any) -> str | None:
    """What an option adds to the meaning of the sampling parameter that it sets; None if it sets none."""
    field = SAMPLING.get(option.name)
    text = (option.help or "").partition("; the default is reduced")[0]
    if field is None or not text.startswith(field):
        return None
    return text.removeprefix(field).removeprefix("; ").removesuffix("in a file")


SHARED = "Shared options"


def shared_options(commands: list[Command], homes: dict[tuple[str, ...], str]) -> Iterator[str]:
    rows: dict[tuple[str, ...], tuple[str, str, str]] = {}
    sampling: dict[str, str] = {}
    for option in (option for command in commands for option in command.click.params):
        extra = sampling_field(option)
        if extra is not None:
            sampling.setdefault(option.name, code(typed(option)) + (f" ({extra})" if extra else ""))
        elif not homes[key_of(option)]:
            rows.setdefault(key_of(option), (code(typed(option)), default_of(option), option.help or ""))
    yield f"### {SHARED}"
    yield table(("", "default", "meaning"), rows.values())
    yield "### Sampling options"
    yield (
        "These have the meanings and defaults of [SamplingParams](#samplingparams): "
        f"{', '.join(sampling.values())}. A limit of tokens is reduced to fit the context."
    )


def options_of(command: Command, homes: dict[tuple[str, ...], str]) -> Iterator[str]:
    """Options that only this command describes, and the names of those that are described elsewhere."""
    rows: list[tuple[str, str, str]] = []
    elsewhere: dict[str, list[Any]] = {}
    missing = [*SAMPLING]
    others: list[str] = []
    for option in command.click.params:
        home = homes[key_of(option)]
        if option.name in missing:
            missing.remove(option.name)
        if sampling_field(option) is not None:
            if option.default not in (None, [], getattr(SamplingParams(), option.name)):
                others.append(f"`{option.opts[0]}` is {default_of(option)}")
        elif home == command.name:
            rows.append((code(typed(option)), default_of(option), option.help or ""))
        else:
            elsewhere.setdefault(home, []).append(option)
    yield table(("", "default", "meaning"), rows) if rows else ""
    for home, options_there in elsewhere.items():
        title = f"draftree {home}" if home else SHARED
        link = f"[{title}](#{title.lower().replace(' ', '-')})"
        yield f"{link}: {listed([name_of(option) for option in options_there], none='')}."
    if len(missing) < len(SAMPLING) // 2:
        without = f", except {listed(missing, none='')}" if missing else ""
        default = f"; {', '.join(others)} by default" if others else ""
        yield f"[Sampling options](#sampling-options){without}{default}."


def name_of(option: Any) -> str:
    is_argument = option.param_type_name == "argument"
    return typed(option) if is_argument else "/".join([option.opts[0], *option.secondary_opts])


def typed(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        word = parameter.metavar or parameter.name.upper()
        return word if parameter.required else f"[{word}]"
    names = ", ".join(parameter.opts) + "".join(f" / {name}" for name in parameter.secondary_opts)
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def default_of(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "needed"
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        if not parameter.secondary_opts:
            return ""
        return code((parameter.opts if value else parameter.secondary_opts)[0])
    return code(value.value if isinstance(value, enum.Enum) else value)


def entries_table(title: str, entries: dict[str, str]) -> str:
    return table((title, "meaning"), [(code(name), text) for name, text in entries.items()]) if entries else ""


def raises(entries: dict[str, str]) -> str:
    if not entries:
        return ""
    said = [f"`{name}`: {text.rstrip('.')}" for name, text in entries.items()]
    return f"Raises: {'; '.join(said)}."
