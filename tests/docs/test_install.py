"""Install commands of the documentation name extras that exist, and those that a page needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from documents import ROOT, blocks, documents

from draftree.core.errors import EXTRAS
from draftree.weights.catalogue import CATALOGUE

INSTALLS = re.compile(r"pip install -e [\"']\.\[([\w,]+)\]")
STARTS = ("README.md", "docs/install.md", "docs/tutorial.md")
"""Pages that begin with an installation."""
NEEDS = {
    "audio": [".flac", ".ogg", ".mp3"],
    "gguf": [*(name for name, entry in CATALOGUE.items() if entry.form == "gguf"), ".gguf"],
    "grammar": ["json_schema", "--json-schema", "regex=", "--regex", "grammar=", "--grammar"],
    "images": ["--image "],
    "pandas": ["to_pandas"],
    "parallel": ["--tp", "--pp"],
    "plots": ["--plots", "draftree analyse"],
    "ray": ["--replicas"],
    "remote": ["remote:", "verify-server"],
    "serve": ["draftree serve"],
    "suite": ["suite-check", "suite-table"],
    "telemetry": ["--otlp-endpoint"],
    "train": ["draftree train"],
    "tune": ["draftree tune"],
}


def installed_extras(page: Path) -> set[str]:
    """The extras of all install commands of a page."""
    return {extra for names in INSTALLS.findall(page.read_text(encoding="utf-8")) for extra in names.split(",")}


def shown(page: Path) -> str:
    """All code and all commands of a page."""
    return "\n".join(block.text for block in blocks(page) if block.language in ("python", "sh"))


def test_all_extras_are_considered() -> None:
    assert set(NEEDS) == set(EXTRAS)


@pytest.mark.parametrize("name", STARTS)
def test_the_install_command_brings_the_extras_of_all_that_is_shown(name: str) -> None:
    page = ROOT / name
    needed = {extra for extra, words in NEEDS.items() if any(word in shown(page) for word in words)}
    assert needed <= installed_extras(page)
    assert "gguf" in installed_extras(page), "the short names of models need it"


def test_install_commands_name_extras_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra for page in documents() for extra in installed_extras(page)}
    assert set(EXTRAS) <= named <= set(declared)


def test_every_extra_is_explained() -> None:
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in EXTRAS if f"| `{extra}` |" not in table] == []


def test_no_page_installs_draftree_from_an_index() -> None:
    wrong = [page.name for page in documents() if re.search(r"pip install [\"']?draftree", shown(page))]
    assert wrong == []
