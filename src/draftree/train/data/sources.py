"""Sets of prompts that come with the package, or are made from installed packages."""

from __future__ import annotations

import json
from importlib.resources import files

from draftree.core.errors import ConfigurationError
from draftree.train.data.jobs import DataPrompt, PromptSet
from draftree.train.data.packages import package_prompts
from draftree.train.data.shipped.expansion import expanded

SHIPPED, EXPANDED, PACKAGES = "shipped", "expanded", "packages"
DEFAULT_COUNTS = {EXPANDED: 10_000, PACKAGES: 2_000}
OWN_LICENCE = "Apache-2.0, part of draftree"
PACKAGES_LICENCE = "licences of the named packages; prompts quote their documentation and sources"


def prompt_set(name: str) -> PromptSet:
    """Return the prompts of "shipped", "expanded" or "packages"; the last two with ":N" for a maximum number.

    Raises:
        ConfigurationError: another name, or an invalid number.
    """
    kind, colon, given = name.partition(":")
    if kind == SHIPPED and not colon:
        return PromptSet(SHIPPED, shipped(), OWN_LICENCE)
    if kind not in DEFAULT_COUNTS or (colon and not (given.isdecimal() and int(given) > 0)):
        raise ConfigurationError(
            f"prompts are '{name}': give 'shipped', 'expanded:N', 'packages:N' with a positive N, or a file"
        )
    number = int(given) if colon else DEFAULT_COUNTS[kind]
    if kind == EXPANDED:
        return PromptSet(EXPANDED, expanded(number), OWN_LICENCE)
    prompts, names = package_prompts(number)
    return PromptSet(PACKAGES, prompts, f"{PACKAGES_LICENCE}: {', '.join(names)}")


def shipped() -> list[DataPrompt]:
    """Return the prompts that were written for this package."""
    lines = files("draftree.train.data.shipped").joinpath("prompts.jsonl").read_text("utf-8").splitlines()
    found = []
    for line in lines:
        record = json.loads(line)
        text = record.get("prompt")
        found.append(DataPrompt(tuple(record["messages"])) if text is None else DataPrompt.of_text(text))
    return found
