"""Random assistants of Gemma 4 with their folders. Not a test itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from families import VOCAB_SIZE

LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


def assistant(
    folder: Path, *, model_type: str = "gemma4_assistant", is_ordered: bool = False, target: Any = None, **layer: Any
) -> Any:
    """Transformers' own assistant with random weights, also saved; for a target of the family `gemma4_text`.

    `layer`: values of its decoder layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    texts = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "layer_types": LAYERS, "num_kv_shared_layers": len(LAYERS), "sliding_window": 6,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "model_type": texts[model_type],
    }  # fmt: skip
    if model_type == "gemma4_unified_assistant":
        sizes = {name: value for name, value in sizes.items() if "per_layer_input" not in name}
    hidden = 32 if target is None else target.config.get_text_config().hidden_size
    config: Any = AutoConfig.for_model(
        model_type, text_config={**sizes, **layer}, backbone_hidden_size=hidden, use_ordered_embeddings=is_ordered,
        num_centroids=VOCAB_SIZE // 8, centroid_intermediate_top_k=2, attn_implementation="eager",
    )  # fmt: skip
    _let_all_layers_share(type(config.text_config))
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config).eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(7)
    for name, part in sorted([*model.named_parameters(), *model.named_buffers()]):
        if name.endswith("token_ordering"):
            part.copy_(torch.randperm(VOCAB_SIZE, generator=noise))
        elif part.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
            spread = torch.randn(part.shape, generator=noise) * 0.3
            part.copy_(1 + spread if part.dim() == 1 else spread)
    model.save_pretrained(folder)
    return model


def _let_all_layers_share(config: Any) -> None:
    """Let a configuration of transformers 5.23 describe layers that all read keys of others, which it cannot."""
    theirs = config.kv_sharing_modes
    if isinstance(theirs, property) and theirs.fget is not None:
        read = theirs.fget

        def modes(self: Any) -> Any:
            is_all = self.num_kv_shared_layers == self.num_hidden_layers
            return ["reuse"] * self.num_hidden_layers if is_all else read(self)

        config.kv_sharing_modes = property(modes)


def their_levels(
    model: Any, embedding: Any, tokens: list[int], hidden: Tensor, keys: dict[str, tuple[Tensor, Tensor]], position: int
) -> list[Tensor]:
    """Logits of a chain of tokens by transformers' class, the first after the text's last token, each (vocabulary,).

    `hidden`: the target's state before the first token, shape (hidden,).
    """
    levels, state = [], hidden.view(1, 1, -1)
    for token in tokens:
        embedded = embedding(torch.tensor([[token]]))
        result = model(
            inputs_embeds=torch.cat((embedded, state), dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=keys,
        )
        state = result.last_hidden_state
        levels.append(result.logits[0, 0])
    return levels
