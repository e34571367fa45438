"""The part of a model for a device of a split: written, smaller, and used in place of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_verify_faults import check_empty

from draftree import LLM
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from draftree.loading.first_layers import load_first_layers, write_first_layers
from draftree.loading.load import load_model
from serving import Running
from split_devices import LAYERS, SPLIT, split_device, split_folder, split_server, whole_texts
from verify_clients import PARAMS, PROMPTS, texts_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_folder(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def part(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("parts") / "part"
    assert run(["models", "part", str(folder), "--split", str(SPLIT), "--to", str(where)]) == 0
    return where


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with split_server(folder) as running:
        yield running


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_only_what_the_device_runs_is_written(folder: Path, part: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = {name for number in range(SPLIT, LAYERS) for name in names_in(folder) if f"layers.{number}." in name}
    assert left_out
    assert names_in(part) == names_in(folder) - left_out
    sizes = [(where / "model.safetensors").stat().st_size for where in (part, folder)]
    written = write_first_layers(folder, 1, part.parent / "one")
    assert written.num_layers == LAYERS
    assert written.num_bytes < sizes[0] < sizes[1] == written.whole_bytes
    again = write_first_layers(part, 1, part.parent / "part-of-part")
    assert (again.num_layers, again.num_bytes) == (LAYERS, written.num_bytes)
    with pytest.raises(ConfigurationError, match="1 to 3"):
        write_first_layers(folder, LAYERS, part.parent / "all")
    with pytest.raises(ConfigurationError, match="first 2 layers: give 1 to 2"):
        load_first_layers(part, 3, dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_first_layers(folder, 1, part)
    assert run(["models", "part", str(folder), "--split", "9", "--to", str(part.parent / "nine")]) == 1
    assert "split=9, and the model has 4 layers" in capsys.readouterr().err
    assert not list(part.parent.glob(".*")), "nothing is left behind"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_texts_equal_the_whole_model(server: Running, folder: Path, part: Path, kernels: str) -> None:
    with split_device(server, part, plan="fixed", kernels=kernels) as llm:
        if kernels == "auto":
            assert llm.model.is_same
        assert texts_of(llm) == whole_texts(folder, PROMPTS, PARAMS)
    check_empty(server)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    from cli_samples import save_tiny_model

    whole = save_tiny_model(tmp_path / "whole", chat=False)
    config = load_model(whole, kernels="torch", dtype="float32").model
    part = write_first_layers(whole, 1, tmp_path / "part")
    local = load_first_layers(part.folder, 1, dtype=torch.float32, device=CPU, kernels="torch")
    first = load_first_layers(whole, 1, dtype=torch.float32, device=CPU, kernels="torch")
    assert torch.equal(local.output_head(), first.output_head())
    assert torch.equal(local.input_embedding(), config.input_embedding())


def test_a_part_writes_no_texts_of_its_own(part: Path, folder: Path) -> None:
    for load in (lambda: LLM(str(part)), lambda: LLM(str(folder), f"model:{part}"), lambda: LLM(str(part), tp=1)):
        with pytest.raises(ModelLoadError, match=r"first layers of a model of 4 layers.*split=N&weights="):
            load()


def test_packed_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    packed = shutil.copytree(folder, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModelError, match="packed weights"):
        write_first_layers(packed, 1, tmp_path / "part")
