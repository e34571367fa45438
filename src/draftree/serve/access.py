"""Authentication of every request but a few public ones, and headers that keep browsers from misuse."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.serve.errors import ApiError
from draftree.serve.limits import refuse
from draftree.serve.records import record_of
from draftree.serve.security import KeyRing

__all__ = ["Authentication", "SecurityHeaders"]

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
