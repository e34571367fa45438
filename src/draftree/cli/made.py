"""Options that several commands share: written once as the parameters of a function, whose result a command gets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["takes"]

Command = Callable[..., Any]


def takes(
    name: str, make: Callable[..., Any], *, fixed: Mapping[str, Any] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Replace a parameter of a function by the parameters of another function, whose result it gets.

    Args:
        name: the parameter; the others take its place in the help.
        make: the other function, called before the command.
        fixed: parameters of `make` that are no options of this command, with their values.
        defaults: other defaults of the options.
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
