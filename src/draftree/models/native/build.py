"""Builds the C pass once for this processor and keeps it in the user's cache.

Nothing is built when draftree is installed, so that it installs where there is no compiler; without one, passes run
through torch. A library that was built before needs no compiler.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.models.native.library_files import private_folder, publish, usable, working_folder
from draftree.models.native.trust import why_folder_untrusted
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("csrc/*.c")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("csrc/*.h")))
COMPILERS = ("cc", "gcc", "clang")
OPTIMIZATION = "-O3"
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread", "-w")
"""Contraction is off: a product may be fused in one copy of a loop and not in another, which would break exactness."""
BUILD_SECONDS = 300
NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
"""What a compiler says of a folder that it cannot write to: another folder may do."""
PROCESSOR_VARIABLE = "DRAFTREE_MARCH"
"""Names the processor to build for, as the compiler's `-march` or, on Arm, `-mcpu` does; `native` where it is unset."""


class NativeUnavailableError(ConfigurationError):
    """The C pass is not available here, or cannot run this model; the message says why."""


class NativeMismatchError(NativeUnavailableError):
    """What was built from a model computes something else than the model. Its weights are gone."""


class NoCompilerError(NativeUnavailableError):
    """There is no C compiler, or not the one that `CC` names."""


class _FolderError(NativeUnavailableError):
    """The compiler cannot write where it was told to."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is to be built.

    Attributes:
        sources: files of C.
        flags: all that the compiler is given besides files.
        command: words of `CC`; empty where it is not set.
    """

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Beginning of the library's name: what it depends on besides the compiler. A cache may serve many machines."""
        text = b"".join(file.read_bytes() for file in (*self.sources, *HEADERS))
        options = [word for word in self.command if word.startswith("-")]
        facts = (*options, "", *self.flags, platform.system(), platform.machine(), _processor())
        return f"{self.sources[0].stem}-{hashlib.sha256(chr(0).join(facts).encode() + text).hexdigest()[:20]}-"


_private: dict[tuple[str, tuple[str, ...]], Path] = {}
"""Libraries that this process built for itself, by the beginning of their names and the words of `CC`."""


def built_library(sources: Sequence[Path] = SOURCES, *, extra_flags: Sequence[str] = (), in_cache: bool = True) -> Path:
    """The shared library for this processor, built if there is none that can be used.

    Args:
        sources: files of C.
        extra_flags: given to the compiler after the others.
        in_cache: whether the user's cache may be used; else, and where it cannot be, the library lies in a private
            folder that is removed when the process ends.

    Raises:
        NativeUnavailableError: no compiler, or it fails.
    """
    command = _asked_compiler()
    build = Build(tuple(sources), (*_flags(command), *extra_flags), command)
    name = build.name
    if (own := _private.get((name, command))) is not None and own.exists():
        return own
    folder = Cache().root / "native"
    reason = _why_not_there(folder) if in_cache else f"what lies in '{folder}' does not load"
    try:
        compiler = find_compiler()
        prefix = f"{name}{_fingerprint(compiler)}"
        found = usable(folder, prefix) if reason is None else None
        return found or _built_somewhere(build, compiler, folder, prefix=prefix, reason=reason)
    except NativeUnavailableError as error:  # what another compiler built here is as good
        found = usable(folder, name) if reason is None else None
        if found is None:
            raise
        logger.info("%s: '%s' is used, which was built before", error, found)
        return found


def _built_somewhere(build: Build, compiler: Sequence[str], folder: Path, *, prefix: str, reason: str | None) -> Path:
    """Build into the cache; or, where `reason` or the system is against it, for this process alone."""
    if reason is None:
        try:
            return _built(build, compiler, folder, prefix=prefix)
        except (OSError, _FolderError) as error:
            reason = f"'{folder}' cannot be written ({first_reason(error)})"
    logger.warning("the C pass is built for this process alone, which takes some seconds each time: %s", reason)
    try:
        place = private_folder()
        if (danger := why_folder_untrusted(place)) is not None:
            raise NativeUnavailableError(f"the C pass could not be built: {reason}; {danger}")
        found = _built(build, compiler, place, prefix=prefix)
    except OSError as error:
        raise NativeUnavailableError(f"the C pass could not be built: {reason}; {first_reason(error)}") from error
    _private[build.name, build.command] = found
    return found


def find_compiler() -> tuple[str, ...]:
    """Command of the C compiler that is used: what `CC` says, or the first that is found.

    Raises:
        NoCompilerError: none is here.
    """
    asked = _asked_compiler()
    for words in (asked,) if asked else tuple((name,) for name in COMPILERS):
        if found := shutil.which(words[0]):
            return (found, *words[1:])
    if asked:
        raise NoCompilerError(f"the C compiler '{asked[0]}' of CC was not found: correct CC or unset it")
    raise NoCompilerError("no C compiler found: install gcc or clang")


def first_reason(error: Exception) -> str:
    """Why, in few words."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _asked_compiler() -> tuple[str, ...]:
    asked = os.environ.get("CC", "")
    if asked and shutil.which(asked):
        return (asked,)  # a path may have spaces
    try:
        return tuple(shlex.split(asked))
    except ValueError as error:
        raise NoCompilerError(f"CC is {asked!r}, which is no command ({error}): correct it or unset it") from error


def _flags(command: Sequence[str]) -> list[str]:
    """Flags of all builds, but those that the words of `CC` choose themselves."""
    flags = list(FLAGS)
    if not any(word.startswith("-O") for word in command):
        flags.insert(0, OPTIMIZATION)
    if not any(word.startswith(("-march=", "-mcpu=")) for word in command):
        flags.append(_for_this_processor())
    return flags


def _for_this_processor() -> str:
    option = "-march" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu"
    return f"{option}={os.environ.get(PROCESSOR_VARIABLE) or 'native'}"


def _fingerprint(compiler: Sequence[str]) -> str:
    """Tells compilers apart, and one from its next version, without running them."""
    facts = list(compiler)
    for word in compiler:
        if path := shutil.which(word):
            status = os.stat(path)
            facts += [os.path.realpath(path), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:8] + "-"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _why_not_there(folder: Path) -> str | None:
    try:
        return why_folder_untrusted(folder)
    except OSError as error:
        return f"'{folder}' cannot be used ({first_reason(error)})"


def _built(build: Build, compiler: Sequence[str], folder: Path, *, prefix: str) -> Path:
    """Compile into a folder.

    Raises:
        NativeUnavailableError: the compiler fails.
        OSError, _FolderError: the folder cannot be written.
    """
    with working_folder(folder) as work:
        fresh = work / "library.so"
        _run([*compiler, *build.flags, "-o", os.fspath(fresh), *map(os.fspath, build.sources), "-lm"], work)
        if not fresh.is_file() or not fresh.stat().st_size:
            raise NativeUnavailableError(f"'{shlex.join(compiler)}' ended well and wrote no library: correct CC")
        library = publish(fresh, folder, prefix)
    logger.info("built the C pass with %s: %s", shlex.join(compiler), library)
    return library


def _run(command: Sequence[str], work: Path) -> None:
    said = {"TMPDIR": os.fspath(work), "LC_ALL": "C"}
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | said,
        )
    except subprocess.CalledProcessError as error:
        if any(reason in error.stderr for reason in NO_ROOM):
            raise _FolderError(next(reason for reason in NO_ROOM if reason in error.stderr)) from error
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[:200]).strip()
        why = first or f"it ended with status {error.returncode}"
        raise NativeUnavailableError(f"'{command[0]}' could not build the C pass: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"'{command[0]}' took more than {BUILD_SECONDS} s for the C pass") from error
    except OSError as error:
        raise NativeUnavailableError(f"'{command[0]}' cannot be run ({error.strerror}): correct CC") from error
