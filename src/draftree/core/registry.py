"""Registry of methods: each file in a seam's folder is a method, and the file name is its name everywhere.

There is no manual list. `Registry` reads a package's folder: every module except `base` is a method, subpackages hold
helpers. A method's file holds one subclass of the seam's base, with an inner `Config` (a frozen dataclass) if it has
options, and its summary is the first line of the file's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from draftree.core.errors import ConfigurationError, suggestion

Base = TypeVar("Base")


@dataclass(frozen=True, slots=True)
class Spec:
    """A method as a user writes it: `name`, `name:argument`, `name:argument,key=value,...`."""

    name: str
    argument: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = self.name if self.argument is None else f"{self.name}:{self.argument}"
        return ",".join([head, *(f"{key}={value}" for key, value in self.options)])


@dataclass(frozen=True, slots=True)
class Method:
    """A method found in a folder; its module is not imported yet."""

    name: str
    module: str
    summary: str


@dataclass(frozen=True, slots=True)
class NoOptions:
    """No options."""


class Registry(Generic[Base]):
    """The methods of one seam. `base` is "module:Class"; `kind` is the noun for a method in messages."""

    def __init__(self, package: str, base: str, *, kind: str) -> None:
        self.package = package
        self.kind = kind
        self._base = base

    def __str__(self) -> str:
        return f"{self.kind}s"

    def methods(self) -> list[Method]:
        """Return all methods of the folder, sorted by name; reads files, imports none of them."""
        methods = []
        for name, path in self._files().items():
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            methods.append(Method(name, self._module(name), docstring.split("\n", 1)[0]))
        return methods

    def names(self) -> list[str]:
        return list(self._files())

    def _files(self) -> dict[str, Path]:
        """Map each name to its file, sorted by name; the folder is listed on every call."""
        files = {
            info.name.replace("_", "-"): Path(info.module_finder.path) / f"{info.name}.py"  # type: ignore[union-attr]
            for info in pkgutil.iter_modules(importlib.import_module(self.package).__path__)
            if not info.ispkg and info.name != "base" and not info.name.startswith("_")
        }
        return dict(sorted(files.items()))

    def _module(self, name: str) -> str:
        return f"{self.package}.{name.replace('-', '_')}"

    def find(self, name: str) -> type[Base]:
        if name not in (names := self.names()):
            raise ConfigurationError(f"unknown {self.kind} '{name}': {suggestion(name, names)}")
        base = pkgutil.resolve_name(self._base)
        module_name = self._module(name)
        classes: list[Any] = [
            value
            for value in vars(importlib.import_module(module_name)).values()
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module_name
        ]
        if len(classes) != 1:
            raise ConfigurationError(f"{module_name} must define exactly one {self.kind}, it defines {len(classes)}")
        return classes[0]

    def configure(self, spec: Spec) -> tuple[type[Base], Any]:
        """Return the class of a spec and its validated configuration."""
        cls = self.find(spec.name)
        return cls, build_config(cls.Config, spec, self.kind)  # type: ignore[attr-defined]

    def parse(self, text: str) -> list[Spec]:
        """Parse `a+b:x,key=value` into specs. A plus sign separates specs only if a known name follows it."""
        if not isinstance(text, str):
            raise ConfigurationError(f"{self.kind} {text!r} is not a string: {suggestion('', self.names())}")
        known = "|".join(re.escape(name) for name in sorted(self.names(), key=len, reverse=True))
        pieces = re.split(rf"\+(?=\s*(?:{known})\s*(?:[:,+]|$))", text) if known else [text]
        return [self._parse_one(piece.strip()) for piece in pieces]

    def _parse_one(self, text: str) -> Spec:
        head, *rest = text.split(",")
        name, colon, argument = head.partition(":")
        if not name:
            raise ConfigurationError(f"empty {self.kind} in '{text}': {suggestion('', self.names())}")
        options = []
        for item in rest:
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise ConfigurationError(f"option '{item}' of {self.kind} '{name}' is not of the form key=value")
            options.append((key.strip(), value.strip()))
        return Spec(name.strip(), argument if colon else None, tuple(options))


def build_config(config_class: type, spec: Spec, kind: str) -> Any:
    """Build a config dataclass from a spec. The part after the colon goes to the field marked `argument`."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    hints = typing.get_type_hints(config_class)
    values = {
        name: _convert(text, hints[name], f"option '{name}' of {kind} '{spec.name}'")
        for name, text in _named_values(spec, fields, kind)
    }
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigurationError(f"{kind} '{spec.name}' needs {name}: write {spec.name}:{name.upper()}")
    try:
        return config_class(**values)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{kind} '{spec}': {error}") from error


def _named_values(spec: Spec, fields: dict[str, dataclasses.Field[Any]], kind: str) -> Iterator[tuple[str, str]]:
    positional = next((field.name for field in fields.values() if field.metadata.get("argument")), None)
    if spec.argument is not None:
        if positional is None:
            raise ConfigurationError(f"{kind} '{spec.name}' takes no argument after a colon, got '{spec.argument}'")
        if not spec.argument:
            raise ConfigurationError(f"{kind} '{spec.name}:' needs {positional} after the colon")
        yield positional, spec.argument
    seen = set() if spec.argument is None else {positional}
    for key, value in spec.options:
        name = key.replace("-", "_")
        if name not in fields:
            known = [field.replace("_", "-") for field in fields]
            hint = suggestion(key, known) if known else "it takes none"
            raise ConfigurationError(f"unknown option '{key}' of {kind} '{spec.name}': {hint}")
        if name in seen:
            raise ConfigurationError(f"option '{key}' of {kind} '{spec.name}' is given twice")
        seen.add(name)
        yield name, value


def _convert(text: str, hint: Any, what: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    try:
        if hint is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        return hint(text)
    except (ValueError, KeyError) as error:
        noun = {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, hint.__name__)
        raise ConfigurationError(f"{what} must be {noun}, got '{text}'") from error
