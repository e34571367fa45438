"""A registry on this machine that serves archives to pip and npm as the public ones do."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import shutil
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from draftree.weights.cache import Cache
from draftree.weights.catalogue import CatalogueEntry, Package

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def archives(entry: CatalogueEntry, source: bytes) -> dict[str, bytes]:
    """The published archive of each package of the entry, by package name."""
    step = -(-len(source) // len(entry.packages))
    slices = [source[start : start + step] for start in range(0, len(source), step)]
    build = {"pypi": wheel, "npm": tarball}
    return {
        package.name: build[package.registry](package, content)
        for package, content in zip(entry.packages, slices, strict=True)
    }


def wheel(package: Package, content: bytes) -> bytes:
    stem = package.name.replace("-", "_")
    info = f"{stem}-{package.version}.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(package.member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def tarball(package: Package, content: bytes) -> bytes:
    buffer = io.BytesIO()
    manifest = json.dumps({"name": package.name, "version": package.version}).encode()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, raw in (("package/package.json", manifest), (package.member, content)):
            info = tarfile.TarInfo(path)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


class Registry(http.server.ThreadingHTTPServer):
    """Serves archives as both a Python index and an npm registry."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], *, drip_seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), RegistryHandler)
        self.files = files
        self.drip_seconds = drip_seconds
        self.num_archives_sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class RegistryHandler(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        parts = [part for part in self.path.split("/") if part]
        files = self.server.files
        if parts[:1] == ["simple"] and parts[1] in files:
            stem = parts[1].replace("-", "_")
            self.reply(f'<a href="/file/{parts[1]}/{stem}-1.0.0-py3-none-any.whl">x</a>'.encode(), "text/html")
        elif parts[:1] == ["file"] and parts[1] in files:
            self.server.num_archives_sent += 1
            self.reply(files[parts[1]], "application/octet-stream", drip=True)
        elif parts and parts[0] in files:
            self.reply(json.dumps(self.document(parts[0])).encode(), "application/json")
        else:
            self.send_error(404)

    def document(self, name: str) -> dict[str, Any]:
        digest = base64.b64encode(hashlib.sha512(self.server.files[name]).digest()).decode()
        dist = {"tarball": f"{self.server.address}/file/{name}/{name}-1.0.0.tgz", "integrity": f"sha512-{digest}"}
        version = {"name": name, "version": "1.0.0", "dist": dist}
        return {"name": name, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}

    def reply(self, content: bytes, kind: str, *, drip: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        slow = drip and self.server.drip_seconds
        step = 256 if slow else len(content)
        for start in range(0, len(content), step):
            self.wfile.write(content[start : start + step])
            if slow:
                self.wfile.flush()
                time.sleep(self.server.drip_seconds)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def serving(files: dict[str, bytes], *, drip_seconds: float = 0.0) -> Iterator[Registry]:
    registry = Registry(files, drip_seconds=drip_seconds)
    thread = threading.Thread(target=registry.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        registry.shutdown()
        thread.join()
        registry.server_close()


def client_settings(address: str) -> dict[str, str]:
    """Environment variables that point pip and npm to a registry, as a user's own settings would."""
    return {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"{address}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "120",
        "npm_config_registry": address,
        "npm_config_fetch_retries": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def point_clients_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip and npm use this registry during a test."""
    for name, value in client_settings(address).items():
        monkeypatch.setenv(name, value)


def left_over(cache: Cache) -> list[str]:
    """Folders that are half done, and names of those that are whole."""
    return [path.name for path in cache.work.iterdir() if path.is_dir()] + cache.names()
