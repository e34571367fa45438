"""Provenance of a measurement: hardware, versions, commit, model, prompts, settings. No host name, no folder."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import WeightsError
from draftree.core.files import shown_name
from draftree.core.host import cpu_info, cpu_name, usable_cores
from draftree.version import __version__
from draftree.weights.cache import Cache, fingerprint, silent

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "scikit-learn")
"""The last one is optional: with it transformers learns an assistant's confidence threshold."""
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
GIT_SECONDS = 10
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
"""Variables that git sets for its hooks and their children; they may refer to another repository."""


def machine(device: torch.device) -> dict[str, Any]:
    """Return processor, cores, memory, system, and the GPU if one is used."""
    release = re.match(r"[\d.]*", platform.release())  # of a kernel; what follows the numbers may identify its builder
    numbers = release.group().rstrip(".") if release else ""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "cpu_flags": _cpu_flags(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {numbers}".strip(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def versions() -> dict[str, Any]:
    """Return the versions of Python, the relevant packages, and this package with its commit."""
    known: dict[str, Any] = {"python": platform.python_version(), "draftree": __version__}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = None
    return known | checkout(Path(__file__).parents[1])


def checkout(package: Path) -> dict[str, Any]:
    """Return the commit of the checkout that contains a package's folder, and whether the folder differs from it.

    Both are None if the package was installed, even into a folder of an unrelated checkout.
    """
    unknown = {"commit": None, "dirty": None}
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or package.resolve() != Path(top).resolve() / "src" / "draftree":
        return unknown
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    return unknown if commit is None else {"commit": commit, "dirty": None if changes is None else bool(changes)}


def model_facts(name: str, folder: Path) -> dict[str, Any]:
    """Return a model's name and fingerprint: the sha256 of the sha256s of settings, weights and tokenizer."""
    digest = hashlib.sha256()
    patterns = ("config.json", "*.safetensors", "pytorch_model*.bin", "tokenizer.json", "*.jinja", "gguf.json")
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        digest.update(f"{path.name} {_sha256(path)}\n".encode())
    return {"name": shown_name(name), "sha256": digest.hexdigest()}


def load_average() -> list[float] | None:
    """Return the load average over 1, 5 and 15 minutes; None if the system does not report it."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):
        return None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sha256(path: Path) -> str:
    try:
        return fingerprint(path, Cache(), progress=silent)
    except (OSError, WeightsError):  # without a writable cache the sum is not stored
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_flags() -> list[str]:
    flags = (cpu_info("flags") or cpu_info("Features") or "").split()
    return [flag for flag in CPU_FLAGS if flag in flags]


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
