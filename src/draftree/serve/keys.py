"""An API key without its secret: its name, and the models that it may use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ANONYMOUS", "ApiKey"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret.

    Attributes:
        name: its name in logs and metrics.
        models: the names of the models that it may use, without aliases; None for all.
    """

    name: str
    models: frozenset[str] | None = None

    def allows(self, names: Iterable[str]) -> bool:
        """Return whether it may use the model with these names, aliases included."""
        return self.models is None or not self.models.isdisjoint(names)


ANONYMOUS = ApiKey("anonymous")
"""The key of every request if no keys are configured."""
