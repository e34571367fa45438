"""Python blocks of the guides that need more than one process or a large model run here, with a small model.

A large model is replaced by a small one of the same family, and the address of a server by that of one in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block, guide
from test_guides import execute, python_blocks

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from draftree.serve.verify.settings import VerifySettings
from real_weights import folder_of
from serving import Running, running_server

MODEL = "stories15m"
PROMPT = "Once upon a time"
PARAMS = SamplingParams(max_tokens=12, temperature=0)
LARGE = {"tinyllama-1.1b-chat": MODEL, "smollm2-135m-instruct": MODEL, "550MB": "25MB"}
ADDRESS = "https://verify.example.org"
SECONDS = 300
PAGES = ("devices", "drafting-ahead", "end-and-cloud", "larger-than-memory", "precision")

pytestmark = pytest.mark.weights


def marked(page: str) -> list[Block]:
    """The blocks of a guide that name what they need."""
    found = [block for block in python_blocks(guide(page)) if block.info.startswith("needs ")]
    assert found, f"{page} has no block that names what it needs"
    return found


def run_block(block: Block, names: dict[str, Any], changes: dict[str, str]) -> None:
    """Run a block with other names of models and servers."""
    text = block.text
    for old, new in changes.items():
        text = text.replace(old, new)
    execute(Block(block.path, block.line, block.language, block.info, text), names)


@pytest.mark.parametrize("page", ["drafting-ahead", "larger-than-memory", "precision"])
def test_blocks_of_large_models_run_with_a_small_one(page: str) -> None:
    folder_of(MODEL)
    names: dict[str, Any] = {"LLM": LLM, "prompts": [PROMPT, "The little dog"]}
    for block in marked(page):
        run_block(block, names, LARGE)
        llm = names["llm"]
        plain = LLM(MODEL, draft="none", **({"quantization": "int4"} if page == "precision" else {}))
        texts = [one.generate(PROMPT, PARAMS)[0].text for one in (llm, plain)]
        assert texts[0] == texts[1]
        assert texts[0]


@contextmanager
def server(**limits: Any) -> Iterator[Running]:
    """A verify server of the small model."""
    folder_of(MODEL)
    with running_server([ServedModel(MODEL, AsyncLLM(MODEL), ())], verify=VerifySettings(**limits)) as running:
        yield running


def test_the_blocks_of_a_device_run_against_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    whole, split = marked("end-and-cloud")
    names: dict[str, Any] = {}
    with server() as running:
        run_block(whole, names, {ADDRESS: running.url})
    with server(split=4) as running:
        run_block(split, names, {ADDRESS: running.url, **LARGE})
        text = names["llm"].generate(PROMPT, PARAMS)[0].text
        names["llm"].model.disconnect()
    assert text == LLM(MODEL, draft="none").generate(PROMPT, PARAMS)[0].text


def test_the_script_of_several_processes_runs_with_two(tmp_path: Path) -> None:
    (block,) = marked("devices")
    script = tmp_path / "script.py"
    script.write_text(block.text.replace("MODEL", str(folder_of(MODEL))), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.strip()) > 20, "only rank 0 prints the text"
