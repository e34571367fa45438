"""Other people's clients against a real server: `clients/with_*` are scripts with their defaults, one for each client.

`make clients` installs each client into an environment of its own, below the folder `DRAFTREE_CLIENTS` or
`build/clients`; the test of a client without an environment is skipped. `-rP` shows the versions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_environments import CLIENTS, environment_of
from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from installed import versions
from scripted import scripted
from serving import Running, running_server

pytestmark = pytest.mark.install

SCRIPTS = Path(__file__).parent / "clients"
NAME = "scripted"
VALUES = {"city": "Rome", "degrees": 18, "answer": "It is 18 degrees in Rome."}


def reply(prompt: str) -> str:
    """A short thought; then an edit of a file, JSON, a call of a tool until there is a result, or an answer."""
    asked = prompt.rpartition("<|im_start|>user\n")[2]
    if "goodbye" in prompt:
        text = "hello.py\n```\nprint('goodbye')\n```"
    elif "<code>" in prompt:
        text = f"<code>\nweather('Rome')\nfinal_answer({VALUES['answer']!r})\n</code>"
    else:
        tools = [json.loads(line) for line in re.findall(r'^\{"type": "function".*\}$', prompt, re.MULTILINE)]
        functions = [tool["function"] for tool in tools]
        if "18 degrees" in asked:
            functions = [one for one in functions if one["name"] == "final_answer"]
        if functions:
            arguments = {name: VALUES[name] for name in functions[0]["parameters"]["properties"]}
            call = {"name": functions[0]["name"], "arguments": arguments}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            text = '{"city": "Rome", "degrees": 18}' if "JSON" in asked else VALUES["answer"]
    return f"<think>\nHm.\n</think>\n\n{text}"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server([ServedModel(NAME, AsyncLLM(draft="ngram", **scripted(reply, context=2**15)))]) as running:
        yield running


def with_environment(script: str) -> Any:
    missing = environment_of(script) is None
    return pytest.param(script, marks=pytest.mark.skipif(missing, reason="not installed: run make clients"))


@pytest.mark.parametrize("script", [with_environment(script) for script in CLIENTS])
def test_a_client(server: Running, script: str, tmp_path: Path) -> None:
    place = environment_of(script)
    assert place is not None
    if place.is_dir():
        (tmp_path / "node_modules").symlink_to(place / "node_modules")
        command = ["node", str(shutil.copy(SCRIPTS / script, tmp_path))]  # imports are resolved from a script's folder
    else:
        command = [str(place), str(SCRIPTS / script)]
    print(versions(place, *CLIENTS[script]))
    scripted(reply)["tokenizer"].save_pretrained(tmp_path / NAME)
    urls = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_BASE": f"{server.url}/v1"}
    urls |= {"ANTHROPIC_BASE_URL": server.url, "OLLAMA_HOST": server.url}
    keys = {"OPENAI_API_KEY": "any", "ANTHROPIC_API_KEY": "any"}
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    env = {**kept, **urls, **keys, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
