"""Options of replicas, and the settings of the server from environment variables. Needs no ray.

`serve run draftree.serve.ray:app` takes no options of ours; they come from the environment: `DRAFTREE_SERVE_<NAME>` for
every field of `ServerSettings` and of `ReplicaOptions`, and

    DRAFTREE_SERVE_MODELS    the models as the command line spells them, separated by white space
    DRAFTREE_SERVE_DRAFTS    the drafters likewise
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.host import parse_bytes, usable_cores
from draftree.drafters.learning.store import parse_learning
from draftree.options import ModelOptions
from draftree.serve.ray.routing import RoutingPolicy
from draftree.serve.settings import MODEL_OPTIONS, ServerSettings, choose_models

PREFIX = "DRAFTREE_SERVE_"
MODELS, DRAFTS = f"{PREFIX}MODELS", f"{PREFIX}DRAFTS"
FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
BYTES = ("max_body_bytes", "memory", "object_store_bytes")
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Number, resources and health checks of replicas. Times are seconds.

    `num_replicas` is None for autoscaling, whose target is half of the requests that a replica runs at the same time
    unless it is given. A replica reserves a CPU for each thread, and has a GPU for each process of a divided model.
    """

    num_replicas: int | None = 2
    min_replicas: int = 1
    max_replicas: int = 4
    target_ongoing_requests: float | None = None
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    cpus_per_replica: float | None = None
    gpus_per_replica: float = 0.0
    num_proxies: int = 1
    health_check_period: float = 5.0
    health_check_timeout: float = 30.0
    object_store_bytes: int = 128 * MEBIBYTE
    routing: RoutingPolicy = field(default_factory=RoutingPolicy)

    def __post_init__(self) -> None:
        for name in ("num_replicas", "min_replicas", "max_replicas", "num_proxies"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}: it must be at least 1")
        for name in ("target_ongoing_requests", "health_check_period", "health_check_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name} is {value:g}: it must be above 0")
        if self.min_replicas > self.max_replicas:
            raise ConfigurationError(
                f"min_replicas is {self.min_replicas}: it must be at most max_replicas, {self.max_replicas}"
            )

    @classmethod
    def parse(cls, number: str) -> ReplicaOptions:
        """Read a number of replicas, such as "2", or a range for autoscaling, such as "1-4"."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", number.strip(), re.ASCII)
        if match is None:
            raise ConfigurationError(f"the number of replicas is '{number}': write a number, or a range such as 1-4")
        if match[2] is None:
            return cls(num_replicas=int(match[1]))
        return cls(num_replicas=None, min_replicas=int(match[1]), max_replicas=int(match[2]))

    @property
    def most_replicas(self) -> int:
        return self.max_replicas if self.num_replicas is None else self.num_replicas

    def threads(self, settings: ServerSettings) -> int:
        """Return the CPU threads of a process: this machine's, divided among all, unless the settings name them."""
        processes = self.most_replicas * settings.options.num_processes
        return settings.options.threads or max(1, (usable_cores() or 1) // processes)

    def cpus(self, settings: ServerSettings) -> float:
        if self.cpus_per_replica is not None:
            return self.cpus_per_replica
        return self.threads(settings) * settings.options.num_processes

    def machine_cpus(self, settings: ServerSettings) -> int:
        return max(1, round(self.cpus(settings) * self.most_replicas + 0.5))

    def target_requests(self, settings: ServerSettings) -> float:
        return self.target_ongoing_requests or max(1.0, settings.max_concurrent_requests / 2)

    def require_fit(self, settings: ServerSettings) -> None:
        count = settings.options.num_processes
        if count > 1 and self.gpus_per_replica not in (0, count):
            raise ConfigurationError(
                f"gpus_per_replica is {self.gpus_per_replica:g}, but each of the {count} processes of a replica with "
                f"{settings.options.division} has its own GPU: use {count}, or 0 for CPUs"
            )
        if count > 1 and "RANK" in os.environ:
            raise ConfigurationError("replicas start the processes of their models themselves: leave torchrun out")
        if settings.options.affinity not in (None, "none"):
            raise ConfigurationError(
                "replicas share the processors of their machines: leave out affinity, give threads"
            )
        if settings.uds is not None:
            raise ConfigurationError("replicas listen on a port, not on a Unix socket: leave out uds")
        if settings.tls_certificate is not None:
            raise ConfigurationError("replicas speak HTTP: leave out tls_certificate and tls_key, and use a proxy")
        if settings.port == 0:
            raise ConfigurationError("replicas need a port of their own: name one instead of 0")
        if settings.options.learn is not None and parse_learning(settings.options.learn).options.folder is not None:
            raise ConfigurationError(
                "replicas learn each on their own and cannot share a folder: leave out option folder of learn"
            )


def from_environment(variables: Mapping[str, str]) -> tuple[ServerSettings, ReplicaOptions]:
    environment = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    readable = {
        ServerSettings: [f for f in dataclasses.fields(ServerSettings) if f.name not in ("models", "options")],
        ModelOptions: MODEL_OPTIONS,
        ReplicaOptions: [f for f in dataclasses.fields(ReplicaOptions) if f.name != "routing"],
    }
    fields = {PREFIX + f.name.upper(): (kind, f.name) for kind, options in readable.items() for f in options}
    values: dict[type, dict[str, Any]] = {kind: {} for kind in readable}
    for name, text in environment.items():
        if name in fields:
            kind, field_name = fields[name]
            values[kind][field_name] = _value(text, field_name, get_type_hints(kind)[field_name])
        elif name not in (MODELS, DRAFTS):
            raise ConfigurationError(f"the variable {name} is unknown: {suggestion(name, [MODELS, DRAFTS, *fields])}")
    if MODELS not in environment:
        raise ConfigurationError(f"there is no model to serve: set {MODELS}, for example to smollm2-135m-instruct")
    models = choose_models(environment[MODELS].split(), environment.get(DRAFTS, "").split())
    settings = ServerSettings.of(models, **values[ServerSettings], **values[ModelOptions])
    return settings, ReplicaOptions(**values[ReplicaOptions])


def _value(text: str, name: str, kind: Any) -> Any:
    """Convert a variable's text to the type of its field; an empty text or "none" is None where that is allowed."""
    members = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if types.NoneType in members and text.strip().lower() in ("", "none"):
        return None
    target = next(member for member in members if member is not types.NoneType)
    try:
        if target is bool:
            return FLAGS[text.strip().lower()]
        if target in (int, float):
            return parse_bytes(text) if name in BYTES else target(text)
    except (KeyError, ValueError) as error:
        wanted = {bool: "flag: 1 or 0", int: "whole number", float: "number"}[target]
        reason = f"{PREFIX}{name.upper()} is '{text}': it must be a {wanted}"
        raise ConfigurationError(reason) from error
    return text if target is str else tuple(text.split())
