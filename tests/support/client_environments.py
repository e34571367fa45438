"""Environments of other people's clients: `python tests/support/client_environments.py FOLDER` installs them.

Each script of `tests/server/clients` has an environment of its own with the newest version of its client that this
Python or Node can install. What is there already is left as it is. Not a test itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from installed import node_with, python_with, versions

FOLDER = Path(os.environ.get("DRAFTREE_CLIENTS", Path(__file__).parents[2] / "build" / "clients"))
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
"""The packages of each script."""
VERSIONS = "versions.txt"
"""Written into an environment when it is complete."""


def environment_of(script: str, folder: Path = FOLDER) -> Path | None:
    """Return the interpreter, or for Node the folder, that has the packages of a script; None if it is missing."""
    place = folder / Path(script).stem
    if not (place / VERSIONS).exists():
        return None
    return place / "bin" / "python" if script.endswith(".py") else place


def install(script: str, folder: Path) -> str:
    """Make the environment of a script, and return its versions, or why it cannot be made."""
    place = folder / Path(script).stem
    packages = CLIENTS[script]
    shutil.rmtree(place, ignore_errors=True)
    try:
        if script.endswith(".py"):
            text = versions(python_with(place, "--upgrade", *packages), *packages)
        else:
            text = versions(node_with(place, *packages), *packages)
    except pytest.skip.Exception as reason:
        return str(reason)
    (place / VERSIONS).write_text(text + "\n", encoding="utf-8")
    return text


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for script in CLIENTS:
        if environment_of(script, folder) is None:
            print(f"{script}: {install(script, folder)}", flush=True)


if __name__ == "__main__":
    main()
