"""Random models in the shapes of real ones: pass times do not depend on the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of the Llama architecture."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = HEAD_DIM
    tie_word_embeddings: bool = False


SHAPES = {
    "tiny": Shape(256, 64, 128, 2, 4, 2, 16),
    "smollm2-135m": Shape(49_152, 576, 1536, 30, 9, 3, 64, True),
    "tinyllama-1.1b": Shape(32_000, 2048, 5632, 22, 32, 4, 64),
    "1b": Shape(128_256, 2048, 8192, 16, 32, 8, 64, True),
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8),
    "32b": Shape(152_064, 5120, 27_648, 64, 40, 8),
}


def build(shape: Shape, *, context: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A random model, made where it will run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", **asdict(shape), max_position_embeddings=context, eos_token_id=None, pad_token_id=0
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def weight_bytes(model: Any) -> int:
    """Bytes that a pass reads: all but an embedding that is not the head as well."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total - (0 if head is embedding else embedding.numel() * embedding.element_size())


def ids(count: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Tokens of a prompt that means nothing."""
    return [(7 + 31 * place + 17 * salt) % vocab_size for place in range(count)]
