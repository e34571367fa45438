"""Served models: their names, their sources and their drafters, read from the command line's spelling."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import expanded, shown_name
from draftree.drafters import AUTO_DRAFT, NO_DRAFT, drafts

__all__ = ["DEFAULT_DRAFTS", "ModelChoice", "choose_models"]

DEFAULT_DRAFTS = (AUTO_DRAFT,)
"""Drafters of a model for which none is named: chosen when it is loaded, lossless, and switched off by the planner
where drafting does not pay."""
SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
"""A name in requests, metrics and logs."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One model to serve; nothing is loaded yet.

    Attributes:
        name: its name in the API.
        source: as for `LLM`: a catalogue name, a folder, a GGUF file or a hub id. Never shown to clients.
        aliases: other names of it in the API.
        drafts: its drafters, the default first; empty for plain decoding.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    drafts: tuple[str, ...] = DEFAULT_DRAFTS

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigurationError(f"model '{self.name}' has no source: write NAME=MODEL")
        for name in self.names:
            if not SERVED_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"'{name}' cannot be the name of a served model: use up to 128 letters, digits and . _ : / -, "
                    "and write NAME=MODEL"
                )
        if not all(drafts(draft) for draft in self.drafts):
            raise ConfigurationError(f"model '{self.name}': '{NO_DRAFT}' stands alone; name no other drafter with it")

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)


def choose_models(models: Sequence[str], drafters: Sequence[str] = ()) -> tuple[ModelChoice, ...]:
    """Read models and drafters as the command line spells them.

    Args:
        models: `MODEL`, `NAME=MODEL` or `NAME,ALIAS,…=MODEL`. Without a name, a path is served under its last part.
        drafters: specs for all models, or `NAME=SPEC` for one. The first of a model is its default; `none` is plain
            decoding. Without any, `DEFAULT_DRAFTS`.

    Raises:
        ConfigurationError: no model, a malformed or repeated name, or a repeated drafter.
    """
    if not models:
        raise ConfigurationError("there is no model to serve: name one")
    chosen = [_model(text) for text in models]
    names = [name for choice in chosen for name in choice.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the name '{twice}' is used twice: give each model a name of its own, NAME=MODEL")
    shared, own = _split(drafters, names)
    return tuple(dataclasses.replace(choice, drafts=_drafts(choice, shared, own)) for choice in chosen)


def _model(text: str) -> ModelChoice:
    before, equals, source = text.partition("=")
    if not equals or expanded(text).exists():
        return ModelChoice(shown_name(text), text)
    name, *aliases = (part.strip() for part in before.split(","))
    return ModelChoice(name, source, tuple(aliases))


def _split(drafters: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the drafters of all models, and those of single models by name."""
    shared: list[str] = []
    own: dict[str, list[str]] = {}
    for text in drafters:
        before, equals, spec = text.partition("=")
        if equals and before in names:
            own.setdefault(before, []).append(spec)
        elif equals and not set(":,+") & set(before):  # a spec has one of these before its first equals sign
            raise ConfigurationError(f"drafter '{text}': there is no model '{before}': {suggestion(before, names)}")
        else:
            shared.append(text)
    return shared, own


def _drafts(choice: ModelChoice, shared: Sequence[str], own: dict[str, list[str]]) -> tuple[str, ...]:
    found = [spec for name in choice.names for spec in own.get(name, ())] or list(shared)
    if not found:
        return DEFAULT_DRAFTS
    twice = next((spec for spec in found if found.count(spec) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"drafter '{twice}' of model '{choice.name}' is given twice: give it once")
    return () if found == [NO_DRAFT] else tuple(found)
