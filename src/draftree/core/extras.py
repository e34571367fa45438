"""Optional dependencies: the package of each extra, and the error that is raised if it is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from draftree.core.errors import DraftreeError

__all__ = ["EXTRAS", "import_extra", "require_extra"]

EXTRAS = {
    "audio": "soundfile",
    "gguf": "gguf",
    "grammar": "xgrammar",
    "pandas": "pandas",
    "parallel": "accelerate",
    "plots": "matplotlib",
    "ray": "ray",
    "remote": "websockets",
    "serve": "fastapi",
    "telemetry": "opentelemetry",
    "train": "accelerate",
    "tune": "optuna",
}
"""The importable package of every extra."""


def require_extra(extra: str, purpose: str, *, error: Callable[[str], DraftreeError]) -> None:
    """Raise unless the package of an extra is installed; imports nothing.

    Args:
        extra: a key of `EXTRAS`.
        purpose: the beginning of the message, up to its verb: "plots need".
        error: makes the error from its message, such as its class.

    Raises:
        DraftreeError: `error` of the message; the package is not installed.
    """
    if find_spec(EXTRAS[extra]) is None:
        raise error(_message(extra, purpose, "is not installed"))


def import_extra(extra: str, purpose: str, *, error: Callable[[str], DraftreeError]) -> Any:
    """Import the package of an extra; arguments as for `require_extra`.

    Raises:
        DraftreeError: `error` of the message; the package is not installed, or its import fails.
    """
    require_extra(extra, purpose, error=error)
    try:
        return import_module(EXTRAS[extra])
    except ImportError as reason:
        first_line = (str(reason).splitlines() or [type(reason).__name__])[0]
        raise error(_message(extra, purpose, f"cannot be imported ({first_line})")) from reason


def _message(extra: str, purpose: str, case: str) -> str:
    return f"{purpose} the Python package '{EXTRAS[extra]}', which {case}: run pip install 'draftree[{extra}]'"
