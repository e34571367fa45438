"""4-bit checkpoints by GPTQ, AWQ and compressed-tensors run as they are, or are refused with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from draftree.loading.load import load_model
from draftree.loading.native_start import packed_folders
from draftree.weights.packed_checkpoint import PackedCheckpoint, quantization_of
from families import VOCAB_SIZE
from native_samples import HYBRIDS, in_c
from packed_samples import AWQ, COMPRESSED, GPTQ, awq, compressed, gptq, packed_folder
from second_starts import logits
from slot_samples import at_once

pytestmark = [in_c, pytest.mark.usefixtures("store")]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("settings", "pack"), [(GPTQ, gptq), (AWQ, awq), (COMPRESSED, compressed)])
def test_logits_are_those_of_the_values(
    settings: dict[str, Any], pack: Callable[..., dict[str, Tensor]], symmetric: bool, tmp_path: Path
) -> None:
    folder, peer = packed_folder(tmp_path, settings, pack, symmetric=symmetric)
    loaded = load_model(folder, dtype="float32")
    assert loaded.quantization == settings["quant_method"]
    assert loaded.model.is_exact
    tokens = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = peer(torch.tensor([tokens])).logits[0].float()
    error = (at_once(loaded.model, tokens) - wanted).pow(2).mean().sqrt()
    assert error < 0.03 * (wanted.max() - wanted.min())  # head and embedding have 6 bits
    for layer, block in enumerate(peer.model.layers):
        found, _ = loaded.model.decoder.product_weight(layer, "down")  # type: ignore[attr-defined]
        own = block.mlp.down_proj.weight.float()
        assert (found.float() - own).abs().max() < 1e-3 * own.abs().max()
    again = load_model(folder, dtype="float32")
    assert torch.equal(logits(loaded), logits(again))


@pytest.mark.parametrize(("family", "changes"), [("lfm2", {}), ("bamba", {"mamba_n_heads": 8})])
def test_recurrent_layers_keep_their_small_weights(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = HYBRIDS[family] | changes
    folder, peer = packed_folder(tmp_path, GPTQ, gptq, symmetric=True, family=family, **changes)
    loaded = load_model(folder, dtype="float32")
    assert loaded.model.is_exact
    tokens = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = peer(torch.tensor([tokens]), use_cache=False).logits[0].float()
    error = (at_once(loaded.model, tokens) - wanted).pow(2).mean().sqrt()
    assert error < 0.03 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits in groups of 64"),
        ({"group_size": -2}, "4 bits in groups of -2"),
        ({"group_size": 48}, "4 bits in groups of 48"),
        ({"desc_act": True}, "another order of inputs"),
        ({"checkpoint_format": "marlin"}, "the GPTQ format 'marlin'"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "rotated inputs"),
    ],
)
def test_what_passes_do_not_support_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ | change, gptq, symmetric=True)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder)


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    def shuffled(stem: str, *parts: Tensor) -> dict[str, Tensor]:
        found = gptq(stem, *parts)
        return found | {f"{stem}g_idx": found[f"{stem}g_idx"].flip(0)}

    folder, _ = packed_folder(tmp_path, GPTQ, shuffled, symmetric=True)
    with pytest.raises(UnsupportedModelError, match="another order of inputs"):
        load_model(folder)


def test_options_for_other_weights_are_refused(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ, gptq, symmetric=True)
    for options in ({"kernels": "torch"}, {"quantization": "int8"}):
        with pytest.raises(ConfigurationError, match="leave kernels, quantization and offload out"):
            load_model(folder, **options)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"input_activations": {"num_bits": 8}}, "quantized inputs"),
        ({"weights": {"num_bits": 4, "group_size": 64, "actorder": "group"}}, "another order of inputs .actorder"),
    ],
)
def test_groups_of_compressed_tensors_are_refused_by_their_own_reason(
    group: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = COMPRESSED | {"config_groups": {"group_0": COMPRESSED["config_groups"]["group_0"] | group}}
    folder, _ = packed_folder(tmp_path, settings, compressed, symmetric=True)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder)


def test_experts_are_refused(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ, gptq, symmetric=True)
    path = folder / "model.safetensors"
    renamed = {key.replace("mlp.up_proj", "mlp.experts.3.up_proj"): value for key, value in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"has experts \(.*experts\.3\..* not supported in checkpoints of 4"
    ):
        load_model(folder)


@pytest.mark.parametrize(("settings", "pack"), [(GPTQ, gptq), (COMPRESSED, compressed)])
def test_modules_of_8_bits_are_named(
    settings: dict[str, Any], pack: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """As the setting `dynamic` of gptqmodel and `extra_config` of AutoRound allow."""
    folder, _ = packed_folder(tmp_path, settings, pack, symmetric=True)
    path, stem = folder / "model.safetensors", "model.layers.1.mlp.down_proj."
    found = load_file(path)
    for part, side in (("qweight", 0), ("qzeros", 1), ("weight_packed", 1)):
        if (key := f"{stem}{part}") in found:
            found[key] = found[key].repeat_interleave(2, side)
    save_file(found, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"weights of 8 bits in 'model\.layers\.1\.mlp\.down_proj'"):
        load_model(folder)


def test_modules_have_groups_of_their_own_if_they_are_declared(tmp_path: Path) -> None:
    declared = GPTQ | {"group_size": 128, "dynamic": {"+:.*": {"group_size": 64}, "-:lm_head": {}}}
    folder, _ = packed_folder(tmp_path, declared, gptq, symmetric=True)
    assert load_model(folder, dtype="float32").model.is_exact
    (tmp_path / "other").mkdir()
    folder, _ = packed_folder(tmp_path / "other", GPTQ | {"group_size": 128}, gptq, symmetric=True)
    with pytest.raises(ModelLoadError, match=r"needs groups of 128 of the \d* inputs, as config.json declares"):
        load_model(folder)


def test_matrices_of_another_shape_than_the_configuration_needs_are_refused(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ, gptq, symmetric=True)
    path = folder / "model.safetensors"
    found = load_file(path)
    last = max(int(key.split(".")[2]) for key in found if key.startswith("model.layers."))
    for part in ("qweight", "qzeros", "scales"):
        key = f"model.layers.{last}.mlp.gate_proj.{part}"
        found[key] = found[key].repeat_interleave(2, 1)
    save_file(found, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"'model.layers.\d.mlp.gate_proj.weight' has the shape \[512, 128\]"):
        load_model(folder)


@pytest.mark.parametrize(
    ("method", "reason"),
    [("some-method", "14 of its weights are missing"), ("auto-round", "auto-round")],
)
def test_methods_that_nothing_here_runs_are_refused(method: str, reason: str, tmp_path: Path) -> None:
    settings = GPTQ | {"quant_method": method, "packing_format": "auto_round:other"}
    folder, _ = packed_folder(tmp_path, settings, gptq, symmetric=True)
    message = f"quantized by '{method}', packing format .* nor transformers can run here .*{reason}"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder, dtype="float32")


def test_a_start_of_changed_files_replaces_the_packed_weights(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ, gptq, symmetric=True)
    first = logits(load_model(folder, dtype="float32"))
    ((copy, _),) = packed_folders()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert torch.equal(logits(load_model(folder, dtype="float32")), first)
    assert [found for found, _ in packed_folders()] == [copy]
    assert [found for found, _ in packed_folders(folder)] == [copy]
    assert len(list((tmp_path / "cache" / "blueprints").glob("*.json"))) == 1


def test_settings_that_changed_are_read_again(tmp_path: Path) -> None:
    folder, _ = packed_folder(tmp_path, GPTQ, gptq, symmetric=True)
    first = load_model(folder, dtype="float32")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": [7, 9]}), "utf-8")
    assert load_model(folder, dtype="float32").eos_ids == (7, 9) != first.eos_ids


def test_removing_a_model_leaves_packed_weights_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "cache" / "models"
    for name in ("foo", "foo-bar"):
        folder, _ = packed_folder(tmp_path / name, GPTQ, gptq, symmetric=True)
        models.mkdir(exist_ok=True)
        folder.rename(models / name)
        (models / name / "draftree.json").write_text(json.dumps({"source": name}), "utf-8")
        load_model(models / name, dtype="float32")
    kept = packed_folders(models / "foo-bar")
    assert (len(kept), len(packed_folders())) == (1, 2)
    assert run(["models", "remove", "foo"]) == 0
    assert "removed foo" in capsys.readouterr().err
    assert packed_folders() == kept


FILES = Path(__file__).parent / "packed_files"
KINDS = {
    "llmcompressor-symmetric": ("compressed-tensors", "Q4_0", 32),
    "llmcompressor-zeros": ("compressed-tensors", "Q4_1", 32),
    "llmcompressor-channel": ("compressed-tensors", "Q4_0", 64),
    "autoround-gptq-zeros": ("gptq", "Q4_1", 32),
    "autoround-awq-zeros": ("awq", "Q4_1", 32),
    "autoround-own": ("gptq", "Q4_0", 32),
}


def checkpoint(name: str) -> PackedCheckpoint:
    settings = quantization_of(FILES / name)
    assert settings is not None
    return PackedCheckpoint(FILES / name, settings)


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_is_rounded_to_a_step_near_that_of_the_source(name: str) -> None:
    method, kind, group = KINDS[name]
    found, source = checkpoint(name), load_file(FILES / "source" / "model.safetensors")
    assert (quantization_of(FILES / name) or {})["quant_method"] == method
    packed = [key for key in source if "proj" in key]
    assert len(packed) == 7
    for key in packed:
        codes, wanted = found._codes(key), source[key].float()
        assert (found.kind(key), codes.codes.shape[1] // codes.scales.shape[1]) == (kind, group)
        steps = codes.scales.abs().repeat_interleave(group, 1)
        # half a step, and what the largest number of a symmetric range loses
        limit = 1.1 if kind == "Q4_0" else 0.65
        assert ((found.values(key) - wanted).abs() <= limit * steps).all(), key
        assert (found.values(key) - wanted).pow(2).mean().sqrt() < 0.2 * wanted.pow(2).mean().sqrt()
    assert torch.equal(found.values("model.norm.weight"), source["model.norm.weight"].float())


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_files_are_those_of_the_values(name: str) -> None:
    found = checkpoint(name)
    config: Any = AutoConfig.from_pretrained(FILES / name, trust_remote_code=False)
    del config.quantization_config
    peer = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        for key, parameter in peer.named_parameters():
            parameter.copy_(found.values(key))
        tokens = torch.randint(3, 32, (40,), generator=torch.Generator().manual_seed(1)).tolist()
        wanted = peer(torch.tensor([tokens])).logits[0]
    loaded = load_model(FILES / name, dtype="float32")
    assert loaded.model.is_exact
    error = (at_once(loaded.model, tokens) - wanted).pow(2).mean().sqrt()
    assert error < 0.02 * (wanted.max() - wanted.min())  # inputs have 8 bits, head and embedding 6
