"""Other people's clients of OpenAI's API against a real server, each in an environment of its own.

The packages are installed by pip. Where that fails, the recorded outputs in `clients/` show what they printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from serving import Running, running_server

pytestmark = [pytest.mark.install, pytest.mark.weights]

MODEL = "smollm2-135m-instruct"
SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = {"with_llm": ("llm",), "with_langchain": ("langchain-openai",), "with_litellm": ("litellm",)}
QUESTION = [{"role": "user", "content": "Name three rivers."}]
Client = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server([ServedModel(MODEL, AsyncLLM(MODEL, "suffix"))]) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What the library answers, without a server and without drafts."""
    llm, params = LLM(MODEL), SamplingParams(max_tokens=24, temperature=0)
    brief = [{"role": "system", "content": "You are brief."}, *QUESTION]
    (plain,), (with_system,) = llm.chat(QUESTION, params), llm.chat(brief, params)
    return {"plain": plain.text, "with system": with_system.text}


@pytest.fixture
def client(server: Running, tmp_path: Path) -> Client:
    def run(script: str, *arguments: str) -> dict[str, Any]:
        python = tmp_path / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES[script]]
        installed = subprocess.run(pip, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"pip cannot install {PACKAGES[script]}: {installed.stderr.strip().splitlines()[-1:]}")
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        env = {**kept, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [str(python), str(SCRIPTS / f"{script}.py"), server.url, MODEL, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
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


@pytest.mark.parametrize("script", sorted(PACKAGES))
def test_recorded_outputs_are_consistent(script: str) -> None:
    """Of another machine, whose rounding may lead to other texts."""
    recorded = json.loads((SCRIPTS / f"{script}.recorded.json").read_text("utf-8"))
    assert recorded["whole"] == recorded["streamed"] == recorded.get("without_draft", recorded["whole"]) != ""
