"""Rotary positions of heads: the same bits as transformers computes, without importing it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftree.core.errors import ModelLoadError
from draftree.heads.layers import Rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
FACTORS = {
    "short_factor": [1.0 + 0.01 * index for index in range(32)],
    "long_factor": [1.0 + 0.5 * index for index in range(32)],
}
ROPES = {
    "nothing": {},
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "whole theta": {"rope_type": "default", "rope_theta": 1000000},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    "llama3 of a smaller factor": {**LLAMA3, "factor": 3, "original_max_position_embeddings": 2048},
    "llama3 without a trained length": LLAMA3,
    "yarn": YARN,
    "yarn of a large base": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn that keeps fractions": {**YARN, "truncate": False},
    "yarn with a factor of attention": {**YARN, "attention_factor": 0.5},
    "yarn of DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn whose factor is a ratio": {**YARN, "factor": None},
    "yarn of one step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "longrope": {**LONG, **FACTORS},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "longrope with a factor": {**LONG, **FACTORS, "factor": 8.0},
    "longrope with a factor of attention": {**LONG, **FACTORS, "attention_factor": 1.25},
    "longrope of a short context": {**LONG, **FACTORS, "original_max_position_embeddings": 65536},
}


def theirs(rope, *, head_dim, max_length):
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scaling_have_the_bits_of_transformers(name):
    rope = ROPES[name]
    with torch.device("meta"):  # heads are built there
        ours = Rotary(rope, 64, 16384)
    reference = theirs(rope, head_dim=64, max_length=16384)
    assert ours.frequencies == tuple(reference.inv_freq.tolist())
    assert ours.scaling == reference.attention_scaling


@pytest.mark.parametrize("head_dim", [2, 8, 80, 128])
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_frequencies_have_the_bits_of_transformers_in_heads_of_every_width(name, head_dim):
    reference = theirs(ROPES[name], head_dim=head_dim, max_length=16384)
    assert Rotary(ROPES[name], head_dim, 16384).frequencies == tuple(reference.inv_freq.tolist())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "two"},
        {"rope_type": "yarn"},
        {**YARN, "factor": -1.0, "mscale": "x", "mscale_all_dim": 1.0, "beta_fast": "y"},
        {**LONG, **FACTORS, "short_factor": [1.0, 2.0]},
        {**LONG, "long_factor": [1.0]},
    ],
)
def test_bad_parameters_are_refused_by_name(rope):
    with pytest.raises(ModelLoadError, match=f"rotary positions .*{rope['rope_type']}.* cannot be used"):
        Rotary(rope, 64, 16384)


@pytest.mark.parametrize("kind", ["dynamic", "x"])
def test_types_whose_frequencies_depend_on_the_length_and_unknown_ones_are_refused(kind):
    with pytest.raises(ModelLoadError, match=f"type '{kind}' are not supported: default, linear, llama3"):
        Rotary({"rope_type": kind, "factor": 2.0}, 64, 1024)
