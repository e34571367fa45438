"""`make setup` installs pinned versions that the package allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from draftree.core.errors import EXTRAS

ROOT = Path(__file__).parents[2]


def wanted() -> list[Requirement]:
    """All that is needed here, but torch, which the Makefile names, and the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [one for one in map(Requirement, lines) if one.name not in ("torch", project["name"])]


def versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("<=") for line in lines if line and not line.startswith("#"))


def test_the_newest_of_every_package_is_named_and_allowed() -> None:
    for requirement in wanted():
        assert requirement.specifier.contains(versions()[requirement.name]), requirement


TOOLS = {"ipykernel", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "import-linter", "zensical", "ziglang"}
"""Packages that are run, not imported."""

MODULES = {
    "PyYAML": "yaml",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "pillow": "PIL",
}
"""Modules of packages with other names."""


def test_every_package_is_used() -> None:
    folders = ("src", "tests", "benchmarks")
    sources = "\n".join(path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) ([\w.]+)", sources, re.MULTILINE))
    modules = {
        name[:end] for name in imported for end in [*(dot.start() for dot in re.finditer(r"\.", name)), len(name)]
    }
    for requirement in wanted():
        module = MODULES.get(requirement.name, requirement.name.replace("-", "_"))
        is_used = module in modules or requirement.name in {*TOOLS, *EXTRAS.values()}
        assert is_used, f"{requirement.name} is not used: remove it from pyproject.toml"


def test_torch_has_one_in_the_makefile() -> None:
    (named,) = re.findall(r"^TORCH +\?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert re.fullmatch(r"torch==[\d.]+", named)
    assert "torch" not in versions()
