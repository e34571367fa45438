"""The application of Ray Serve: replicas, ingress, routing, autoscaling, health checks and updates."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import ray
import torch
from ray import exceptions, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from draftree.engine.memory import SHARE
from draftree.models.memory import free_memory
from draftree.serve.limits import BodyLimit
from draftree.serve.ray.options import ReplicaOptions
from draftree.serve.ray.proxy import Proxy, ReplicaLostError
from draftree.serve.ray.routing import (
    App,
    HttpRequest,
    Part,
    PrefixRouting,
    Receive,
    RoutingPolicy,
    Scope,
    Send,
    call_app,
)
from draftree.serve.ray.serving import LoadedApp
from draftree.serve.settings import ServerSettings

NO_REQUEST = HttpRequest({}, b"")


class PrefixRouter(RequestRouter):
    """Routes `HttpRequest` arguments; other calls go to the less busy of two random replicas."""

    def initialize_state(self, **policy: Any) -> None:
        self._routing = PrefixRouting(RoutingPolicy(**policy))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = _request_of(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        if pending_request is not None:
            # the groups are all replicas worth trying: pause before they are tried again
            pending_request.routing_context.should_backoff = True
        return [
            [replicas[name] for name in group]
            for group in self._routing.rank(request.blocks, loads, avoid=request.avoid, holder=request.holder)
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        blocks = _request_of(pending_request).blocks
        if blocks:
            self._routing.index.record(replica_id.unique_id, blocks)


def _request_of(pending: PendingRequest | None) -> HttpRequest:
    arguments: Iterable[Any] = pending.args if pending is not None else ()
    return next((argument for argument in arguments if isinstance(argument, HttpRequest)), NO_REQUEST)


class Replica:
    async def __init__(self, settings: ServerSettings, threads: int) -> None:  # type: ignore[misc]
        torch.set_num_threads(threads)
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._app = await LoadedApp.load(settings, threads=threads, replica=self._id)

    async def handle(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        async with aclosing(call_app(self._app.app, request, replica=self._id)) as parts:
            async for part in parts:
                yield part

    async def answer(self, request: HttpRequest) -> list[Part]:
        return [part async for part in self.handle(request)]

    async def describe(self) -> dict[str, Any]:
        facts = {"replica": self._id, "pid": os.getpid(), "threads": torch.get_num_threads()}
        return facts | {"num_running": self._app.num_running}

    async def check_health(self) -> None:
        """Raise unless the engines' threads respond; Ray replaces a replica that raises or takes too long."""
        await self._app.check_health()

    async def __del__(self) -> None:
        """Close the app; Ray calls this when the last request has ended."""
        await self._app.close()


class HandleReplicas:
    def __init__(self, handle: DeploymentHandle) -> None:
        self._all = handle
        self._handle = handle.options(method_name="handle", stream=True)

    async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
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
        answers = await self._all.broadcast("answer", request).results_async(return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def ingress_app() -> App:
    """Return the ASGI app that `serve.ingress` mounts; a function alone would be taken for a builder of apps."""
    return _forward


async def _forward(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        # starts before the ingress object exists
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    ingress: Any = serve.get_replica_context().servable_object
    await ingress.app(scope, receive, send)


class Ingress:
    def __init__(self, replicas: DeploymentHandle, *, max_body_bytes: int, body_timeout: float) -> None:
        self._proxy = Proxy(HandleReplicas(replicas))
        self.app = BodyLimit(self._proxy, max_bytes=max_body_bytes, timeout=body_timeout)

    async def describe(self) -> dict[str, Any]:
        return {"num_repeated": self._proxy.num_repeated}


APP_NAME = "draftree"
SPARE_REQUESTS = 64
"""Requests beside generation that a replica takes at the same time: health, metrics, streams of rounds."""
INGRESS_REQUESTS = 100_000  # requests that one ingress forwards at the same time; the replicas' queues are the limit
SPARE_SECONDS = 5.0  # time that a replica has after its drain timeout before Ray ends it


def build(settings: ServerSettings, options: ReplicaOptions) -> serve.Application:
    options.require_fit(settings)
    threads = options.threads(settings)
    # read by OpenMP and MKL when they are loaded, before the replica is constructed
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    resources: dict[str, Any] = {"num_cpus": options.cpus(settings), "runtime_env": {"env_vars": variables}}
    if options.gpus_per_replica:
        resources["num_gpus"] = options.gpus_per_replica
    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.num_replicas is None:
        autoscaling = {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests(settings),
            "upscale_delay_s": options.upscale_delay,
            "downscale_delay_s": options.downscale_delay,
        }
        scaling = {"num_replicas": "auto", "autoscaling_config": autoscaling}
    deadline = settings.drain_timeout + SPARE_SECONDS
    replica = serve.deployment(Replica).options(
        max_ongoing_requests=settings.max_concurrent_requests + settings.max_queue + SPARE_REQUESTS,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=deadline,
        health_check_period_s=options.health_check_period,
        health_check_timeout_s=options.health_check_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs=dataclasses.asdict(options.routing)
        ),
        **scaling,
    )
    ingress = serve.deployment(serve.ingress(ingress_app)(Ingress)).options(
        num_replicas=options.num_proxies,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=deadline,
        health_check_period_s=options.health_check_period,
        health_check_timeout_s=options.health_check_timeout,
    )
    return ingress.bind(
        replica.bind(settings, threads), max_body_bytes=settings.max_body_bytes, body_timeout=settings.body_timeout
    )


def run_replicas(settings: ServerSettings, options: ReplicaOptions, *, on_ready: Callable[[str], None]) -> None:
    """Serve with replicas on this machine until SIGTERM or Ctrl-C; then finish running requests.

    Threads and memory of the settings are those of one replica; without them, replicas share what this machine has.
    """
    options.require_fit(settings)
    start_ray(options, settings)
    ended = threading.Event()
    # after the start: Ray installs handlers of its own
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.set())
    try:
        serve.run(build(with_memory(settings, options), options), name=APP_NAME, route_prefix="/")
        if not ended.is_set():
            on_ready(f"http://{settings.host}:{settings.port}")
        ended.wait()
        drain(settings)
    finally:
        serve.shutdown()
        ray.shutdown()


def drain(settings: ServerSettings) -> None:
    """Refuse new requests, and return when the running ones are finished or the drain timeout has passed.

    `serve.shutdown` alone ends the HTTP proxy at once, and with it all connections.
    """
    # ingress and replicas end one after the other
    end = time.monotonic() + 2 * (settings.drain_timeout + SPARE_SECONDS)
    while time.monotonic() < end:
        try:
            serve.delete(APP_NAME)
            return
        except TimeoutError:
            continue  # of this call


def with_memory(settings: ServerSettings, options: ReplicaOptions) -> ServerSettings:
    """Return settings in which each replica of this machine has its share of half of the free memory.

    Replicas with GPUs of their own, and settings that name the memory, stay as they are.
    """
    free = None if options.gpus_per_replica else free_memory(torch.device("cpu"))
    if settings.memory is not None or free is None:
        return settings
    return dataclasses.replace(settings, memory=max(1, int(SHARE * free) // options.most_replicas))


def start_ray(options: ReplicaOptions, settings: ServerSettings) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=options.machine_cpus(settings),
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=options.object_store_bytes,
    )
    serve.start(
        proxy_location="HeadOnly",
        http_options={
            "host": settings.host,
            "port": settings.port,
            "keep_alive_timeout_s": max(1, round(settings.keep_alive)),
        },
    )
