"""Checkpoints of 4 bits that other packages wrote: weights near those of their source, in the right places."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftree.loading.load import load_model
from draftree.weights.packed_checkpoint import PackedCheckpoint, quantization_of
from slot_samples import at_once

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


@pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_values(name: str) -> None:
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
