"""Builds the C pass once for this processor and keeps it in the user's cache.

Nothing is built when draftree is installed, so that it installs where there is no compiler; without one, passes run
through torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.models.weights.cache import Cache

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.c")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread", "-w")
"""Contraction is off: a product may be fused in one copy of a loop and not in another, which would break exactness."""
BUILD_SECONDS = 300
PROCESSOR_VARIABLE = "DRAFTREE_MARCH"
"""Names the processor to build for, as the compiler's `-march` or, on Arm, `-mcpu` does; `native` where it is unset."""


class NativeUnavailableError(ConfigurationError):
    """The C pass can not be had here, or can not run this model; the message says why."""


class NativeMismatchError(NativeUnavailableError):
    """What was built from a model computes something else than the model. Its weights are gone."""


def built_library(sources: Sequence[Path] = SOURCES, *, extra_flags: Sequence[str] = ()) -> Path:
    """The shared library for this processor, built if it is not in the cache yet.

    Args:
        sources: files of C.
        extra_flags: given to the compiler behind the others.

    Raises:
        NativeUnavailableError: no compiler, or it fails.
    """
    compiler = find_compiler()
    flags = [*FLAGS, _for_this_processor(), *extra_flags]
    text = b"".join(file.read_bytes() for file in (*sources, *HEADERS))
    key = hashlib.sha256("\0".join([*_identity(compiler), *flags]).encode() + text).hexdigest()[:20]
    folder = Cache().root / "native"
    library = folder / f"{sources[0].stem}-{key}.so"
    if not library.exists():
        _build(compiler, flags, sources, library)
    return library


def find_compiler() -> str:
    """Path of the C compiler that is used: the one that `CC` names, or the first that is found.

    Raises:
        NativeUnavailableError: none is here.
    """
    named = os.environ.get("CC")
    candidates = (named,) if named else COMPILERS
    found = next((path for name in candidates if (path := shutil.which(name))), None)
    if found is None:
        raise NativeUnavailableError(f"no C compiler was found ({', '.join(candidates)}): install one, such as gcc")
    return found


def _for_this_processor() -> str:
    option = "-march" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu"
    return f"{option}={os.environ.get(PROCESSOR_VARIABLE) or 'native'}"


def _identity(compiler: str) -> list[str]:
    """What the library depends on besides its source: a cache may be shared by unlike machines."""
    version = _run([compiler, "--version"]).splitlines()[0]
    return [compiler, version, platform.system(), platform.machine(), _processor()]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _build(compiler: str, flags: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            fresh = Path(work) / library.name
            _run([compiler, *flags, "-o", os.fspath(fresh), *map(os.fspath, sources), "-lm"])
            fresh.rename(library)  # processes that build at once each put a whole file there
    except OSError as error:
        raise NativeUnavailableError(f"the C pass could not be built in '{library.parent}': {error}") from error
    logger.info("built the C pass with %s: %s", compiler, library)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200])
        raise NativeUnavailableError(f"'{command[0]}' could not build the C pass: {first.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"'{command[0]}' took more than {BUILD_SECONDS} s for the C pass") from error
    return done.stdout
