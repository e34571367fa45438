"""The ASGI application: routers, error handlers, and the server's state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from draftree.serve import page
from draftree.serve.access import KeyRing
from draftree.serve.api import anthropic, audio, chat, completions, embeddings, ollama, responses, status, tokens
from draftree.serve.errors import add_handlers
from draftree.serve.pool import ModelPool
from draftree.serve.server import Server, guarded
from draftree.serve.settings import ServerSettings
from draftree.serve.verify import VerifySettings
from draftree.version import __version__

APIS = (chat, completions, embeddings, responses, anthropic, ollama, audio, tokens, status)
ROUTERS = tuple(module.router for module in APIS)


class GuardedApp(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        return guarded(super().build_middleware_stack(), self.state.server)


def create_app(
    settings: ServerSettings, pool: ModelPool, *, keys: KeyRing | None = None, verify: VerifySettings | None = None
) -> FastAPI:
    """Return the application of a server, which closes the pool at its end; None for the keys of settings and
    environment.
    """
    ring = KeyRing.load(settings.api_key_file, settings.models) if keys is None else keys
    server = Server(settings, pool, keys=ring)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await server.close()

    app = GuardedApp(title="Draftree", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if verify is not None:
        from draftree.serve.verify.service import mount

        mount(app, server, verify)
    if settings.page:
        page.mount(app)
    _describe_truly(app)
    return app


def _describe_truly(app: FastAPI) -> None:
    """Remove the status 422 from the description, which FastAPI adds and this server never returns.

    FastAPI writes bounds of integers as floating-point numbers, rounded to a few digits by many readers: they become
    integers.
    """
    describe = app.openapi

    def whole(node: dict[str, Any]) -> dict[str, Any]:
        if node.get("type") == "integer":
            return {key: int(value) if isinstance(value, float) else value for key, value in node.items()}
        return node

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = describe()
            for path in description["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                description.get("components", {}).get("schemas", {}).pop(name, None)
            app.openapi_schema = json.loads(json.dumps(description), object_hook=whole)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
