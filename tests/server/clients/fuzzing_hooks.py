"""Hooks of schemathesis: most generated requests name a served model and ask for few tokens."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(field), int) and body[field] > 8:
                body[field] = 8
    return body
