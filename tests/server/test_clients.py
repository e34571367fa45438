"""Other people's clients against a real server: `clients/with_*` are scripts with their defaults, one for each client.

A client is installed into an environment of its own, by pip or npm; its test is skipped where that is impossible.
`-rP` shows the versions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from installed import node_with, python_with, versions
from scripted import scripted
from serving import Running, running_server

pytestmark = pytest.mark.install

SCRIPTS = Path(__file__).parent / "clients"
NAME = "scripted"
CLIENTS = {
    "with_agents.py": ["openai-agents"],
    "with_ai_sdk.mjs": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"],
    "with_aider.py": ["aider-chat"],
    "with_anthropic.py": ["anthropic"],
    "with_guidance.py": ["guidance", "openai"],
    "with_haystack.py": ["haystack-ai"],
    "with_instructor.py": ["instructor"],
    "with_langchain.py": ["langchain-openai"],
    "with_litellm.py": ["litellm"],
    "with_llama_index.py": ["llama-index-llms-openai-like"],
    "with_llm.py": ["llm"],
    "with_lm_eval.py": ["lm-eval[api]"],
    "with_ollama.py": ["ollama"],
    "with_openai.py": ["openai"],
    "with_openai_node.mjs": ["openai", "zod"],
    "with_outlines.py": ["outlines[openai]"],
    "with_pydantic_ai.py": ["pydantic-ai-slim[openai]"],
    "with_smolagents.py": ["smolagents[openai]"],
}
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


@pytest.mark.parametrize("script", CLIENTS)
def test_a_client(server: Running, script: str, tmp_path: Path) -> None:
    packages, source = CLIENTS[script], SCRIPTS / script
    with tempfile.TemporaryDirectory() as folder:
        if script.endswith(".py"):
            place = python_with(Path(folder, "python"), "--upgrade", *packages)
            command = [str(place), str(source)]
        else:
            place = node_with(Path(folder), *packages)
            command = ["node", str(shutil.copy(source, folder))]  # imports are resolved from a script's folder
        print(versions(place, *packages))
        scripted(reply)["tokenizer"].save_pretrained(tmp_path / NAME)
        urls = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_BASE": f"{server.url}/v1"}
        urls |= {"ANTHROPIC_BASE_URL": server.url, "OLLAMA_HOST": server.url}
        keys = {"OPENAI_API_KEY": "any", "ANTHROPIC_API_KEY": "any"}
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        env = {**kept, **urls, **keys, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
