"""The OpenAPI description: complete, with every field of the official client, and kept for generated requests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completions
import pytest

from draftree.serve.schema import ChatBody, CompletionBody, SamplingBody
from installed import python_with
from serving import Running

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


@pytest.fixture
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


def known(model: type[SamplingBody]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()} | set(model.elsewhere)


@pytest.mark.parametrize(
    ("model", "typed"),
    [
        (ChatBody, chat.CompletionCreateParamsStreaming),
        (CompletionBody, completions.CompletionCreateParamsStreaming),
    ],
)
def test_the_clients_fields_are_known(model: type[SamplingBody], typed: Any) -> None:
    fields = set(get_type_hints(typed))
    assert {"model", "stream", "seed", "logit_bias"} <= fields
    assert fields - known(model) == set()


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_a_field_is_not_honoured_and_refused_at_once(model: type[SamplingBody]) -> None:
    assert {field.alias or name for name, field in model.model_fields.items()} & set(model.elsewhere) == set()


HOOKS = Path(__file__).parent / "clients" / "fuzzing_hooks.py"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = int(os.environ.get("DRAFTREE_FUZZING_EXAMPLES", "8"))


@pytest.mark.install
def test_no_generated_request_breaks_the_description(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    """schemathesis: no status 5xx, none that is not described, no body of another shape."""
    python = python_with(tmp_path / "venv", "schemathesis>=4")
    command = [str(python.with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--phases", "fuzzing"]
    command += ["--checks", CHECKS, "--max-examples", str(EXAMPLES), "--exclude-path", "/draftree/rounds"]
    command += ["--request-timeout", "60", "--seed", "1"]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(HOOKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    status = http.get("/draftree/status").json()
    assert status["queue"]["running"] == status["queue"]["waiting"] == 0
