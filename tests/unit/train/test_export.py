"""The export command: heads of a real target folder, whole models, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from block_samples import EAGLE_3, MEDUSA, config_of, random_head
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.heads.folders import write_head
from draftree.train.export import export_drafter, export_target
from families import VOCAB_SIZE, drafter_folder

WIDTH = 64
SIZES: dict[str, Any] = {"target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCAB_SIZE, "draft_vocab_size": 60}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 6}
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **sizes)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    write_head(random_head(config_of(EAGLE_3, **SIZES, own_output=False, features=(2, 3, -1))), tmp_path / "head")
    return tmp_path / "head"


def test_a_head_is_exported_with_the_rows_of_its_target(target: Path, head: Path, tmp_path: Path) -> None:
    lines = export_drafter(head, to="speculators", target=str(target), output=tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    ids = torch.arange(60) + stored["d2t"]
    torch.testing.assert_close(stored["lm_head.weight"], export_target(str(target)).output[ids].float())
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 3, 6]
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": str(target), "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert lines[0].startswith(f"vllm serve {target} --speculative-config ")
    asked = json.loads(lines[0].split("'")[1])
    assert asked == {"model": str(tmp_path / "out"), "num_speculative_tokens": 3, "method": "eagle3"}


def test_the_command_prints_the_flags(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--to", "sglang", "--target", str(target), "--output", str(tmp_path / "out"), "--served-as", "org/name"]
    assert run(["train", "export", str(head), *options]) == 0
    assert capsys.readouterr().out.startswith("python -m sglang.launch_server --model-path org/name ")
    assert run(["train", "export", str(head), *options]) != 0
    assert "not an empty folder" in capsys.readouterr().err
    assert run(["train", "export", str(head), "--to", "vllm", *options[2:]]) != 0
    assert "known: llama.cpp, package, sglang, speculators" in capsys.readouterr().err


def test_llama_cpp_needs_the_file_of_the_target(target: Path, head: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is no GGUF file.*--served-as"):
        export_drafter(head, to="llama.cpp", target=str(target), output=tmp_path / "out.gguf")


@pytest.mark.parametrize(("to", "words"), [("speculators", "draft_model"), ("sglang", "STANDALONE")])
def test_a_whole_model_is_copied(target: Path, to: str, words: str, tmp_path: Path) -> None:
    lines = export_drafter(target, to=to, target=str(target), output=tmp_path / "out")
    assert words in lines[0]
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        export_drafter(target, to=to, target=str(target), output=tmp_path / "out")


def test_kinds_without_a_layout_are_refused(target: Path, tmp_path: Path) -> None:
    config = config_of(MEDUSA, **{**SIZES, "draft_vocab_size": VOCAB_SIZE})
    folder = tmp_path / "medusa"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    torch.save(
        {name.removeprefix("medusa_head."): part.clone() for name, part in random_head(config).state_dict().items()},
        folder / "medusa_lm_head.pt",
    )
    with pytest.raises(ConfigurationError, match="kind 'medusa' cannot be exported"):
        export_drafter(folder, to="speculators", target=str(target), output=tmp_path / "out")
