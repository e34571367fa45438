"""The deployments of Ray Serve: replicas with an engine each, and the ingress with the proxy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import torch
from ray import exceptions, serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from draftree.serve.ray.proxy import Proxy, ReplicaLostError
from draftree.serve.ray.serving import LoadedApp
from draftree.serve.ray.wire import App, HttpRequest, Part, Receive, Scope, Send, call_app
from draftree.serve.settings import ServerSettings


class Replica:
    """One engine and the server's ASGI app.

    Args:
        settings: of the server.
        threads: CPU threads of each process of this replica.
    """

    async def __init__(self, settings: ServerSettings, threads: int) -> None:  # type: ignore[misc]
        torch.set_num_threads(threads)
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._app = await LoadedApp.load(settings, threads=threads)

    async def handle(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        """Yield the answer of the app to one request."""
        async with aclosing(call_app(self._app.app, request, replica=self._id)) as parts:
            async for part in parts:
                yield part

    async def answer(self, request: HttpRequest) -> list[Part]:
        """Return the complete answer of the app to one request."""
        return [part async for part in self.handle(request)]

    async def describe(self) -> dict[str, Any]:
        """Return id, process id, threads and running sequences of this replica."""
        facts = {"replica": self._id, "pid": os.getpid(), "threads": torch.get_num_threads()}
        return facts | {"num_running": self._app.num_running}

    async def check_health(self) -> None:
        """Raise unless the engines' threads respond; Ray replaces a replica that raises or takes too long."""
        await self._app.check_health()

    async def __del__(self) -> None:
        """Close the app; Ray calls this when the last request has ended."""
        await self._app.close()


class HandleReplicas:
    """The replicas of a deployment, for the proxy.

    Args:
        handle: of the deployment `Replica`.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._all = handle
        self._handle = handle.options(method_name="handle", stream=True)

    async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        """Yield the answer of the replica that the router chooses.

        Raises:
            ReplicaLostError: the replica ended before its answer.
        """
        parts = self._handle.remote(request)
        try:
            async for part in parts:
                yield part
        except (exceptions.RayActorError, exceptions.RaySystemError, RayServeException) as error:
            raise ReplicaLostError(type(error).__name__) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # the call on the replica was cancelled, not this task
            raise ReplicaLostError("the replica cancelled the request") from error
        finally:
            parts.cancel()

    async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
        """Return the complete answers of all replicas that give one."""
        answers = await self._all.broadcast("answer", request).results_async(return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def ingress_app() -> App:
    """Return the ASGI app that `serve.ingress` mounts; a function alone would be taken for a builder of apps."""
    return _forward


async def _forward(scope: Scope, receive: Receive, send: Send) -> None:
    """Call the proxy of this process."""
    if scope["type"] == "lifespan":
        # starts before the ingress object exists
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    ingress: Any = serve.get_replica_context().servable_object
    await ingress.proxy(scope, receive, send)


class Ingress:
    """The proxy in front of the replicas.

    Args:
        replicas: handle of the deployment `Replica`.
        max_body_bytes: size of a request's body.
        body_timeout: seconds in which a body must arrive.
    """

    def __init__(self, replicas: DeploymentHandle, *, max_body_bytes: int, body_timeout: float) -> None:
        self.proxy = Proxy(HandleReplicas(replicas), max_body_bytes=max_body_bytes, body_timeout=body_timeout)

    async def describe(self) -> dict[str, Any]:
        """Return how many times requests were repeated."""
        return {"num_repeated": self.proxy.num_repeated}
