"""Other people's clients against a real server, each installed by pip."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from installed import python_with
from real_weights import loaded_float32
from scripted import scripted
from serving import Running, running_server

pytestmark = [pytest.mark.install, pytest.mark.weights]

MODEL = "smollm2-135m-instruct"
PACKAGES = ("llm", "langchain-openai", "litellm", "anthropic", "ollama")
SCRIPT = (
    '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
"""What a model without real weights answers, for clients that show reasoning and calls."""
SCRIPTS = Path(__file__).parent / "clients"
QUESTION = [{"role": "user", "content": "Name three rivers."}]
Client = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [
        ServedModel(MODEL, AsyncLLM(loaded_float32(MODEL), "suffix")),
        ServedModel("scripted", AsyncLLM(draft="ngram", **scripted(SCRIPT))),
    ]
    with running_server(models) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What the library answers, without a server and without drafts."""
    llm, params = LLM(loaded_float32(MODEL), "none"), SamplingParams(max_tokens=24, temperature=0)
    brief = [{"role": "system", "content": "You are brief."}, *QUESTION]
    (plain,), (with_system,) = llm.chat(QUESTION, params), llm.chat(brief, params)
    return {"plain": plain.text, "with system": with_system.text}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the clients."""
    return python_with(tmp_path_factory.mktemp("clients") / "venv", *PACKAGES)


@pytest.fixture
def client(server: Running, python: Path, tmp_path: Path) -> Client:
    def run(script: str, *arguments: str, model: str = MODEL) -> dict[str, Any]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        env = {**kept, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [str(python), str(SCRIPTS / f"{script}.py"), server.url, model, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_llm(client: Client, answers: dict[str, str], tmp_path: Path) -> None:
    found = client("with_llm", str(tmp_path / "llm"))
    assert found["streamed"] == found["whole"] == answers["plain"]
    assert found["continued"]


def test_langchain(client: Client, answers: dict[str, str]) -> None:
    found = client("with_langchain")
    assert found["whole"] == found["streamed"] == found["several"][0] == answers["with system"]
    assert found["usage"]["output_tokens"] == found["streamed_usage"]["output_tokens"] == 24
    assert found["num_logprobs"] == 8
    assert found["completion"]


def test_litellm(client: Client, answers: dict[str, str]) -> None:
    found = client("with_litellm")
    assert found["whole"] == found["streamed"] == found["without_draft"] == answers["plain"]
    assert found["usage"] > 24
    assert "absent" in found["refused"]


def test_anthropic(client: Client) -> None:
    found = client("with_anthropic", model="scripted")
    thinking, text, call = found["whole"]
    assert found["whole"] == found["streamed"]
    assert (thinking["thinking"], text["text"], call["input"]) == ("Hm.", "I look.", {"city": "Rome"})
    assert found["stop_reason"] == "tool_use"
    assert {"message_start", "content_block_delta", "message_delta", "message_stop"} < {*found["events"]}
    assert found["second"] == found["counted"]
    assert "'absent' is not served" in found["refused"]
    assert found["litellm"] == ["I look.", '{"city": "Rome"}']
    assert (found["litellm_reasoning"], found["litellm_streamed"]) == ("Hm.", "I look.")


def test_ollama(client: Client) -> None:
    found = client("with_ollama", model="scripted")
    assert (found["thinking"], found["content"], found["streamed"]) == ("Hm.", "I look.", "I look.")
    assert (found["calls"], found["streamed_calls"]) == ([["weather", {"city": "Rome"}]], 1)
    assert found["counts"][0] == found["counts"][1]
    assert found["second"] > found["first"]
    assert found["generated"] == found["generated_pieces"]
    assert found["models"] == [MODEL, "scripted"]
    assert found["capabilities"] == ["completion", "tools", "thinking"]
    assert "404 the model 'absent'" in found["refused"]
