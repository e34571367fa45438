"""JSON of responses: compact, ASCII, and without NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Plain values to JSON text. ASCII only, so that any string can be sent; NaN raises."""


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode_json(content).encode("ascii"), status, dict(headers or {}))
