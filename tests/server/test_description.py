"""The OpenAPI description: complete, without statuses that never occur."""

from __future__ import annotations

import httpx
import pytest

PATHS = (
    "/health",
    "/metrics",
    "/ready",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/version",
    "/draftree/rounds",
    "/draftree/status",
)


@pytest.fixture(scope="module")
def description(http: httpx.Client) -> dict:
    answer = http.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


@pytest.mark.parametrize("path", PATHS)
def test_every_endpoint_is_described(description: dict, path: str) -> None:
    for operation in description["paths"][path].values():
        assert operation["summary"]
        assert "200" in operation["responses"]
        assert "422" not in operation["responses"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_refusals_of_generation_are_described(description: dict, path: str) -> None:
    responses = description["paths"][path]["post"]["responses"]
    assert {"400", "401", "404", "413", "429", "500", "503"} <= set(responses)


def test_bounds_of_integers_are_exact(description: dict) -> None:
    for name in ("ChatBody", "CompletionBody", "ResponsesBody"):
        integer, _ = description["components"]["schemas"][name]["properties"]["seed"]["anyOf"]
        assert integer == {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**64}
        assert isinstance(integer["exclusiveMaximum"], int)


def test_the_refusal_of_readers_is_described(description: dict) -> None:
    assert "429" in description["paths"]["/draftree/rounds"]["get"]["responses"]
