"""API keys, authentication of every request but a few public ones, and protection of and from browsers.

The format of the file of API keys, and of the variable `DRAFTREE_API_KEYS` with semicolons in place of line breaks:

    # a comment
    sk-3b1c5a7d9e                                a key alone
    alice: sk-58f1c0a2b4                         a name for logs and metrics
    batch: sk-77ad09e3f1 smollm2,stories15m      and the only models that it may use
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.host import is_loopback
from draftree.serve.errors import ApiError
from draftree.serve.limits import refuse
from draftree.serve.records import ANONYMOUS, ApiKey, record_of
from draftree.serve.settings import ModelChoice

VARIABLE = "DRAFTREE_API_KEYS"
KEY = re.compile(r"[!-~]{8,256}", re.ASCII)
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
MAX_PARTS = 3


@final
class KeyRing:
    """All keys of a server; only digests of the secrets are kept."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = [(_digest(secret), key) for secret, key in keys.items()]

    @classmethod
    def load(
        cls, path: str | None, models: Sequence[ModelChoice], *, variables: Mapping[str, str] = os.environ
    ) -> KeyRing:
        """Read the keys of a file, None for none, and of the environment; lists of models may have aliases."""
        lines = _content(() if path is None else _lines(path), f"{path}, line")
        if path is not None and not lines:
            raise ConfigurationError(f"the file of API keys '{path}' has no key: write one per line")
        lines += _content(variables.get(VARIABLE, "").replace(";", "\n").splitlines(), f"{VARIABLE}, entry")
        names = {name: choice.name for choice in models for name in choice.names}
        keys: dict[str, ApiKey] = {}
        for place, line in lines:
            _add(keys, line.split(), place=place, names=names)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        return [key.name for _, key in self._keys] or [ANONYMOUS.name]

    def authenticate(self, authorization: str | None) -> ApiKey:
        if not self._keys:
            return ANONYMOUS
        if authorization is None:
            raise _unauthorized("no API key was sent: send the header 'Authorization: Bearer KEY'", "missing_api_key")
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("the header Authorization must have the form 'Bearer KEY'", "invalid_api_key")
        digest = _digest(secret.strip())
        match = None
        for known, key in self._keys:  # all of them: the time does not depend on which one matches
            if hmac.compare_digest(known, digest):
                match = key
        if match is None:
            raise _unauthorized("the API key is not known to this server: check it", "invalid_api_key")
        return match


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"the file of API keys '{path}' cannot be read: {reason}") from error


def _content(lines: Sequence[str], place: str) -> list[tuple[str, str]]:
    """Return the lines that are neither empty nor comments, with their places."""
    return [(f"{place} {n}", line) for n, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"]


def _add(keys: dict[str, ApiKey], parts: list[str], *, place: str, names: Mapping[str, str]) -> None:
    name = parts.pop(0)[:-1] if parts[0].endswith(":") else f"key-{len(keys) + 1}"
    if not 1 <= len(parts) < MAX_PARTS:
        raise ConfigurationError(f"{place}: write KEY, NAME: KEY or NAME: KEY MODEL,MODEL")
    if not KEY_NAME.fullmatch(name):
        raise ConfigurationError(f"{place}: the name of a key has up to 64 letters, digits and . _ -")
    if not KEY.fullmatch(parts[0]):
        raise ConfigurationError(f"{place}: a key has 8 to 256 printable ASCII characters")
    if parts[0] in keys:
        raise ConfigurationError(f"{place}: the same key is also that of '{keys[parts[0]].name}': make a new one")
    if name in {key.name for key in keys.values()}:
        raise ConfigurationError(f"{place}: the name '{name}' is used twice: give each key its own")
    models = parts[1].split(",") if len(parts) > 1 else []
    unknown = next((model for model in models if model not in names), None)
    if unknown is not None:
        raise ConfigurationError(f"{place}: there is no model '{unknown}': {suggestion(unknown, names)}")
    keys[parts[0]] = ApiKey(name, frozenset(names[model] for model in models) if models else None)


PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/version"})
PUBLIC_FOLDER = "/page/"
KEY_HEADER = b"x-api-key"
HEADERS = {
    b"content-security-policy": b"default-src 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


@dataclass(slots=True)
class Authentication:
    app: ASGIApp
    keys: KeyRing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_public = scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PUBLIC_FOLDER)
        if not is_public:
            headers = dict(reversed(scope["headers"]))
            authorization = headers.get(b"authorization")
            if authorization is None and KEY_HEADER in headers:
                authorization = b"Bearer " + headers[KEY_HEADER]
            try:
                record_of(scope).key = self.keys.authenticate(
                    None if authorization is None else authorization.decode("latin-1")
                )
            except ApiError as error:
                await refuse(scope, receive, send, error=error)
                return
        await self.app(scope, receive, send)


class HostCheck:
    """ASGI middleware that refuses requests which the pages of other sites make browsers send to this machine.

    A site can let its own name point to 127.0.0.1 (DNS rebinding): for the browser its page and the server then have
    one origin, but `Host` is the site's name. Pages need no such trick for WebSockets and some forms, but browsers name
    their origin.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts, self._origins = frozenset(map(str.lower, hosts)), frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host = headers.get(b"host", "")
            origin = headers.get(b"origin", "")
            if host and not self._is_allowed(f"//{host}"):
                await refuse(scope, receive, send, error=_forbidden("host", host, "allowed-host"))
                return
            # the origins of browser extensions and desktop programs have other schemes
            is_page = origin == "null" or origin.startswith(("http://", "https://"))
            if is_page and self._origins.isdisjoint({origin, "*"}) and not self._is_allowed(origin):
                await refuse(scope, receive, send, error=_forbidden("origin", origin, "cors-origin"))
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:  # such as an open bracket
            return False
        return "*" in self._hosts or name in self._hosts or is_loopback(name)


def _forbidden(header: str, value: str, option: str) -> ApiError:
    text = (
        f"the {header} {value[:100]!r} is not served: this server has no API keys, so that pages of other sites could "
        f"use it; connect to localhost, or start it with --{option}"
    )
    return ApiError(403, text, code=f"{header}_not_allowed")


@dataclass(slots=True)
class SecurityHeaders:
    """ASGI middleware that adds headers which a response does not have."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                added = [pair for pair in HEADERS.items() if pair[0] not in names]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self.app(scope, receive, send_with_headers)
