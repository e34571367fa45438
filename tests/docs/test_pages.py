"""Python blocks of README and docs run, page by page from top to bottom, and print what the page shows.

A block whose first line is ```` ```python needs … ```` needs a server, several processes or a large model: it runs with
a small model in its place, and with a server of this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from documents import ROOT, Block, blocks, documents, guide, matches
from generator import methods

import draftree.drafters
import forked
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.build import choose_methods
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.drafters import DRAFTERS
from draftree.lab.figures.playground import page_of
from draftree.serve.pool import ServedModel
from draftree.serve.verify import VerifySettings
from draftree.weights.catalogue import CATALOGUE
from method_files import described
from parallel_jobs import ended, environment
from real_weights import folder_of
from serving import Running, running_server, tiny_model
from text_backends import byte_level
from tool_templates import HERMES
from train_folders import learnable_model, write_data

NEEDS = "needs "
NOT_CODE = ("docs/reference.md", "docs/methods/")
"""Signatures, and examples whose specs are checked when the page is generated."""
ADDED = "followers"
MODEL, PROMPT = "stories15m", "Once upon a time"
PARAMS = SamplingParams(max_tokens=12, temperature=0)
SMALL = {"tinyllama-1.1b-chat": MODEL, "smollm2-135m-instruct": MODEL, "550MB": "25MB"}
HUB = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m-instruct"}
"""Models of the hub, and the same ones of the catalogue."""
ADDRESS = "https://verify.example.org"
MARKED = ("devices", "end-and-cloud", "larger-than-memory", "precision")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python"]


def runnable(name: str) -> list[Block]:
    return [block for block in PAGES[name] if not block.info.startswith(NEEDS)]


def marked(page: str) -> list[Block]:
    return [block for block in python_blocks(guide(page)) if block.info.startswith(NEEDS)]


def execute(block: Block, names: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Run a block; tracebacks show the page's own lines, and what it prints is what the page shows."""
    text = block.text
    for old, new in changes.items():
        text = text.replace(old, new)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + text, str(block.path), "exec"), names)
    if block.expected is not None:
        assert matches(printed.getvalue(), block.expected), f"{block.place} printed:\n{printed.getvalue()}"


@contextmanager
def recorded_trace() -> Iterator[Mapping[str, str]]:
    """The file that the guide records with the command before its block."""
    assert run(["generate", MODEL, PROMPT, "--max-tokens", "8", "--record", "trace.jsonl"]) == 0
    yield {}


@contextmanager
def training_data() -> Iterator[Mapping[str, str]]:
    """The folder that the guide writes with the command before its block."""
    write_data(learnable_model(Path("model").absolute()), Path("data").absolute(), count=24, temperatures=("0",))
    yield {}


@contextmanager
def tool_server() -> Iterator[Mapping[str, str]]:
    """The server of the guide, with a tiny model."""
    llm = AsyncLLM(tiny_model(context=2048), "ngram", tokenizer=byte_level(HERMES))
    with running_server([ServedModel("tiny", llm, (), ("ngram",))]) as running:
        yield {"http://127.0.0.1:8000": running.url}


@contextmanager
def verify_server(**limits: Any) -> Iterator[Running]:
    """A verify server of the small model."""
    with running_server([ServedModel(MODEL, AsyncLLM(MODEL, "none"), ())], verify=VerifySettings(**limits)) as running:
        yield running


@contextmanager
def added_drafter() -> Iterator[Mapping[str, str]]:
    """The drafter of the guide, as one more file of the drafters' folder."""
    Path(f"{ADDED}.py").write_text(python_blocks(guide("adding-a-method"))[0].text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draftree.drafters, "__path__", [*draftree.drafters.__path__, os.getcwd()])
        yield {}
    sys.modules.pop(f"draftree.drafters.{ADDED}", None)


PREPARED: dict[str, Callable[[], AbstractContextManager[Mapping[str, str]]]] = {
    "docs/guides/adding-a-method.md": added_drafter,
    "docs/guides/serving-tools.md": tool_server,
    "docs/guides/traces.md": recorded_trace,
    "docs/guides/training.md": training_data,
}
PAGES = {name_of(path): python_blocks(path) for path in documents() if not name_of(path).startswith(NOT_CODE)}
RUN = [name for name in PAGES if runnable(name)]


def models_of(name: str) -> list[str]:
    """The models of the catalogue that a page runs."""
    text = "".join(block.text for block in runnable(name))
    names = [model for model in CATALOGUE if f'"{model}"' in text or f":{model}" in text]
    names += [model for name, model in HUB.items() if name in text]
    return [*names, MODEL] if PREPARED.get(name) is recorded_trace else names


def keep_as_of_the_hub(cache: Path, name: str) -> None:
    """Make a model of the catalogue look as if it had been downloaded from the hub."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c0ffee")
    (place / "snapshots").mkdir()
    (place / "snapshots" / "c0ffee").symlink_to(folder_of(HUB[name]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weights] if models_of(name) else []) for name in RUN]
)
def test_the_page_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in models_of(name):
        folder_of(model)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # of transformers
    for model in HUB:
        if any(model in block.text for block in runnable(name)):
            keep_as_of_the_hub(tmp_path / "hub", model)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    with PREPARED.get(name, lambda: nullcontext({}))() as changes:
        for block in runnable(name):
            execute(block, names, changes)


def test_the_drafter_of_the_guide_is_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with added_drafter():
        assert run(["methods"]) == 0
        assert f"  {ADDED} " in capsys.readouterr().out
        assert f"drafter-{ADDED}.md" in methods.make()
        described(Path(f"{ADDED}.py"), DRAFTERS)
        assert choose_methods(f"{ADDED}+ngram", "coupled", None).traits.branches
        with pytest.raises(ConfigurationError, match="supplies free draws, but verifier 'token' accepts"):
            choose_methods(ADDED, "token", None)
        with pytest.raises(ConfigurationError, match="width=0"):
            choose_methods(f"{ADDED},width=0", "coupled", None)


@pytest.mark.weights
@pytest.mark.parametrize("page", ["drafting-ahead", "larger-than-memory", "precision"])
def test_blocks_of_large_models_run_with_a_small_one(page: str) -> None:
    folder_of(MODEL)
    names: dict[str, Any] = {"LLM": LLM, "prompts": [PROMPT, "The little dog"]}
    for block in marked(page):
        execute(block, names, SMALL)
        plain = LLM(MODEL, draft="none", **({"quantization": "int4"} if page == "precision" else {}))
        texts = [llm.generate(PROMPT, PARAMS)[0].text for llm in (names["llm"], plain)]
        assert texts[0] == texts[1] != ""


@pytest.mark.weights
def test_the_blocks_of_a_device_run_against_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(MODEL)
    whole, split = marked("end-and-cloud")
    names: dict[str, Any] = {}
    with verify_server() as running:
        execute(whole, names, {ADDRESS: running.url})
    with verify_server(split=4) as running:
        execute(split, names, {ADDRESS: running.url, **SMALL})
        text = names["llm"].generate(PROMPT, PARAMS)[0].text
        names["llm"].model.disconnect()
    assert text == LLM(MODEL, draft="none").generate(PROMPT, PARAMS)[0].text


@pytest.mark.weights
def test_the_script_of_several_processes_runs_with_two(tmp_path: Path) -> None:
    """As torchrun would start them."""
    (block,) = marked("devices")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = tmp_path / "script.py"
    script.write_text(block.text.replace("MODEL", str(folder_of(MODEL))), encoding="utf-8")
    started = [
        subprocess.Popen(
            [*forked.python(), str(script)],
            env=environment(rank, 2, MASTER_PORT=str(port)),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (status, text, errors), other = ended(started)
    assert (status, other[:2]) == (0, (0, "")), errors + other[2]
    assert len(text.strip()) > 20, "only rank 0 prints the text"


def test_every_python_block_runs_somewhere() -> None:
    found = [block for each in PAGES.values() for block in each]
    needing = [block for block in found if block.info.startswith(NEEDS)]
    assert [block.place for block in found if block.info and block not in needing] == [], "unknown words after 'python'"
    assert {block.path for block in needing} == {guide(page) for page in MARKED}
    for block in needing:
        compile(block.text, block.place, "exec")


def test_blocks_that_run_need_no_large_model() -> None:
    large = [block.place for name in RUN for block in runnable(name) if "tinyllama-1.1b-chat" in block.text]
    assert large == [], "mark the block: ```python needs a model of 1.1 billion parameters"


def test_the_playground_of_the_docs_is_made_by_the_package(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "playground.html").read_text(encoding="utf-8")
    trace = page.partition('<script type="application/x-ndjson" id="trace">')[2].partition("</script>")[0]
    assert trace
    file = tmp_path / "trace.jsonl"
    file.write_text(trace.strip().replace("\\u003c", "<"), encoding="utf-8")
    assert page_of(file).split() == page.split()
