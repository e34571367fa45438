"""Libraries of the native kernels: where they are found, and how they are compiled.

A library in the wheel comes first, then one in the user's cache. Otherwise the C sources are compiled into the cache
with `CC`, cc, gcc, clang or the zig compiler of the package `ziglang`. Without a compiler, passes run through torch.

`python -m draftree.models.native.build --all` compiles every variant that this machine runs; `--to FOLDER` compiles
every variant of this architecture into a folder, for a wheel.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.core.host import usable_cores
from draftree.models.native.library_files import (
    make_folder,
    private_folder,
    publish,
    usable,
    why_folder_untrusted,
    working_folder,
)
from draftree.models.native.variants import Variant, native_variants, preferred_variants, runnable_variants
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("csrc/*.c")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("csrc/*.h")))
PACKAGED = Path(__file__).with_name("lib")
"""Folder of the libraries in a wheel; missing elsewhere."""
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-w")
"""Flags of all variants. Contraction is off: fused products in only one copy of a loop would break exactness."""
LOCK = ".lock"
NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
"""Compiler messages about a folder that cannot be written."""
HOW_TO_GET_KERNELS = (
    "PyTorch runs the passes at about a quarter of the speed; for native kernels, install gcc or clang, or run "
    "pip install 'draftree[compiler]'"
)


class NativeUnavailableError(ConfigurationError):
    """The native kernels are unavailable or do not support this model; the message has the reason."""


class NativeMismatchError(NativeUnavailableError):
    """The native model computes other logits than the original, whose weights were released."""


class NoCompilerError(NativeUnavailableError):
    """No C compiler was found, or the one in `CC` does not exist."""


class _FolderError(NativeUnavailableError):
    """The compiler cannot write to the output folder."""


_private: dict[str, Path] = {}
"""Libraries that this process compiled in private folders, by variant."""


def built_library(variant: Variant | None = None, *, in_cache: bool = True) -> Path:
    """Return the library of a variant; compile it if there is none.

    Args:
        variant: the variant; None for the best one of this machine.
        in_cache: whether existing libraries may be used; if not, or if the user's cache is unusable, the library is
            compiled in a private folder that is removed when the process ends.

    Raises:
        NativeUnavailableError: there is no compiler, or it fails.
    """
    variant = variant or preferred_variants()[0]
    prefix = prefix_of(variant)
    if in_cache and (path := next(PACKAGED.glob(f"{prefix}*"), None)) is not None:
        return path
    if (path := _private.get(prefix)) is not None and path.exists():
        return path
    folder = Cache().root / "native"
    reason = _why_not_there(folder) if in_cache else f"the file in '{folder}' does not load"
    if reason is None:
        if (path := usable(folder, prefix)) is not None:
            return path
        try:
            return _compiled_once([variant], folder)[variant]
        except (OSError, _FolderError) as error:
            reason = f"'{folder}' cannot be written ({first_reason(error)})"
    find_compiler()  # a missing one is the better reason
    logger.warning("the native kernels are compiled for this process only, which takes a while each time: %s", reason)
    try:
        place = private_folder()
        if (danger := why_folder_untrusted(place)) is not None:
            raise NativeUnavailableError(f"the native kernels could not be compiled: {reason}; {danger}")
        _private[prefix] = path = compile_variants([variant], place)[variant]
    except OSError as error:
        raise NativeUnavailableError(
            f"the native kernels could not be compiled: {reason}; {first_reason(error)}"
        ) from error
    return path


def build_all() -> dict[Variant, Path]:
    """Return the libraries of the variants that this machine runs; compile those that are missing, all at once.

    Variants that the compiler does not know are left out, with a warning.

    Raises:
        NativeUnavailableError: there is no compiler, or the cache is unusable.
    """
    folder = Cache().root / "native"
    if (reason := _why_not_there(folder)) is not None:
        raise NativeUnavailableError(f"the native kernels could not be compiled: {reason}")
    try:
        return _compiled_once(runnable_variants(), folder)
    except OSError as error:
        raise NativeUnavailableError(
            f"the native kernels could not be compiled: '{folder}' cannot be written ({first_reason(error)})"
        ) from error


def prefix_of(variant: Variant) -> str:
    """Return the file name of a variant's library before its checksum: a hash of everything except the compiler."""
    text = b"".join(file.read_bytes() for file in (*SOURCES, *HEADERS))
    facts = (*FLAGS, *variant.flags, platform.system(), platform.machine())
    return f"{variant.name}-{hashlib.sha256(chr(0).join(facts).encode() + text).hexdigest()[:20]}-"


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: `CC`, the first of cc, gcc and clang, or zig's if `ziglang` is installed.

    Raises:
        NoCompilerError: no compiler was found.
    """
    if sys.platform == "win32":
        raise NoCompilerError("native kernels need Linux or macOS; PyTorch runs the passes here")
    asked = os.environ.get("CC", "")
    if asked:
        try:
            words = [asked] if shutil.which(asked) else shlex.split(asked)  # a path may contain spaces
        except ValueError as error:
            raise NoCompilerError(f"CC is {asked!r}, which is not a command ({error}): correct or unset it") from error
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
        raise NoCompilerError(f"the C compiler '{asked}' of CC was not found: correct CC or unset it")
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise NoCompilerError(f"no C compiler was found: {HOW_TO_GET_KERNELS}")


def first_reason(error: Exception) -> str:
    """Return the first line of an error message."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _why_not_there(folder: Path) -> str | None:
    try:
        return why_folder_untrusted(folder)
    except OSError as error:
        return f"'{folder}' cannot be used ({first_reason(error)})"


def _compiled_once(variants: Sequence[Variant], folder: Path) -> dict[Variant, Path]:
    """Return the libraries of a folder, where one process at a time compiles those that are missing."""
    find_compiler()
    with _locked(folder):
        present = {variant: path for variant in variants if (path := usable(folder, prefix_of(variant))) is not None}
        missing = [variant for variant in variants if variant not in present]
        return present | compile_variants(missing, folder) if missing else present


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout  # later starts compile nothing

    make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.info("another process compiles native kernels: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def compile_variants(variants: Sequence[Variant], folder: Path) -> dict[Variant, Path]:
    """Compile libraries into a folder, on all cores; variants that cannot be compiled are left out, with a warning.

    Raises:
        NativeUnavailableError: there is no compiler, or no variant could be compiled.
        OSError, _FolderError: the folder cannot be written.
    """
    compiler = find_compiler()
    names = ", ".join(variant.name for variant in variants)
    logger.info("compiling native kernels (%s) with %s", names, shlex.join(compiler))
    with working_folder(folder) as work:
        sources = sorted(SOURCES, key=lambda source: -source.stat().st_size)
        steps = [
            (variant, source, work / f"{variant.name}-{source.stem}.o") for source in sources for variant in variants
        ]
        errors: dict[Variant, NativeUnavailableError] = {}
        commands = [
            [*compiler, *FLAGS, *_cpu_flags(variant, compiler), "-c", "-o", os.fspath(to), os.fspath(source)]
            for variant, source, to in steps
        ]
        for (variant, _, _), error in zip(steps, _run_all(commands, work), strict=True):
            if error is not None:
                errors.setdefault(variant, error)
        whole = [variant for variant in variants if variant not in errors]
        outputs = {variant: work / f"{variant.name}.so" for variant in whole}
        commands = [
            [*compiler, *FLAGS, *_cpu_flags(variant, compiler), "-shared", "-o", os.fspath(output)]
            + [os.fspath(to) for other, _, to in steps if other is variant]
            + ["-lm"]
            for variant, output in outputs.items()
        ]
        for (variant, output), error in zip(outputs.items(), _run_all(commands, work), strict=True):
            if error is not None:
                errors[variant] = error
            elif not output.is_file() or not output.stat().st_size:
                reason = f"'{shlex.join(compiler)}' succeeded but wrote no library: correct CC"
                errors[variant] = NativeUnavailableError(reason)
        if len(errors) == len(variants):
            raise errors[variants[0]]
        for variant, error in errors.items():
            logger.warning("the native kernels have no variant '%s': %s", variant.name, error)
        return {
            variant: publish(output, folder, prefix_of(variant))
            for variant, output in outputs.items()
            if variant not in errors
        }


def _cpu_flags(variant: Variant, compiler: Sequence[str]) -> tuple[str, ...]:
    is_zig = any(Path(word).stem in ("zig", "ziglang") for word in compiler)
    return (f"-mcpu={variant.zig_cpu}",) if is_zig else variant.flags


def _run_all(commands: Sequence[Sequence[str]], work: Path) -> list[NativeUnavailableError | None]:
    """Run compilers, as many at once as there are cores; return the error of each, None for success.

    There is no time limit, since other work may keep the cores busy. All compilers end with this call.
    """
    environment = os.environ | {"TMPDIR": os.fspath(work), "LC_ALL": "C", "ZIG_GLOBAL_CACHE_DIR": f"{work}/zig"}
    lock, running, has_ended = threading.Lock(), set[subprocess.Popen[str]](), False

    def run(command: Sequence[str]) -> NativeUnavailableError | None:
        with lock:  # no process starts unseen while the others are being ended
            if has_ended:
                return None
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                return NativeUnavailableError(f"'{command[0]}' cannot be run ({error.strerror}): correct CC")
            running.add(process)
        output, _ = process.communicate()
        running.discard(process)
        return _compiler_error(command[0], process.returncode, output) if process.returncode else None

    def end() -> None:
        nonlocal has_ended
        with lock:
            has_ended = True
            for process in list(running):  # their threads discard them
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    # threads, since an interrupt may arrive while a process starts, and is delivered to the main thread alone
    with ThreadPoolExecutor(usable_cores() or 1) as pool:
        atexit.register(end)  # this thread may be a daemon, which nothing interrupts
        try:
            return list(pool.map(run, commands))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end()
            raise
        finally:
            atexit.unregister(end)


def _compiler_error(compiler: str, status: int, said: str) -> NativeUnavailableError:
    if reason := next((reason for reason in NO_ROOM if reason in said), None):
        return _FolderError(reason)
    first = next((line for line in said.splitlines() if "error" in line), said[:200]).strip()
    why = first or f"it ended with status {status}"
    return NativeUnavailableError(f"'{compiler}' could not compile the native kernels: {why}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile kernels ahead of their use, and write the paths of the libraries."""
    parser = argparse.ArgumentParser(prog="python -m draftree.models.native.build", description=main.__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--all", action="store_true", help="all variants that this machine runs")
    choice.add_argument("--to", type=Path, metavar="FOLDER", help="all variants of this architecture, into a folder")
    options = parser.parse_args(arguments)
    try:
        if options.to is not None:
            paths = list(compile_variants(native_variants(), options.to.resolve()).values())
            if len(paths) < len(native_variants()):
                sys.exit("error: the compiler does not know all variants: take a newer one")
        else:
            paths = list(build_all().values()) if options.all else [built_library()]
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
    sys.stdout.writelines(f"{path}\n" for path in paths)


if __name__ == "__main__":
    main()
