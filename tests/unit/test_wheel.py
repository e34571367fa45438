"""The wheel is complete: installed into an empty environment, it runs with native kernels."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli_samples import save_tiny_model
from draftree.models.native.build import SOURCES, built_library
from draftree.version import __version__
from private_cache import private_cache

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftree"
DEPENDENCIES = ("torch", "transformers", "numpy", "rich", "typer")


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds the wheel alone; its dependencies are those of the running environment."""

    python: Path
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "CC", "OMP_NUM_THREADS") if key in os.environ}
        own = {"HOME": str(self.home), "DRAFTREE_CACHE": str(self.home / "cache"), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.home, env=kept | own)

    def script(self, name: str) -> str:
        return str(self.python.parent / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, as a user builds it."""
    copy, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(PACKAGE, copy / "src" / "draftree", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(copy)], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    place = tmp_path_factory.mktemp("environment")
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, cwd=place)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    # lines of a .pth file are plain folders: an editable draftree in them is not seen
    folders = {str(Path(str(importlib.import_module(name).__file__)).parents[1]) for name in DEPENDENCIES}
    (site / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n", encoding="utf-8")
    home = place / "home"
    home.mkdir()
    return Environment(python, home)


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("draftree/")}
    assert held == expected
    assert {"draftree/py.typed", "draftree/cli/data/tell_story.md"} <= held
    assert {f"draftree/models/native/csrc/{path.name}" for path in SOURCES} <= held


def test_the_installed_package_is_the_one_of_the_wheel(environment: Environment) -> None:
    done = environment.run(str(environment.python), "-c", "import draftree; print(draftree.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(environment.python.parents[1]), done.stderr


def test_the_program_and_the_module_are_there(environment: Environment) -> None:
    for command in ([environment.script("draftree")], [str(environment.python), "-m", "draftree"]):
        done = environment.run(*command, "--version")
        assert (done.stdout, done.stderr, done.returncode) == (f"draftree {__version__}\n", "", 0)
    done = environment.run(str(environment.python), "-m", "draftree", "methods")
    assert done.returncode == 0, done.stderr
    assert {"drafters", "verifiers", "planners"} <= set(done.stdout.split())


def of_variant(libraries: Path, prefix: str) -> set[str]:
    """Names of all versions of a variant; other workers may compile other variants meanwhile."""
    variant = prefix.rsplit("-", 1)[0]
    return {path.name for path in libraries.glob("*.so") if path.name.rsplit("-", 2)[0] == variant}


@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
def test_it_writes_with_native_kernels_whose_sources_are_those_of_the_checkout(environment: Environment) -> None:
    prefix = built_library().name.rsplit("-", 1)[0]
    libraries = Path(private_cache(environment.home / "cache")) / "native"
    before = of_variant(libraries, prefix)
    model = save_tiny_model(environment.home / "model", chat=False)
    options = ("--kernels", "native", "--draft", "ngram", "--max-tokens", "24", "--temperature", "0", "--json")
    done = environment.run(environment.script("draftree"), "generate", str(model), "ab", *options)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 24
    assert of_variant(libraries, prefix) == before, "other sources would be compiled again"
