"""Build of the C library for this processor, stored in the user's cache.

It is built at first use, not at installation, so no compiler is needed to install. Without a compiler, passes run
through torch. An existing library needs no compiler.
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
from draftree.core.processor import cpu_info
from draftree.models.native.library_files import private_folder, publish, usable, working_folder
from draftree.models.native.trust import why_folder_untrusted
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("csrc/*.c")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("csrc/*.h")))
COMPILERS = ("cc", "gcc", "clang")
OPTIMIZATION = "-O3"
SLOW_PAIRS = "-DSLOW_PAIRS"
"""Flag of processors whose products of pairs in bfloat16 are slower than those of float32; see structures.h."""
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread", "-w")
"""Flags of all builds. Contraction is off: fused products in only one copy of a loop would break exactness."""
BUILD_SECONDS = 300
NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
"""Compiler messages about a folder that cannot be written."""
PROCESSOR_VARIABLE = "DRAFTREE_MARCH"
"""Environment variable with the value of `-march` or, on Arm, `-mcpu`; `native` if unset."""


class NativeUnavailableError(ConfigurationError):
    """The native kernels are unavailable or do not support this model; the message has the reason."""


class NativeMismatchError(NativeUnavailableError):
    """The native model computes other logits than the original, whose weights were released."""


class NoCompilerError(NativeUnavailableError):
    """No C compiler was found, or the one in `CC` does not exist."""


class _FolderError(NativeUnavailableError):
    """The compiler cannot write to the output folder."""


@dataclass(frozen=True, slots=True)
class Build:
    """Inputs of a build.

    Attributes:
        sources: C files.
        flags: all compiler arguments except files.
        command: words of `CC`; empty if unset.
    """

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """Prefix of the library's name: a hash of everything except the compiler. Machines may share a cache."""
        text = b"".join(file.read_bytes() for file in (*self.sources, *HEADERS))
        options = [word for word in self.command if word.startswith("-")]
        facts = (*options, "", *self.flags, platform.system(), platform.machine(), _processor())
        return f"{self.sources[0].stem}-{hashlib.sha256(chr(0).join(facts).encode() + text).hexdigest()[:20]}-"


_private: dict[tuple[str, tuple[str, ...]], Path] = {}
"""Libraries that this process built in private folders, by name prefix and the words of `CC`."""


def built_library(sources: Sequence[Path] = SOURCES, *, extra_flags: Sequence[str] = (), in_cache: bool = True) -> Path:
    """Return the shared library for this processor; build it if there is no usable one.

    Args:
        sources: C files.
        extra_flags: compiler arguments after the others.
        in_cache: whether the user's cache may be used; if not, or if it is unusable, the library is built in a private
            folder that is removed when the process ends.

    Raises:
        NativeUnavailableError: there is no compiler, or it fails.
    """
    command = _asked_compiler()
    build = Build(tuple(sources), (*_flags(command), *extra_flags), command)
    name = build.name
    if (own := _private.get((name, command))) is not None and own.exists():
        return own
    folder = Cache().root / "native"
    reason = _why_not_there(folder) if in_cache else f"the file in '{folder}' does not load"
    try:
        compiler = find_compiler()
        prefix = f"{name}{_fingerprint(compiler)}"
        found = usable(folder, prefix) if reason is None else None
        return found or _built_somewhere(build, compiler, folder, prefix=prefix, reason=reason)
    except NativeUnavailableError as error:  # a library of another compiler is as good
        found = usable(folder, name) if reason is None else None
        if found is None:
            raise
        logger.info("%s: using '%s', which was built before", error, found)
        return found


def _built_somewhere(build: Build, compiler: Sequence[str], folder: Path, *, prefix: str, reason: str | None) -> Path:
    """Build in the cache or, with a `reason` against it or if it cannot be written, in a private folder."""
    if reason is None:
        try:
            return _built(build, compiler, folder, prefix=prefix)
        except (OSError, _FolderError) as error:
            reason = f"'{folder}' cannot be written ({first_reason(error)})"
    logger.warning("the C library is built for this process only, which takes some seconds each time: %s", reason)
    try:
        place = private_folder()
        if (danger := why_folder_untrusted(place)) is not None:
            raise NativeUnavailableError(f"the C library could not be built: {reason}; {danger}")
        found = _built(build, compiler, place, prefix=prefix)
    except OSError as error:
        raise NativeUnavailableError(f"the C library could not be built: {reason}; {first_reason(error)}") from error
    _private[build.name, build.command] = found
    return found


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: `CC`, or the first compiler found.

    Raises:
        NoCompilerError: no compiler was found.
    """
    asked = _asked_compiler()
    for words in (asked,) if asked else tuple((name,) for name in COMPILERS):
        if found := shutil.which(words[0]):
            return (found, *words[1:])
    if asked:
        raise NoCompilerError(f"the C compiler '{asked[0]}' of CC was not found: correct CC or unset it")
    raise NoCompilerError("no C compiler found: install gcc or clang")


def first_reason(error: Exception) -> str:
    """Return the first line of an error message."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _asked_compiler() -> tuple[str, ...]:
    asked = os.environ.get("CC", "")
    if asked and shutil.which(asked):
        return (asked,)  # a path may contain spaces
    try:
        return tuple(shlex.split(asked))
    except ValueError as error:
        raise NoCompilerError(f"CC is {asked!r}, which is not a command ({error}): correct it or unset it") from error


def _flags(command: Sequence[str]) -> list[str]:
    """Return the flags of all builds, except those that `CC` sets itself."""
    flags = list(FLAGS)
    if not any(word.startswith("-O") for word in command):
        flags.insert(0, OPTIMIZATION)
    if not any(word.startswith(("-march=", "-mcpu=")) for word in command):
        flags.append(_for_this_processor())
    if cpu_info("vendor_id") == "GenuineIntel":
        flags.append(SLOW_PAIRS)
    return flags


def _for_this_processor() -> str:
    option = "-march" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu"
    return f"{option}={os.environ.get(PROCESSOR_VARIABLE) or 'native'}"


def _fingerprint(compiler: Sequence[str]) -> str:
    """Return a hash that identifies a compiler and its version, without running it."""
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
    """Compile to a folder.

    Raises:
        NativeUnavailableError: the compiler fails.
        OSError, _FolderError: the folder cannot be written.
    """
    with working_folder(folder) as work:
        fresh = work / "library.so"
        _run([*compiler, *build.flags, "-o", os.fspath(fresh), *map(os.fspath, build.sources), "-lm"], work)
        if not fresh.is_file() or not fresh.stat().st_size:
            raise NativeUnavailableError(f"'{shlex.join(compiler)}' succeeded but wrote no library: correct CC")
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
        raise NativeUnavailableError(f"'{command[0]}' could not build the C library: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"'{command[0]}' took more than {BUILD_SECONDS} s for the C library") from error
    except OSError as error:
        raise NativeUnavailableError(f"'{command[0]}' cannot be run ({error.strerror}): correct CC") from error
