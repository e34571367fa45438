"""The command `llm` against a server, set up as a user would: PYTHON with_llm.py URL MODEL FOLDER. Prints JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path


def main(url: str, model: str, folder: str) -> None:
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    entry = f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: here\n"
    (home / "extra-openai-models.yaml").write_text(entry, "utf-8")
    command = [str(Path(sys.executable).with_name("llm"))]
    env = dict(os.environ, LLM_USER_PATH=str(home))

    def run(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(f"{arguments}: {done.stderr}")
        return done.stdout.removesuffix("\n")

    run("keys", "set", "here", "--value", "sk-any")
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "24", "Name three rivers.")
    found = {"streamed": run(*options), "whole": run("--no-stream", *options)}
    found["continued"] = run("-c", "-o", "temperature", "0", "-o", "max_tokens", "12", "And one more?")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
