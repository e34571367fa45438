"""Command-line flags of the sampling parameters: names, types, defaults and help come from the dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.options import SAMPLING
from draftree.sampling.params import SamplingParams

__all__ = ["Flag", "sampling_flags", "takes_sampling"]

DEFAULTS: dict[str, Any] = {"max_tokens": 256}
"""Defaults that differ from the library's."""
REMARKS = {"max_tokens": "the default is reduced to fit the context"}
FILES = frozenset({"prediction", "grammar", "grammar_prefix"})
"""Long texts, which are read from a file."""
TEXTS_OR_FILES = frozenset({"json_schema"})
"""JSON on the command line, or a file of it."""
NO_VALUE = "none"
WORDS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
ITEM_WORDS: dict[Any, str] = {int: "ID", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of the dataclass as a command-line flag.

    Attributes:
        name: name of the field.
        option: the flag on the command line.
        annotation: annotation for typer.
        default: default for typer.
        read: converts typer's value to the field's; raises ValueError with the expected form.
    """

    name: str
    option: str
    annotation: Any
    default: Any
    read: Callable[[Any], Any]

    def parameter(self) -> inspect.Parameter:
        """Return the flag as a parameter of a typer function."""
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=self.annotation
        )

    def value(self, given: Any) -> Any:
        """Return the value of the field."""
        try:
            return self.read(given)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=self.option) from error


def sampling_flags(
    defaults: Mapping[str, Any] = DEFAULTS, *, kind: type = SamplingParams, without: Collection[str] = ()
) -> Iterator[Flag]:
    """Yield one flag for each field of `SamplingParams` or of another dataclass of parameters."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in without:
            continue
        default = defaults.get(field.name, field.default)
        text = "; ".join(filter(None, (field.metadata["help"], REMARKS.get(field.name))))
        yield flag_for(field.name, hints[field.name], default, text)


def flag_for(name: str, hint: Any, default: Any, text: str) -> Flag:
    """Return the flag of a field, by the field's type."""
    option = "--" + name.replace("_", "-")
    if name in FILES:
        return Flag(name, option, option_of(Path | None, option, f"{text}; in a file", "FILE"), default, read_file)
    if name in TEXTS_OR_FILES:
        own = f"{text.split(':')[0]}, as JSON or in a file"
        return Flag(name, option, option_of(str | None, option, own, "FILE|JSON"), default, read_json_or_file)
    parts = [part for part in union_parts(hint) if part is not types.NoneType]
    optional = len(parts) < len(union_parts(hint))
    container = next((part for part in parts if typing.get_origin(part) is not None), None)
    if container is not None:
        several, item = f"{text}; repeatable", typing.get_args(container)[0]
        if typing.get_origin(container) is Mapping:
            return Flag(name, option, option_of(list[str], option, several, "ID=VALUE"), [], read_pairs)
        return Flag(
            name,
            option,
            option_of(types.GenericAlias(list, (item,)), option, several, ITEM_WORDS[item]),
            [],
            none_if_empty,
        )
    kind = parts[0]
    if kind is bool:
        return Flag(name, option, option_of(bool, f"{option}/--no-{option[2:]}", text, None), default, same)
    word = WORDS[kind]
    if optional and default is not None:
        return Flag(name, option, option_of(str, option, text, f"{word}|{NO_VALUE}"), str(default), read_optional(kind))
    return Flag(name, option, option_of(kind | None if optional else kind, option, text, word), default, same)


def union_parts(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def option_of(kind: Any, option: str, text: str, word: str | None) -> Any:
    return Annotated[kind, typer.Option(option, help=text, metavar=word, rich_help_panel=SAMPLING)]


def none_if_empty(given: Any) -> Any:
    return given or None


def same(given: Any) -> Any:
    return given


def read_optional(kind: type) -> Callable[[Any], Any]:
    def read(given: str) -> Any:
        if given.lower() == NO_VALUE:
            return None
        try:
            return kind(given)
        except ValueError:
            number = "whole number" if kind is int else "number"
            raise ValueError(f"'{given}' is neither a {number} nor '{NO_VALUE}'") from None

    return read


def read_file(given: Path | None) -> str | None:
    try:
        return None if given is None else given.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
        raise ValueError(f"'{given}' {reason}") from error


def read_json_or_file(given: str | None) -> str | None:
    if given is None or given.lstrip().startswith("{"):
        return given
    return read_file(Path(given))


def read_pairs(given: Sequence[str]) -> dict[int, float] | None:
    pairs: dict[int, float] = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            token, number = int(key), float(value)
        except ValueError:
            raise ValueError(f"'{text}' is not of the form ID=VALUE, such as 50=-inf") from None
        if token in pairs:
            raise ValueError(f"token {token} is given twice")
        pairs[token] = number
    return pairs or None


def takes_sampling(
    command: Callable[..., None], *, without: Collection[str] = (), defaults: Mapping[str, Any] = DEFAULTS
) -> Callable[..., None]:
    """Replace the keyword `params: SamplingParams` of a typer function by the flags of its fields."""
    flags = [flag for flag in sampling_flags(defaults) if flag.name not in without]
    own = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != "params"]
    parameters = [*kept, *(flag.parameter() for flag in flags)]

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        values = {flag.name: flag.value(given.pop(flag.name)) for flag in flags}
        command(**given, params=SamplingParams(**values))

    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags
