"""The README's install command covers everything that the README shows."""

from __future__ import annotations

import re
import tomllib

from documents import ROOT, blocks

from draftree.core.extras import EXTRAS
from draftree.weights.catalogue import CATALOGUE

README = ROOT / "README.md"
NEEDS = {
    "gguf": [*(name for name, entry in CATALOGUE.items() if entry.form == "gguf"), ".gguf"],
    "grammar": ["json_schema", "--json-schema", "regex=", "--regex", "grammar=", "--grammar"],
    "pandas": ["to_pandas"],
    "parallel": ["--tp", "--pp"],
    "plots": ["--plots", "draftree analyse"],
    "ray": ["--replicas"],
    "remote": ["remote:", "verify-server"],
    "serve": ["draftree serve"],
    "telemetry": ["--otlp-endpoint"],
    "train": ["draftree train"],
    "tune": ["draftree tune"],
}


def installed_extras() -> set[str]:
    (command,) = re.findall(r'^pip install -e "\.\[([\w,]+)\]"$', README.read_text(encoding="utf-8"), re.MULTILINE)
    return set(command.split(","))


def shown() -> str:
    """All code and all commands of the README."""
    return "\n".join(block.text for block in blocks(README) if block.language in ("python", "sh"))


def test_all_extras_are_considered() -> None:
    assert set(NEEDS) == set(EXTRAS)


def test_the_install_command_brings_the_extras_of_all_that_is_shown() -> None:
    needed = {extra for extra, words in NEEDS.items() if any(word in shown() for word in words)}
    assert "gguf" in needed
    assert needed <= installed_extras()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert installed_extras() <= set(declared)


GUIDES = (
    *("command-line", "devices", "end-and-cloud", "library"),
    *("operating", "replicas", "traces", "training"),
)
"""Guides that name extras."""


def test_every_extra_is_named_in_readme_and_guides() -> None:
    guides = "".join((ROOT / "docs" / "guides" / f"{name}.md").read_text("utf-8") for name in GUIDES)
    for extra in EXTRAS:
        assert f"| `{extra}` |" in README.read_text(encoding="utf-8")
        assert f"pip install 'draftree[{extra}]'" in guides
