"""Writes random models with recurrent layers, in shapes of real ones, as folders and as GGUF files.

    python benchmarks/random_hybrids.py lfm2-0.7b FOLDER --quantize build/peers/llama.cpp/build/bin/llama-quantize

`FOLDER` gets the folder `lfm2-0.7b` and the files `lfm2-0.7b-bf16.gguf`, `-q8_0` and `-q4_k_m`, which have the
same weights; the last two are written by llama.cpp. Measure them with `four_bits.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from hybrid_gguf import FULL, RECURRENT, write_hybrid

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2-0.7b": (
        "lfm2",
        "lfm2",
        {
            "vocab_size": 65_536,
            "hidden_size": 1536,
            "intermediate_size": 6912,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 16,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "layer_types": [FULL if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        },
    ),
    "qwen3.5-0.8b": (
        "qwen35",
        "qwen3_5_text",
        {
            "vocab_size": 248_320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "layer_types": [*[RECURRENT] * 3, FULL] * 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
    ),
    "granite-h-0.8b": (  # half of the layers of Granite 4 H 1B
        "granitehybrid",
        "granitemoehybrid",
        {
            "vocab_size": 100_352,
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_hidden_layers": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_state": 128,
            "layer_types": [FULL if layer in (5, 15) else RECURRENT for layer in range(20)],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1 / 128,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
}
"""The family of `hybrid_gguf`, the model type, and the sizes."""


def random_model(model_type: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 259, "pad_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(common | settings))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantize", type=Path, required=True)
    given = parser.parse_args()
    family, model_type, settings = SHAPES[given.shape]
    model = random_model(model_type, settings)
    given.target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(given.target / given.shape)
    plain = given.target / f"{given.shape}-bf16.gguf"
    write_hybrid(family, plain, model=model, kind="BF16")
    for kind in ("q8_0", "q4_k_m"):
        subprocess.run([given.quantize, plain, given.target / f"{given.shape}-{kind}.gguf", kind.upper()], check=True)


if __name__ == "__main__":
    main()
