"""The page at `/`: static files from the package, served without a build step and without any other origin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of every file of the page: it loads from and connects to its own origin only."""


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str

    async def response(self, request: Request) -> Response:
        """Return the file, or 304 without content if the client has this version."""
        headers = HEADERS | {"etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in MEDIA_TYPES]
    contents = {path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in paths}
    return {
        name: PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
        for name, (content, media_type) in contents.items()
    }


def mount(app: FastAPI) -> None:
    """Add `GET /` and `GET /page/NAME` to the application. Only files present now are served."""
    for name, file in read_files().items():
        path = "/" if name == "index.html" else f"/page/{name}"
        app.add_route(path, file.response, methods=["GET"], include_in_schema=False)
