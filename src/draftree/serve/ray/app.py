"""The application of Ray Serve: replicas, ingress, autoscaling, health checks and updates."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig

from draftree.engine.memory import SHARE
from draftree.models.memory import free_memory
from draftree.serve.ray.deployments import Ingress, Replica, ingress_app
from draftree.serve.ray.options import ReplicaOptions
from draftree.serve.ray.router import PrefixRouter
from draftree.serve.settings import ServerSettings

APP_NAME = "draftree"
SPARE_REQUESTS = 64
"""Requests beside generation that a replica takes at the same time: health, metrics, streams of rounds."""
INGRESS_REQUESTS = 100_000
"""Requests that one ingress forwards at the same time; the replicas' queues are the limit."""
SPARE_SECONDS = 5.0
"""Time that a replica has after its drain timeout before Ray ends it."""


def build(settings: ServerSettings, options: ReplicaOptions) -> serve.Application:
    """Return the application for `serve.run`.

    Args:
        settings: of the server in every replica.
        options: number, resources and health checks of replicas.

    Raises:
        ConfigurationError: a setting does not fit replicas.
    """
    options.require_fit(settings)
    threads = options.threads(settings)
    deadline = settings.drain_timeout + SPARE_SECONDS
    replica = serve.deployment(Replica).options(
        max_ongoing_requests=settings.max_concurrent_requests + settings.max_queue + SPARE_REQUESTS,
        ray_actor_options=_resources(options, settings),
        graceful_shutdown_timeout_s=deadline,
        health_check_period_s=options.health_check_period,
        health_check_timeout_s=options.health_check_timeout,
        request_router_config=_router_config(options),
        **_scaling(settings, options),
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


def _resources(options: ReplicaOptions, settings: ServerSettings) -> dict[str, Any]:
    # read by OpenMP and MKL when they are loaded, before the replica is constructed
    threads = str(options.threads(settings))
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    found: dict[str, Any] = {"num_cpus": options.cpus(settings), "runtime_env": {"env_vars": variables}}
    return found | ({"num_gpus": options.gpus_per_replica} if options.gpus_per_replica else {})


def _router_config(options: ReplicaOptions) -> Any:
    return RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs=dataclasses.asdict(options.routing)
    )


def _scaling(settings: ServerSettings, options: ReplicaOptions) -> dict[str, Any]:
    if options.num_replicas is not None:
        return {"num_replicas": options.num_replicas}
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests(settings),
            "upscale_delay_s": options.upscale_delay,
            "downscale_delay_s": options.downscale_delay,
        },
    }


def run_replicas(settings: ServerSettings, options: ReplicaOptions, *, on_ready: Callable[[str], None]) -> None:
    """Serve with replicas on this machine until SIGTERM or Ctrl-C; then finish running requests.

    Args:
        settings: of the server; host and port are those of Ray Serve's HTTP proxy. Threads and memory are those of one
            replica; without them, replicas share what this machine has.
        options: number, resources and health checks of replicas.
        on_ready: called with the server's URL when all replicas run.

    Raises:
        ConfigurationError: a setting does not fit replicas.
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
    """Start Ray on this machine, and Ray Serve's HTTP proxy with the address of the settings."""
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
