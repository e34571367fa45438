"""Other people's clients of OpenAI's API against a real server, each installed by pip."""

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
from serving import Running, running_server

pytestmark = [pytest.mark.install, pytest.mark.weights]

MODEL = "smollm2-135m-instruct"
SCRIPTS = Path(__file__).parent / "clients"
QUESTION = [{"role": "user", "content": "Name three rivers."}]
Client = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server([ServedModel(MODEL, AsyncLLM(loaded_float32(MODEL), "suffix"))]) as running:
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
    return python_with(tmp_path_factory.mktemp("clients") / "venv", "llm", "langchain-openai", "litellm")


@pytest.fixture
def client(server: Running, python: Path, tmp_path: Path) -> Client:
    def run(script: str, *arguments: str) -> dict[str, Any]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        env = {**kept, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [str(python), str(SCRIPTS / f"{script}.py"), server.url, MODEL, *arguments]
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
