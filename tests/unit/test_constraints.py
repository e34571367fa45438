"""`make setup` installs pinned versions that the package allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from draftree.core.extras import EXTRAS

ROOT = Path(__file__).parents[2]


def wanted() -> list[Requirement]:
    """All that is needed here, but torch, which the Makefile names, and the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [one for one in map(Requirement, lines) if one.name not in ("torch", project["name"])]


def versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("<=") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_the_newest_of_every_package_is_named_and_allowed(requirement: Requirement) -> None:
    assert requirement.specifier.contains(versions()[requirement.name])


TOOLS = {"ipykernel", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "import-linter", "zensical"}
"""Development packages that are run, not imported."""

MODULES = {
    "PyYAML": "yaml",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
}
"""Modules of packages with other names."""


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_every_package_is_used(requirement: Requirement) -> None:
    folders = ("src", "tests", "benchmarks")
    sources = "\n".join(path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    module = MODULES.get(requirement.name, requirement.name.replace("-", "_"))
    imported = re.search(rf"^\s*(import|from) {module}\b", sources, re.MULTILINE)
    found = imported or requirement.name in {*TOOLS, *EXTRAS.values()}
    assert found, f"{requirement.name} is not used: remove it from pyproject.toml"


def test_torch_has_one_in_the_makefile() -> None:
    (named,) = re.findall(r"^TORCH +\?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert re.fullmatch(r"torch==[\d.]+", named)
    assert "torch" not in versions()
