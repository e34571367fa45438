"""Replicas of the server under Ray Serve: `serve run draftree.serve.ray:app` and `draftree serve --replicas`.

The ingress calls `proxy.Proxy`, which reads a body, hashes the beginning of its prompt and sends an `HttpRequest`
through a handle. `PrefixRouter` ranks the replicas by known prefixes and load; Ray probes their queues and retries. A
replica answers with status, headers and chunks, and `proxy.Delivery` composes the client's answer of one or more
attempts: `StreamRecord` removes from a repeated stream what the client already has.

Importing this package imports no ray, which only `app` needs. The attribute `app` is built at first use, from the
environment variables that `options` documents.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from draftree.core.errors import ConfigurationError, require_extra
    from draftree.serve.ray.options import from_environment

    require_extra("ray", "replicas need", error=ConfigurationError)
    from draftree.serve.ray.app import build

    return build(*from_environment(os.environ))
