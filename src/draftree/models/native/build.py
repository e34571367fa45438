"""Libraries of the native kernels: instruction sets, compilation, search, checks before loading, publication.

A file name ends with the checksum of the content, so one rename publishes both. Folders that other users can write are
not used. If the cache is unusable, a library is in a private folder that is removed when the process ends.
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
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from draftree.core.errors import ConfigurationError, WeightsError
from draftree.core.files import PathLock
from draftree.core.host import cpu_info, usable_cores
from draftree.weights.cache import Cache, sync

logger = logging.getLogger(__name__)

SUFFIX = ".so"
SUM_LENGTH = 32
WORK, PRIVATE = ".build-", "draftree-native-"  # prefixes of temporary folders
EXTRA_FLAGS = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
"""A link is not followed, and opening a named pipe does not wait for a writer."""


def usable(folder: Path, prefix: str) -> Path | None:
    """Return the newest intact library with this prefix that only this user or root can have written."""
    dated: list[tuple[float, Path]] = []
    for path in folder.glob(f"{prefix}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may remove it
            dated.append((path.lstat().st_mtime, path))
    for _, path in sorted(dated, reverse=True):
        reason = why_unusable(path)
        if reason is None:
            return path
        logger.warning("%s: not loaded; building a new one", reason)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def why_unusable(path: Path) -> str | None:
    """Return why a library must not be loaded; None if it may."""
    try:
        handle = os.open(path, os.O_RDONLY | EXTRA_FLAGS)
    except OSError as error:
        return f"'{path}' cannot be opened ({error.strerror})"
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return f"'{path}' is not a file"
    with open(handle, "rb") as file:
        reason = why_untrusted(status, path)
        if reason is None and _sum(file.read()) != path.stem.rpartition("-")[2]:
            reason = f"'{path}' is damaged"
        return reason


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SUM_LENGTH]


def publish(fresh: Path, folder: Path, prefix: str) -> Path:
    """Move a built file from the same file system to a folder, under its final name."""
    fresh.chmod(0o755 & ~0o022)
    sync(fresh)
    place = folder / f"{prefix}{_sum(fresh.read_bytes())}{SUFFIX}"
    os.replace(fresh, place)
    sync(folder)
    return place


def private_folder() -> Path:
    """Return a new folder, removed at the end of this process; those of killed processes of this user are removed."""
    root = Path(tempfile.gettempdir())
    for place in root.glob(f"{PRIVATE}*"):
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid()):
            with contextlib.suppress(OSError):  # in use, or on a file system without locks
                lock = PathLock(place)
                logger.info("removing '%s' of an ended process", place)
                shutil.rmtree(place, ignore_errors=True)
                lock.release()
    fresh = Path(tempfile.mkdtemp(prefix=f".{PRIVATE}", dir=root))
    with contextlib.suppress(OSError):
        _private_locks.append(PathLock(fresh))  # before the folder has the name of a leftover
    folder = fresh.rename(root / fresh.name[1:])
    owner = os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == owner:  # not in forked processes
            shutil.rmtree(folder, ignore_errors=True)

    return folder


def why_untrusted(status: os.stat_result, name: str | os.PathLike[str]) -> str | None:
    """Return why another user could have written this file or folder; None if none could."""
    if not hasattr(os, "geteuid"):
        return None  # systems without owners and modes
    if status.st_uid not in (0, os.geteuid()):
        return f"'{os.fspath(name)}' belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return None  # sticky bit: others can add files, but neither remove nor rename ours
    is_shared = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if status.st_mode & stat.S_IWOTH or is_shared:
        return f"'{os.fspath(name)}' can be written by others: chmod go-w '{os.fspath(name)}'"
    return None


def why_folder_untrusted(folder: Path) -> str | None:
    """Return the same for a folder and all folders above it; missing ones are skipped."""
    place = folder.resolve()
    for part in (place, *place.parents):
        with contextlib.suppress(FileNotFoundError):
            if (reason := why_untrusted(part.stat(), part)) is not None:
                return reason
    return None


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group, as on systems with user private groups."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and user.pw_gid == group and set(entry.gr_mem) <= {user.pw_name}


VARIABLE = "DRAFTREE_VARIANT"
"""Environment variable that selects a variant by name; the best one of this machine if unset."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set.

    The C sources choose their instructions by the macros that a compiler defines for these flags. A variant has one
    set of flags on every machine and for every compiler, so that its logits are the same bits wherever it runs.
    """

    name: str  # its name in file names and in `DRAFTREE_VARIANT`
    flags: tuple[str, ...] = ()  # flags of gcc and clang
    zig_cpu: str = "baseline"  # the same as a value of zig's `-mcpu`
    features: frozenset[str] = frozenset()  # the CPU features that it needs, as Linux names them, without underscores


def _x86(name: str, *features: str) -> Variant:
    flags = ("-march=x86-64", *(f"-m{feature}" for feature in features))
    zig_cpu = "+".join(("x86_64", *(feature.replace("-", "_") for feature in features)))
    return Variant(name, flags, zig_cpu, frozenset(feature.replace("-", "") for feature in features))


_AVX2 = ("avx2", "fma", "f16c", "bmi2", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

VARIANTS: Mapping[str, tuple[Variant, ...]] = MappingProxyType(
    {
        "x86_64": (
            _x86("amx", *_AVX512, "avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"),
            _x86("avx512-bf16", *_AVX512, "avx512vnni", "avx512bf16"),
            _x86("avx512-vnni", *_AVX512, "avx512vnni"),
            _x86("avx512", *_AVX512),
            _x86("avx2-vnni", *_AVX2, "avxvnni"),
            _x86("avx2", *_AVX2),
            _x86("sse2"),
        ),
        "aarch64": (
            Variant(
                "neon-dotprod",
                ("-march=armv8.2-a+dotprod",),
                "generic+v8_2a+dotprod",
                frozenset(("asimddp", "atomics")),
            ),
            Variant("neon", ("-march=armv8-a",), "generic"),
        ),
    }
)
"""The variants of each architecture, best first. The last one runs everywhere."""


def native_variants() -> tuple[Variant, ...]:
    """Return all variants of this machine's architecture, best first."""
    machine = platform.machine().lower()
    return VARIANTS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), (Variant("portable"),))


def runnable_variants() -> tuple[Variant, ...]:
    """Return the variants that this machine's processor runs, best first."""
    features = _cpu_features()
    return tuple(variant for variant in native_variants() if variant.features <= features)


def preferred_variants() -> tuple[Variant, ...]:
    """Return the variants to try on this machine, in this order; one alone if `DRAFTREE_VARIANT` names it."""
    variants = runnable_variants()
    if name := os.environ.get(VARIABLE):
        chosen = tuple(variant for variant in variants if variant.name == name)
        if not chosen:
            names = ", ".join(variant.name for variant in variants)
            raise ConfigurationError(f"{VARIABLE} is {name!r}, but this machine runs {names}: name one or unset it")
        return chosen
    if cpu_info("vendor_id") == "GenuineIntel":
        # Intel's products of bfloat16 pairs without tiles take four times as long as products of float32 numbers,
        # which have half as many terms.
        return tuple(variant for variant in variants if variant.name != "avx512-bf16")
    return variants


def _cpu_features() -> frozenset[str]:
    if sys.platform.startswith("linux"):
        words = (cpu_info("flags") or cpu_info("Features") or "").split()
        return frozenset(word.replace("_", "") for word in words)
    import torch

    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset(("asimddp", "atomics"))  # Apple's processors all have them
    return frozenset(_AVX2 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else ())


SOURCES = tuple(sorted(Path(__file__).parent.glob("csrc/*.c")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("csrc/*.h")))
PACKAGED = Path(__file__).with_name("lib")  # folder of the libraries in a wheel; missing elsewhere
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-w")
"""Flags of all variants. Contraction is off: fused products in only one copy of a loop would break exactness."""
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


_private: dict[str, Path] = {}  # libraries that this process compiled in private folders, by variant
_private_locks: list[PathLock] = []


def built_library(variant: Variant | None = None, *, in_cache: bool = True) -> Path:
    """Return the library of a variant; compile it if there is none.

    `variant`: the variant; None for the best one of this machine. `in_cache`: whether existing libraries may be
    used; if not, or if the user's cache is unusable, the library is compiled in a private folder that is removed
    when the process ends.
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
        except WeightsError as error:
            reason = str(error)
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
    """
    folder = Cache().root / "native"
    reason = _why_not_there(folder)
    if reason is None:
        try:
            return _compiled_once(runnable_variants(), folder)
        except (OSError, WeightsError) as error:
            reason = f"'{folder}' cannot be written ({first_reason(error)})"
    raise NativeUnavailableError(f"the native kernels could not be compiled: {reason}")


def prefix_of(variant: Variant) -> str:
    """Return the file name of a variant's library before its checksum: a hash of everything except the compiler."""
    text = b"".join(file.read_bytes() for file in (*SOURCES, *HEADERS))
    facts = (*FLAGS, *variant.flags, platform.system(), platform.machine())
    return f"{variant.name}-{hashlib.sha256(chr(0).join(facts).encode() + text).hexdigest()[:20]}-"


def find_compiler() -> tuple[str, ...]:
    """Return the C compiler's command: `CC`, the first of cc, gcc and clang, or zig's if `ziglang` is installed."""
    if sys.platform == "win32":
        raise NoCompilerError("native kernels need Linux or macOS; PyTorch runs the passes here")
    named = os.environ.get("CC", "")
    if named:
        try:
            words = [named] if shutil.which(named) else shlex.split(named)  # a path may contain spaces
        except ValueError as error:
            raise NoCompilerError(f"CC is {named!r}, which is not a command ({error}): correct or unset it") from error
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
        raise NoCompilerError(f"the C compiler '{named}' of CC was not found: correct CC or unset it")
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise NoCompilerError(f"no C compiler was found: {HOW_TO_GET_KERNELS}")


def first_reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _why_not_there(folder: Path) -> str | None:
    try:
        return why_folder_untrusted(folder)
    except OSError as error:
        return f"'{folder}' cannot be used ({first_reason(error)})"


def _compiled_once(variants: Sequence[Variant], folder: Path) -> dict[Variant, Path]:
    """Return the libraries of a folder, where one process at a time compiles those that are missing."""
    find_compiler()
    with Cache().locked("native-kernels"):
        for part in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
            part.mkdir(mode=0o755, exist_ok=True)  # whatever the umask
        for leftover in folder.glob(f"{WORK}*"):  # of killed processes
            shutil.rmtree(leftover, ignore_errors=True)
        present = {variant: path for variant in variants if (path := usable(folder, prefix_of(variant))) is not None}
        missing = [variant for variant in variants if variant not in present]
        return present | compile_variants(missing, folder) if missing else present


def compile_variants(variants: Sequence[Variant], folder: Path) -> dict[Variant, Path]:
    """Compile libraries into a folder, on all cores; variants that cannot be compiled are left out, with a warning."""
    compiler = find_compiler()
    names = ", ".join(variant.name for variant in variants)
    logger.info("compiling native kernels (%s) with %s", names, shlex.join(compiler))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=WORK, dir=folder, ignore_cleanup_errors=True) as name:
        work = Path(name)
        sources = sorted(SOURCES, key=lambda source: -source.stat().st_size)
        objects = {
            (variant, source): work / f"{variant.name}-{source.stem}.o" for source in sources for variant in variants
        }
        errors: dict[Variant, NativeUnavailableError] = {}

        def command(variant: Variant, *arguments: str | Path) -> list[str]:
            return [*compiler, *FLAGS, *_cpu_flags(variant, compiler), *map(str, arguments)]

        commands = [command(variant, "-c", "-o", to, source) for (variant, source), to in objects.items()]
        for (variant, _), error in zip(objects, _run_all(commands, work), strict=True):
            if error is not None:
                errors.setdefault(variant, error)
        outputs = {variant: work / f"{variant.name}.so" for variant in variants if variant not in errors}
        commands = [
            command(variant, "-shared", "-o", output, *(objects[variant, source] for source in sources), "-lm")
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


_compilers = set[subprocess.Popen[str]]()
_compilers_lock = threading.Lock()
"""Held while a compiler starts, so that none starts unseen while the others are being ended."""
_exiting = threading.Event()


@atexit.register
def _end_compilers() -> None:
    """End the compilers of all threads: nothing interrupts a daemon, and it must not start others in their place."""
    with _compilers_lock:
        _exiting.set()
        for process in list(_compilers):  # their threads discard them
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _run_all(commands: Sequence[Sequence[str]], work: Path) -> list[NativeUnavailableError | None]:
    """Run compilers, as many at once as there are cores; return the error of each, None for success.

    There is no time limit, since other work may keep the cores busy. All compilers end with this call.

    Raises:
        SystemExit: the process ends.
    """
    environment = os.environ | {"TMPDIR": os.fspath(work), "LC_ALL": "C", "ZIG_GLOBAL_CACHE_DIR": f"{work}/zig"}
    started = set[subprocess.Popen[str]]()
    is_interrupted = False

    def run(command: Sequence[str]) -> NativeUnavailableError | None:
        with _compilers_lock:
            if is_interrupted or _exiting.is_set():
                raise SystemExit
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
            _compilers.add(process)
            started.add(process)
        output, _ = process.communicate()
        _compilers.discard(process)
        if _exiting.is_set():
            raise SystemExit
        if not process.returncode:
            return None
        if reason := next((reason for reason in NO_ROOM if reason in output), None):
            return _FolderError(reason)
        first = next((line for line in output.splitlines() if "error" in line), output[:200]).strip()
        why = first or f"it ended with status {process.returncode}"
        return NativeUnavailableError(f"'{command[0]}' could not compile the native kernels: {why}")

    # threads, since an interrupt may arrive while a process starts, and is delivered to the main thread alone
    with ThreadPoolExecutor(usable_cores() or 1) as pool:
        try:
            return list(pool.map(run, commands))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with _compilers_lock:
                is_interrupted = True
                for process in started & _compilers:
                    _kill(process)
            raise


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
