"""Settings of learning while serving, read from a spec such as `server,folder=/var/lib/draftree,every=300`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.registry import Spec, build_config

__all__ = ["MAX_RANK", "Learning", "Scope", "parse_learning"]

MAX_RANK = 8
"""Maximum rank of a correction of a head's logits."""


class Scope(enum.StrEnum):
    """Whose texts influence whose drafts."""

    SERVER = "server"
    """Texts of all requests, drafts of all requests."""
    KEY = "key"
    """Texts and drafts of one owner, such as an API key."""


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """Options after the scope.

    Attributes:
        folder: folder of the files; None to keep what is learned in memory only.
        every: seconds between two saves.
        rate: learning rate of heads; 0 to leave heads as they are.
        rank: rank of the correction of a head's logits, besides a bias per token; 0 for the bias only.
        share: maximum share of the time of generation that heads learn for.

    Raises:
        ConfigurationError: a value is out of range.
    """

    folder: str | None = None
    every: float = 300.0
    rate: float = 0.07
    rank: int = MAX_RANK
    share: float = 0.02

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise ConfigurationError(f"option every of learning is {self.every:g}: it must be seconds above 0")
        if self.folder is not None and not self.folder.strip():
            raise ConfigurationError("option folder of learning is empty: name a folder, or leave it out")
        if not 0 <= self.rate <= 1:
            raise ConfigurationError(f"option rate of learning is {self.rate:g}: it must be from 0 to 1")
        if not 0 <= self.rank <= MAX_RANK:
            raise ConfigurationError(f"option rank of learning is {self.rank}: it must be from 0 to {MAX_RANK}")
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"option share of learning is {self.share:g}: it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Learning:
    """A scope and its options."""

    scope: Scope
    options: LearnOptions


def parse_learning(text: str) -> Learning:
    """Read a spec: `server` or `key`, and options after commas.

    Raises:
        ConfigurationError: an unknown scope or option, or a value out of range.
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"learn is {text!r}: {suggestion('', list(Scope))}")
    name, *items = (part.strip() for part in text.split(","))
    if name not in list(Scope):
        raise ConfigurationError(f"learn is '{text}': {suggestion(name, list(Scope))}, and options after commas")
    options = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigurationError(f"option '{item}' of learning '{name}' is not of the form key=value")
        options.append((key.strip(), value.strip()))
    return Learning(Scope(name), build_config(LearnOptions, Spec(name, None, tuple(options)), "learning"))
