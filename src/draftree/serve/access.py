"""Authentication of every request but a few public ones, and protection of and from browsers."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.core.host import is_loopback
from draftree.serve.errors import ApiError
from draftree.serve.limits import refuse
from draftree.serve.records import record_of
from draftree.serve.security import KeyRing

__all__ = ["Authentication", "HostCheck", "SecurityHeaders"]

PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/version"})
PUBLIC_FOLDER = "/page/"
"""Static files of the page; what the page shows needs a key."""
KEY_HEADER = b"x-api-key"
"""Where clients of Anthropic's API send their key."""
HEADERS = {
    b"content-security-policy": b"default-src 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


class Authentication:
    """ASGI middleware that requires an API key, if there are any.

    Args:
        app: the application.
        keys: the keys.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] == "http" and not is_public(scope["path"]):
            headers = dict(reversed(scope["headers"]))
            given = headers.get(b"authorization")
            if given is None and KEY_HEADER in headers:
                given = b"Bearer " + headers[KEY_HEADER]
            try:
                record_of(scope).key = self._keys.authenticate(None if given is None else given.decode("latin-1"))
            except ApiError as error:
                await refuse(scope, receive, send, error=error)
                return
        await self._app(scope, receive, send)


def is_public(path: str) -> bool:
    """Return whether a path is served without a key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)


class HostCheck:
    """ASGI middleware that refuses requests which the pages of other sites make browsers send to this machine.

    A site can let its own name point to 127.0.0.1 (DNS rebinding): for the browser its page and the server then have
    one origin, but `Host` is the site's name. Pages need no such trick for WebSockets and some forms, but browsers name
    their origin.

    Args:
        app: the application.
        hosts: allowed names besides those of this machine; "*" allows all.
        origins: allowed origins besides those of allowed hosts; "*" allows all.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts, self._origins = frozenset(map(str.lower, hosts)), frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""
        if scope["type"] in ("http", "websocket"):
            given = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host = given.get(b"host", "")
            origin = given.get(b"origin", "")
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


class SecurityHeaders:
    """ASGI middleware that adds headers which a response does not have.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message.get("headers", ())}
                added = [pair for pair in HEADERS.items() if pair[0] not in own]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)
