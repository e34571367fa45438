"""Replicas of the server under Ray Serve: `serve run draftree.serve.ray:app` and `draftree serve --replicas`.

Importing this package imports no ray. `app` is built at first use, from the environment variables that `options`
documents.
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
