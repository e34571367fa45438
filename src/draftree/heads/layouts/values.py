"""Values of configurations in JSON, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from draftree.core.errors import ModelLoadError


@final
class Values:
    """An object of JSON. A value of null is the same as a missing one.

    Args:
        content: the object.
        place: its name in messages.
    """

    def __init__(self, content: Mapping[str, Any], place: str = "config.json") -> None:
        self.content = content
        self.place = place

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def get(self, name: str) -> Any:
        """Return a value of any type; None if it is missing."""
        return self.content.get(name)

    def require(self, *names: str) -> None:
        """Check that values are there.

        Raises:
            ModelLoadError: names all that are missing.
        """
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise ModelLoadError(
                f"{self.place} does not have {', '.join(missing)}: the folder is incomplete, or of another layout"
            )

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
            ModelLoadError: it is missing and has no default, or is no integer.
        """
        if default is None:
            self.require(name)
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number.

        Raises:
            ModelLoadError: it is none.
        """
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false.

        Raises:
            ModelLoadError: it is neither.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a text.

        Raises:
            ModelLoadError: it is none.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        """Return indices of layers.

        Raises:
            ModelLoadError: they are missing, or not a list of integers.
        """
        self.require(name)
        value = self.get(name)
        if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
            raise self._wrong(name, "a list of layers")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a list; empty if it is missing.

        Raises:
            ModelLoadError: it is not a list of texts.
        """
        value = [] if self.get(name) is None else self.get(name)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def part(self, name: str, *, optional: bool = False) -> Values:
        """Return an object inside this one.

        Args:
            name: its name.
            optional: whether a missing one is the same as an empty one.

        Raises:
            ModelLoadError: it is missing, or no object.
        """
        if not optional:
            self.require(name)
        value = {} if self.get(name) is None else self.get(name)
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Values(value, name)

    def parts(self, name: str) -> list[Values]:
        """Return the objects of a list that has at least one; empty if it is missing.

        Raises:
            ModelLoadError: it is not such a list.
        """
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
            raise self._wrong(name, "a list of objects")
        return [Values(one, name) for one in value]

    def _wrong(self, name: str, kind: str) -> ModelLoadError:
        return ModelLoadError(f"{self.place} has {name}={self.get(name)!r}: it must be {kind}")
