"""Packages of others in an environment that adds them to those of the tests. Not a test itself."""

from __future__ import annotations

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
