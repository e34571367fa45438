"""The one reader of JSON from outside the program.

`json.loads` raises `RecursionError` for deep nesting, `UnicodeDecodeError` for other encodings, and a file may be
missing, a folder, or larger than memory. Here everything but a missing file is a `JsonError` whose text says what is
wrong, so a caller handles damaged content in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "MALFORMED",
    "MAX_JSON_BYTES",
    "JsonError",
    "parse_json",
    "parse_json_object",
    "read_json",
    "read_json_lines",
]

MAX_JSON_BYTES = 64 << 20
"""Largest file that is read: twice the largest known tokenizer.json."""


MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What a reader of parsed content raises for values that are missing or of another type."""


class JsonError(ValueError):
    """Content that is not the expected JSON; the text says why."""


def parse_json(content: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON.

    Args:
        content: text, or its bytes in UTF-8.
        object_pairs_hook: as for `json.loads`.

    Raises:
        JsonError: it is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise JsonError("it is not UTF-8 text") from None
    except ValueError as error:
        raise JsonError(f"it is not JSON: {error}") from None


def parse_json_object(content: str | bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        JsonError: as `parse_json`, or it is not an object.
    """
    found = parse_json(content)
    if not isinstance(found, dict):
        raise JsonError("it does not hold a JSON object")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        JsonError: it cannot be read, is too large, or does not hold one JSON object.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonError(error.strerror or str(error)) from None
    except ValueError as error:  # a name that no file can have
        raise JsonError(str(error)) from None
    if len(content) > MAX_JSON_BYTES:
        raise JsonError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    return parse_json_object(content)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file that holds one JSON object per line; blank lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        JsonError: it cannot be read, or a line is not a JSON object; the text has its number.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise JsonError("it is not UTF-8 text") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(parse_json_object(line))
        except JsonError as error:
            raise JsonError(f"line {number}: {error}") from None
    return found
