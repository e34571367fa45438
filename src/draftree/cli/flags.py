"""Command-line flags of the sampling parameters: names, types, defaults and help come from the dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from draftree.cli.layout import option, union_parts
from draftree.options import SAMPLING
from draftree.sampling.params import SamplingParams

T = TypeVar("T")

DEFAULTS: dict[str, Any] = {"max_tokens": 256}  # defaults that differ from the library's
REMARKS = {"max_tokens": "the default is reduced to fit the context"}
FILES = frozenset({"prediction", "grammar", "grammar_prefix"})  # long texts, which are read from a file
TEXTS_OR_FILES = frozenset({"json_schema"})  # JSON on the command line, or a file of it
LIBRARY_ONLY = frozenset({"detokenize", "spaces_between_special_tokens"})
NO_VALUE = "none"
WORDS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
ITEM_WORDS: dict[Any, str] = {int: "ID", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class Flag:
    """An option with the value of a dataclass's field."""

    name: str
    kind: Any  # type that typer reads
    option: Any
    # converts typer's value to the field's; raises ValueError with the expected form
    read: Callable[[Any], Any] = lambda value: value

    @property
    def parameter(self) -> inspect.Parameter:
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.option, annotation=self.kind)

    def value(self, value: Any) -> Any:
        try:
            return self.read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=self.option.param_decls[0].split("/")[0]) from error


def made_of(flags: Sequence[Flag], build: Callable[..., T]) -> Callable[..., T]:
    """Return a function for `takes` that builds an object from the values of flags."""

    def make(**values: Any) -> T:
        return build(**{flag.name: flag.value(values[flag.name]) for flag in flags})

    make.__signature__ = inspect.Signature([flag.parameter for flag in flags])  # type: ignore[attr-defined]
    return make


def sampling_of(
    *, without: Collection[str] = (), defaults: Mapping[str, Any] = DEFAULTS
) -> Callable[..., SamplingParams]:
    """Return a function for `takes` that makes `SamplingParams` of their flags."""
    return made_of([flag for flag in sampling_flags(defaults) if flag.name not in without], SamplingParams)


def sampling_flags(defaults: Mapping[str, Any] = DEFAULTS) -> Iterator[Flag]:
    """Yield a flag for each field of `SamplingParams` that is of use on the command line."""
    hints = typing.get_type_hints(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        if field.name not in LIBRARY_ONLY:
            default = defaults.get(field.name, field.default)
            text = "; ".join(filter(None, (field.metadata["help"], REMARKS.get(field.name))))
            yield flag_for(field.name, hints[field.name], default, text)


def flag_for(name: str, hint: Any, default: Any, text: str) -> Flag:
    """Return the flag of a sampling parameter, by its type."""
    names = "--" + name.replace("_", "-")

    def flag(kind: Any, default: Any, text: str, word: str | None, *read: Callable[[Any], Any]) -> Flag:
        shown = f"{names}/--no-{names[2:]}" if kind is bool else names
        return Flag(name, kind, option(default, text, word, SAMPLING, names=shown), *read)

    if name in FILES:
        return flag(Path | None, default, f"{text}; in a file", "FILE", read_file)
    if name in TEXTS_OR_FILES:
        text = f"{text.split(':')[0]}, as JSON or in a file"
        return flag(str | None, default, text, "FILE|JSON", read_json_or_file)
    parts = [part for part in union_parts(hint) if part is not types.NoneType]
    optional = len(parts) < len(union_parts(hint))
    container = next((part for part in parts if typing.get_origin(part) is not None), None)
    if container is not None:
        item, text = typing.get_args(container)[0], f"{text}; repeatable"
        if typing.get_origin(container) is Mapping:
            return flag(list[str], [], text, "ID=VALUE", read_pairs)
        return flag(types.GenericAlias(list, (item,)), [], text, ITEM_WORDS[item], lambda items: items or None)
    kind = parts[0]
    if kind is bool:
        return flag(bool, default, text, None)
    word = WORDS[kind]
    if optional and default is not None:
        return flag(str, str(default), text, f"{word}|{NO_VALUE}", read_optional(kind))
    return flag(kind | None if optional else kind, default, text, word)


def read_optional(kind: type) -> Callable[[Any], Any]:
    def read(text: str) -> Any:
        if text.lower() == NO_VALUE:
            return None
        try:
            return kind(text)
        except ValueError:
            number = "whole number" if kind is int else "number"
            raise ValueError(f"'{text}' is neither a {number} nor '{NO_VALUE}'") from None

    return read


def read_file(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
        raise ValueError(f"'{path}' {reason}") from error


def read_json_or_file(text: str | None) -> str | None:
    if text is None or text.lstrip().startswith("{"):
        return text
    return read_file(Path(text))


def read_pairs(texts: Sequence[str]) -> dict[int, float] | None:
    pairs: dict[int, float] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            token, number = int(key), float(value)
        except ValueError:
            raise ValueError(f"'{text}' is not of the form ID=VALUE, such as 50=-inf") from None
        if token in pairs:
            raise ValueError(f"token {token} is given twice")
        pairs[token] = number
    return pairs or None
