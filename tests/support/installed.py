"""Packages of others in an environment that adds them to those of the tests. Not a test itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest


def python_with(folder: Path, *packages: str, without: Sequence[str] = ()) -> Path:
    """Install packages and return the interpreter that has them. Skips the test if pip cannot install them.

    Requirements that the environment of the tests meets are not installed again; packages in `without` are removed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (library,) = folder.glob("lib/python*/site-packages")
    (library / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--no-compile", *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {packages}: {done.stderr.strip().splitlines()[-1:]}")
    if without:
        subprocess.run([*pip, "uninstall", "--quiet", "-y", *without], capture_output=True, check=True)
    return python


def node_with(folder: Path, *packages: str) -> Path:
    """Install npm packages for scripts in a folder, and return it. Skips the test if that is impossible."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm or node is not installed")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {packages}: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def versions(place: Path, *packages: str) -> str:
    """Return packages with their versions, in what `python_with` or `node_with` returned."""
    if place.is_dir():
        files = {name: place / "node_modules" / name / "package.json" for name in packages}
        return ", ".join(f"{name} {json.loads(file.read_text())['version']}" for name, file in files.items())
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = [name.partition("[")[0] for name in packages]
    done = subprocess.run([place, "-c", code, *names], capture_output=True, text=True, check=True)
    return ", ".join(f"{name} {version}" for name, version in zip(names, done.stdout.split(), strict=True))
