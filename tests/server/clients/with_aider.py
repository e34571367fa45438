"""aider: an edit of a file."""

import subprocess
import sys
from pathlib import Path

from asked import MODEL

Path("hello.py").write_text("print('hello')\n")
command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}", "--yes-always", "--no-git"]
quiet = ["--no-analytics", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"]
asked = ["--message", "Say goodbye instead.", "hello.py"]
subprocess.run([*command, *quiet, *asked], check=True, stdin=subprocess.DEVNULL)
assert Path("hello.py").read_text() == "print('goodbye')\n"
