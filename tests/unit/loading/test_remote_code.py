"""Python code in a model folder is run only with permission."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forked
from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ModelLoadError
from draftree.loading.load import load_model
from draftree.loading.loaded import load_tokenizer
from private_cache import private_cache

TRACE = "import os; os.environ['DRAFTREE_TEST_TRACE'] = os.environ.get('DRAFTREE_TEST_TRACE', '') + '{}'\n"
MODELING = (
    TRACE.format("m")
    + """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
)
CONFIGURATION = (
    TRACE.format("c")
    + """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own-kind"
"""
)
TOKENIZATION = (
    TRACE.format("t")
    + """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
)
PLAIN = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), chat=False)


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_TEST_TRACE", "")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


def ran() -> str:
    """Which of the model's files were run."""
    return os.environ["DRAFTREE_TEST_TRACE"]


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


@pytest.fixture
def own_model(base: Path, tmp_path: Path) -> Path:
    """A model with its classes in its folder."""
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    (folder / "modeling_own.py").write_text(MODELING, "utf-8")
    (folder / "configuration_own.py").write_text(CONFIGURATION, "utf-8")
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own-kind", architectures=["OwnForCausalLM"], auto_map=classes)
    return folder


@pytest.fixture
def own_tokenizer(base: Path, tmp_path: Path) -> Path:
    """A model with its tokenizer's class in its folder."""
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    (folder / "tokenization_own.py").write_text(TOKENIZATION, "utf-8")
    classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)
    return folder


def test_a_model_with_code_is_refused_and_its_code_is_not_run(own_model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"needs Python code of its own .*config\.json.*trust_remote_code=True"):
        LLM(str(own_model), "none")
    assert ran() == ""


def test_a_tokenizer_with_code_is_refused_and_its_code_is_not_run(own_tokenizer: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"own .*tokenizer_config\.json.*--trust-remote-code"):
        LLM(str(own_tokenizer), "none")
    assert ran() == ""


def test_a_draft_model_with_code_is_refused(base: Path, own_model: Path) -> None:
    with pytest.raises(ModelLoadError, match="needs Python code of its own"):
        LLM(str(base), f"model:{own_model}")
    assert ran() == ""


def test_no_prompt_on_standard_input(own_model: Path) -> None:
    done = subprocess.run(
        [*forked.python(), "-m", "draftree", "generate", str(own_model), "ab"],
        input=b"y\ny\ny\n",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode().startswith("error: ")
    assert done.stderr.count(b"\n") == 1


def test_with_permission_the_code_runs(base: Path, own_model: Path) -> None:
    plain = LLM(str(base), "none").generate("ab", PLAIN)[0].text
    assert LLM(str(own_model), "none", trust_remote_code=True).generate("ab", PLAIN)[0].text == plain
    assert "m" in ran()


def test_permission_is_for_the_draft_model_too(base: Path, own_model: Path) -> None:
    llm = LLM(str(base), f"model:{own_model}", trust_remote_code=True)
    assert "m" in ran()
    assert llm.generate("ab", PLAIN)[0].text == LLM(str(base), "none").generate("ab", PLAIN)[0].text


def test_with_permission_the_code_of_a_tokenizer_runs(own_tokenizer: Path) -> None:
    assert load_tokenizer(own_tokenizer, trust_remote_code=True) is not None
    assert ran() == "t"


COMMANDS = {
    "generate": ["ab", "--max-tokens", "3"],
    "explain": ["ab", "--draft", "ngram", "--max-tokens", "3", "--no-chat"],
    "doctor": [],
    "bench run": ["--draft", "ngram", "--prompts", "prompts.jsonl", "--max-tokens", "3", "--repeats", "1"],
    "bench passes": ["--rows", "1", "--prefix", "4", "--repeats", "1"],
    "bench perplexity": ["--text", "text.txt"],
    "tune layers": ["--prompts", "prompts.jsonl", "--max-tokens", "2", "--trials", "1"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_a_model_takes_the_permission(
    command: str, own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    Path("text.txt").write_text("abba" * 9, "utf-8")
    Path("prompts.jsonl").write_text('{"prompt": "ab", "category": "a"}\n' * 4, "utf-8")
    arguments = [*command.split(), str(own_model), *COMMANDS[command]]
    assert run(arguments) == 1
    assert "allow it with" in capfd.readouterr().err
    assert ran() == ""
    status = run([*arguments, "--trust-remote-code"])
    assert status == 0 or (command == "tune layers" and "not stored" in capfd.readouterr().err)
    assert "m" in ran()


def test_a_known_kind_needs_no_code_though_its_settings_name_some(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    (folder / "modeling_own.py").write_text(MODELING, "utf-8")
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    assert load_model(folder).eos_ids == (0,)
    assert ran() == ""


def test_a_start_recorded_with_permission_is_not_used_without(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "1")
    load_model(own_model, trust_remote_code=True)
    with pytest.raises(ModelLoadError, match="needs Python code of its own"):
        load_model(own_model)


@pytest.mark.parametrize("part", [{"attn_implementation": "a/b"}, {"text_config": {"_attn_implementation": "a/b"}}])
def test_attention_of_the_hub_is_refused(base: Path, tmp_path: Path, part: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    change(folder / "config.json", **part)
    with pytest.raises(ModelLoadError, match=r"compiled code 'a/b' of the hub .*trust_remote_code=True"):
        load_model(folder)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = str(trace)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._trace,)


def test_pickled_weights_run_nothing(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    (folder / "model.safetensors").unlink()
    trap = Trap(tmp_path / "trace")
    padding = torch.zeros(100_000)  # as many values as the configuration describes
    torch.save({"model.embed_tokens.weight": trap, "padding": padding}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="could not be read"):
        load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps((trap, bytes(100_000))))
    with pytest.raises(ModelLoadError, match="could not be read"):
        load_model(folder)
    assert not (tmp_path / "trace").exists()


def test_pickled_weights_that_are_only_weights_are_read(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "own"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert (
        LLM(str(folder), "none").generate("ab", PLAIN)[0].text == LLM(str(base), "none").generate("ab", PLAIN)[0].text
    )


def test_every_call_that_loads_through_transformers_passes_the_permission() -> None:
    """`GenerationConfig` runs no code of a checkpoint and would keep the argument as a setting."""
    root, count = Path(__file__).parents[3], 0
    for path in (path for folder in ("src", "benchmarks") for path in (root / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if ".from_pretrained" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                if getattr(getattr(node.func, "value", None), "id", "") == "GenerationConfig":
                    continue
                count += 1
                given = [keyword.arg for keyword in node.keywords]
                assert "trust_remote_code" in given, f"{path.relative_to(root)}, line {node.lineno}"
    assert count >= 10, "the calls are not found any more"
