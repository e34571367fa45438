"""Command-line flags of the server's settings: names, types, defaults, help and groups come from the dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from draftree.cli.flags import Flag
from draftree.serve.settings import BYTES_WORD, ServerSettings, read_bytes

__all__ = ["serving_flags", "takes_settings"]

WORDS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
HINTS: dict[str, Any] = typing.get_type_hints(ServerSettings)


def serving_flags() -> Iterator[Flag]:
    """Yield one flag for each field of `ServerSettings` that has help."""
    for field in dataclasses.fields(ServerSettings):
        if "help" in field.metadata:
            yield flag_for(field, HINTS[field.name])


def flag_for(field: dataclasses.Field[Any], hint: Any) -> Flag:
    """Return the flag of a field, by the field's type."""
    option = "--" + field.name.replace("_", "-")
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    is_tuple = typing.get_origin(hint) is tuple
    kind = parts[0] if parts else hint
    if field.metadata["word"] == BYTES_WORD:
        default: Any = field.default
        shown = None if default is None else f"{default >> 20}MiB"
        return Flag(field.name, option, annotated(str | None, field, option), shown, read_size)
    if is_tuple:
        singular = option.removesuffix("s")
        return Flag(field.name, singular, annotated(list[str], field, singular, "; repeatable"), [], tuple)
    if kind is bool:
        names = f"{option}/--no-{option[2:]}" if field.default else option
        return Flag(field.name, option, annotated(bool, field, names), field.default, same)
    # the dataclass writes `X | None` with X among int, float and str
    return Flag(field.name, option, annotated(hint, field, option, word=WORDS[kind]), field.default, same)


def annotated(
    hint: Any, field: dataclasses.Field[Any], names: str, remark: str = "", *, word: str | None = None
) -> Any:
    text, group = field.metadata["help"], str(field.metadata["group"])
    text = text if not remark else text.rstrip(".") + remark + "."
    shown = None if hint is bool else field.metadata["word"] or word
    return Annotated[hint, typer.Option(names, help=text, metavar=shown, rich_help_panel=group)]


def read_size(given: str | None) -> int | None:
    return None if given is None else read_bytes(given)


def same(given: Any) -> Any:
    return given


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the keyword `options` of a typer function by the flags of the settings, which it gets as a mapping."""
    flags = list(serving_flags())
    own = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != "options"]
    parameters = [*kept, *(flag.parameter() for flag in flags)]

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        values = {flag.name: flag.value(given.pop(flag.name)) for flag in flags}
        command(**given, options=values)

    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags
