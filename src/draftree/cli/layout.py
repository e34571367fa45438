"""Shared behaviour of all commands: repeated options are refused, help fits a screen, examples keep their lines.

typer 0.29 imports pydantic to convert the first value, even one without a type to convert to, which takes a sixth of a
second. Values that are what they should be, or plain numbers, skip this.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WHOLE = 1000  # longer than any summary
NUMBERS = {int: re.compile(r"[0-9]{1,18}", re.ASCII), float: re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)}
"""Texts of numbers that typer reads as Python does."""


SCREEN_LINES = 40  # longer help is reduced to the essential options; --help-all shows the rest
ESSENTIAL = frozenset(
    {"prompts", "draft", "drafts", "system", "temperature", "temperatures", "max_tokens", "seed", "quantization"}
    | {"as_json", "compare", "output", "beam_width", "num_return_sequences", "language", "form", "host", "port"}
    | {"split", "data", "minutes", "measure", "peer", "spec_bench", "baseline", "trace", "figures", "device", "rate"}
    | {"limit_tokens", "save", "hours"}
)
"""Options that reduced help shows."""
OUTPUT = "Output"  # a panel of options that most commands have
HELP_ALL = "--help-all"
SHOWS_ALL = "draftree.cli.layout.shows_all"  # key of a context's data: whether its help shows all options


def option(
    default: Any, text: str, metavar: str | None = None, panel: str | None = None, *, names: str = "", **settings: Any
) -> Any:
    """Return an option as the default of a command's parameter; `...` for one that must be given.

    `panel` is its title in --help-all, `names` its names if they do not follow from the parameter's, with spaces
    between them; `complete` and typer's other settings are keywords.
    """
    settings["autocompletion"] = settings.pop("complete", None)
    return typer.Option(default, *names.split(), help=text, metavar=metavar, rich_help_panel=panel, **settings)


def argument(default: Any, text: str, metavar: str | None = None, **settings: Any) -> Any:
    """Return an argument in the same way."""
    settings["autocompletion"] = settings.pop("complete", None)
    return typer.Argument(default, help=text, metavar=metavar, rich_help_panel="Arguments", **settings)


def refuse(is_wrong: object, option: str, reason: str) -> None:
    """Raise a usage error that names the option, if its value does not fit to the others."""
    if is_wrong:
        raise typer.BadParameter(reason, param_hint=option)


class Plain:
    """Mixin of commands and groups: values convert only where needed, and an option is given once."""

    callback: Callable[..., Any] | None
    epilog: str | None

    def get_params(self, ctx: Any) -> list[Any]:
        return converting_less(super().get_params(ctx), self.callback)  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class PlainCommand(Plain, TyperCommand):
    """A command whose help fits a screen; --help-all lists all options under their titles."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if HELP_ALL in args[: args.index("--") if "--" in args else None]:
            ctx.meta[SHOWS_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return help with all options if it fits a screen or is wanted, otherwise with the essential ones."""
        is_wanted = ctx.meta.get(SHOWS_ALL, False)
        ctx.meta[SHOWS_ALL] = True
        text = super().get_help(ctx)
        ctx.meta[SHOWS_ALL] = is_wanted
        return text if is_wanted or text.count("\n") < SCREEN_LINES else super().get_help(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each title, in order of appearance; --help is last."""
        panels: dict[str, list[tuple[str, str]]] = {}
        num_options = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            # the --help option is not typer's own and has no title
            title = getattr(parameter, "rich_help_panel", None) or "Other options"
            if parameter.param_type_name == "option":
                num_options += 1
                if not ctx.meta[SHOWS_ALL]:
                    if parameter.name not in ESSENTIAL and parameter.name != "help" and not parameter.required:
                        continue
                    title = "Options"
            panels.setdefault(title, []).append(record)
        if not ctx.meta[SHOWS_ALL]:
            panels["Options"].append((HELP_ALL, f"Show all {num_options} options and exit."))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class PlainGroup(Plain, TyperGroup):
    """A group of commands with complete summaries and examples."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, command.get_short_help_str(limit=WHOLE))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def group_of(text: str, commands: Mapping[str, Callable[..., Any]], *, default: str | None = None) -> typer.Typer:
    """Return a group of commands; arguments that begin with none of them are those of the default one."""

    class Group(PlainGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if default is not None and args and args[0] not in (*self.commands, *ctx.help_option_names):
                args = [default, *args]
            return super().parse_args(ctx, args)

    group = typer.Typer(cls=Group, no_args_is_help=True, help=text)
    for name, command in commands.items():
        group.command(name, cls=PlainCommand)(command)
    return group


def converting_less(parameters: list[Any], callback: Callable[..., Any] | None) -> list[Any]:
    """Return parameters of a command with this callback, after their values were made to skip needless conversions."""
    fresh = [parameter for parameter in parameters if "process_value" not in vars(parameter)]
    if fresh:
        signature = inspect.signature(callback or (lambda: None), eval_str=True)
        kinds = {name: kind_of(each) for name, each in signature.parameters.items()}
        for parameter in fresh:
            kind = kinds.get(parameter.name)
            convert = parameter.process_value
            parameter.process_value = partial(processed, parameter, kind, convert=convert)
    return parameters


def kind_of(parameter: inspect.Parameter) -> type | None:
    """Return the class of an option's values, of a list that of the list; None if typer checks more than the class."""
    about = parameter.default
    hint = parameter.annotation
    if any(getattr(about, name, None) is not None for name in ("min", "max", "parser", "click_type")):
        return None
    kinds = [part for part in union_parts(hint) if part is not types.NoneType]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    return kind if len(kinds) == 1 and isinstance(kind, type) else None


def union_parts(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def processed(
    parameter: Any, kind: type | None, context: Any, value: Any, *, convert: Callable[[Any, Any], Any]
) -> Any:
    """Return the value of an option or argument as its callback returns it; `kind` is None if typer checks more."""
    is_number = isinstance(value, str) and kind in NUMBERS and NUMBERS[kind].fullmatch(value)
    is_absent = value is None and not (parameter.required or parameter.multiple or parameter.nargs == -1)
    is_ready = type(value) is kind and (kind is not list or not value)
    if not (is_number or is_absent or is_ready):
        return convert(context, value)
    ready = kind(value) if is_number and kind is not None else value
    return ready if parameter.callback is None else parameter.callback(context, parameter, ready)


def refuse_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuse a repeated single-value option, of which the parser would silently keep the last value."""
    if ctx.resilient_parsing:
        return
    _, _, parameters = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, count in Counter(parameters).items():
        holds_one = parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_eager
        if holds_one and count > 1:
            raise typer.BadParameter(f"it is given {count} times: give it once", ctx=ctx, param=parameter)
