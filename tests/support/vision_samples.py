"""Tiny random image-text models, and prompts with images for them. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from families import COMMON, HEAD_DIM, MIXED, WINDOW, _fill, prompts

IMAGE, START, END = 91, 92, 93
SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 90,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _text(kind: str, **changes: Any) -> dict[str, Any]:
    return COMMON | {"model_type": kind} | changes


GEMMA3: dict[str, Any] = {
    "text_config": _text("gemma3_text", **HEAD_DIM, **MIXED, query_pre_attn_scalar=8),
    "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}
GEMMA4: dict[str, Any] = {
    "text_config": _text(
        "gemma4_text",
        **HEAD_DIM,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=96,
        global_head_dim=16,
    ),
    "vision_config": {
        "model_type": "gemma4_vision",
        **SIGLIP,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "pooling_kernel_size": 2,
        "default_output_length": 4,
        "position_embedding_size": 16,
    },
    "audio_config": None,
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
}
LLAVA: dict[str, Any] = {
    "text_config": _text("llama"),
    "vision_config": {"model_type": "clip_vision_model", **SIGLIP, "image_size": 4},
    "image_token_index": IMAGE,
    "vision_feature_layer": -1,
}
MISTRAL3: dict[str, Any] = {
    "text_config": _text("mistral", sliding_window=None, head_dim=8),
    "vision_config": {"model_type": "pixtral", **SIGLIP, "head_dim": 8},
    "image_token_index": IMAGE,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
}
QWEN2_VL: dict[str, Any] = {
    "text_config": _text("qwen2_vl_text", rope_parameters=MROPE),
    "vision_config": QWEN_VISION | {"embed_dim": 16, "mlp_ratio": 2, "hidden_size": 32},
    **QWEN_IDS,
}
QWEN25_VL: dict[str, Any] = {
    "text_config": _text("qwen2_5_vl_text", rope_parameters=MROPE),
    "vision_config": QWEN_VISION | {"out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [0]},
    **QWEN_IDS,
}
QWEN3_VL: dict[str, Any] = {
    "text_config": _text("qwen3_vl_text", **HEAD_DIM, rope_parameters=MROPE | {"mrope_interleaved": True}),
    "vision_config": QWEN_VISION
    | {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    **QWEN_IDS,
}
IDEFICS3: dict[str, Any] = {
    "text_config": _text("llama"),
    "vision_config": {**SIGLIP, "image_size": 8},
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "pad_token_id": 0,
}
QWEN35: dict[str, Any] = {
    "text_config": _text(
        "qwen3_5_text",
        **HEAD_DIM,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        rope_parameters=MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
    ),
    "vision_config": QWEN_VISION | {"out_hidden_size": 32, "num_position_embeddings": 16},
    **QWEN_IDS,
}
"""With recurrent layers: `AutoModelForCausalLM` reads its text decoder alone."""
OTHER_VISION: dict[str, dict[str, Any]] = {"idefics3": IDEFICS3, "smolvlm": IDEFICS3, "qwen3_5": QWEN35}
"""Families that are tested with their processors alone."""
VISION: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "llava": LLAVA,
    "mistral3": MISTRAL3,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN25_VL,
    "qwen3_vl": QWEN3_VL,
}
"""Families whose prompts may hold images."""


WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": MROPE | {"mrope_section": [2, 2, 4]},
}
"""Sizes of a text decoder that native kernels run."""


def _wide(name: str) -> dict[str, Any]:
    config = (VISION | OTHER_VISION)[name]
    changes = {key: value for key, value in WIDE.items() if key in config["text_config"]}
    vision = {"out_hidden_size": 64} if "out_hidden_size" in config["vision_config"] else {}
    if name == "qwen2_vl":
        vision = {"hidden_size": 64}
    return config | {
        "text_config": config["text_config"] | changes,
        "vision_config": config["vision_config"] | vision,
    }


@functools.cache
def vision_model(name: str, *, is_wide: bool = False) -> Any:
    """A tiny model of the family as its user has loaded it; a wide one has a text decoder for native kernels."""
    config = AutoConfig.for_model(name, **(_wide(name) if is_wide else (VISION | OTHER_VISION)[name]))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _fill(model)
    return model.eval()


@dataclass(frozen=True, slots=True)
class _Pictures:
    """Inputs for some images, and how many tokens represent each."""

    inputs: dict[str, Tensor]
    num_tokens: int


def _pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def _square(count: int) -> _Pictures:
    return _Pictures({"pixel_values": _pixels(count, 3, 8, 8)}, 4)


def _small(count: int) -> _Pictures:
    return _Pictures({"pixel_values": _pixels(count, 3, 4, 4)}, 4)


def _sized(count: int) -> _Pictures:
    sizes = torch.tensor([[8, 8]] * count)
    return _Pictures({"pixel_values": _pixels(count, 3, 8, 8), "image_sizes": sizes}, 4)


def _grid(count: int) -> _Pictures:
    grid = torch.tensor([[1, 4, 8]] * count)
    return _Pictures({"pixel_values": _pixels(32 * count, 24), "image_grid_thw": grid}, 8)


def _patches(count: int) -> _Pictures:
    places = torch.tensor([[x, y] for y in range(4) for x in range(4)]).repeat(count, 1, 1)
    return _Pictures({"pixel_values": _pixels(count, 16, 12).sigmoid(), "image_position_ids": places}, 4)


PICTURES: dict[str, Callable[[int], _Pictures]] = {
    "gemma3": _square,
    "gemma4": _patches,
    "llava": _small,
    "mistral3": _sized,
    "qwen2_vl": _grid,
    "qwen2_5_vl": _grid,
    "qwen3_vl": _grid,
}


def with_images(name: str, *lengths: int) -> dict[str, Tensor]:
    """Prompts with an image each and so many tokens of text, padded at the left."""
    pictures = PICTURES[name](len(lengths))
    rows = []
    for text in prompts(*lengths):
        rows.append([text[0], START, *[IMAGE] * pictures.num_tokens, END, *(token % 90 for token in text)])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    kinds = (ids == IMAGE).long()
    key = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
    kind = {key: kinds} if name.startswith(("gemma", "qwen")) else {}
    return {"input_ids": ids, "attention_mask": mask, **kind, **pictures.inputs}
