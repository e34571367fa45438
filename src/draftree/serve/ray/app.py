"""The application of Ray Serve: replicas, ingress, autoscaling, health checks and updates."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from types import FrameType
from typing import Any

import ray
from ray import serve

from draftree.core.plain_text import harmless
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
LOCAL = "127.0.0.1"


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
        ray_actor_options=_resources(options, threads),
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
    return ingress.bind(replica.bind(settings, threads), settings.max_body_bytes)


def _resources(options: ReplicaOptions, threads: int) -> dict[str, Any]:
    # read by OpenMP and MKL when they are loaded, before the replica is constructed
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    cpus = threads if options.cpus_per_replica is None else options.cpus_per_replica
    found: dict[str, Any] = {"num_cpus": cpus, "runtime_env": {"env_vars": variables}}
    return found | ({"num_gpus": options.gpus_per_replica} if options.gpus_per_replica else {})


def _router_config(options: ReplicaOptions) -> Any:
    from ray.serve.config import RequestRouterConfig

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


def run_replicas(settings: ServerSettings, options: ReplicaOptions) -> None:
    """Serve with replicas on this machine until SIGTERM or Ctrl-C; then finish running requests.

    Ray's own ports listen on the loopback address only, and its usage statistics and dashboard are off.

    Args:
        settings: of the server; host and port are those of Ray Serve's HTTP proxy.
        options: number, resources and health checks of replicas.

    Raises:
        ConfigurationError: a setting does not fit replicas.
    """
    application = build(settings, options)
    ended = threading.Event()
    _on_signals(ended)
    start_ray(options, settings)
    try:
        serve.run(application, name=APP_NAME, route_prefix="/")
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


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
            "host": harmless(settings.host),
            "port": settings.port,
            "keep_alive_timeout_s": max(1, round(settings.keep_alive)),
        },
    )


def _on_signals(ended: threading.Event) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
