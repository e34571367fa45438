"""The command `llm`, set up as a user would: streamed, whole, continued."""

import os
import subprocess
import sys
from pathlib import Path

from asked import ANSWER, MODEL, QUESTION

home = Path("llm")
home.mkdir()
os.environ["LLM_USER_PATH"] = str(home)
entry = f"- model_id: here\n  model_name: {MODEL}\n  api_base: {os.environ['OPENAI_BASE_URL']}\n"
(home / "extra-openai-models.yaml").write_text(entry)
for options in ((), ("--no-stream",), ("--continue",)):
    command = [str(Path(sys.executable).with_name("llm")), "--model", "here", *options, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ANSWER, done.stdout
