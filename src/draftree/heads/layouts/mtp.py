"""MTP heads inside the folder of a target, and those that speculators writes.

* DeepSeek, GLM: `model.layers.N.` with N the number of layers, and the decoder layer's tensors beside `eh_proj`.
* Qwen3-Next, Qwen3.5, Mellum: `mtp.fc`, `mtp.pre_fc_norm_*`, `mtp.layers.0.*`, `mtp.norm`.
* speculators: `mtp_layers.0.*`.

Only the first MTP layer is read, and used for every level.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import LAST_LAYER, MTP, HeadConfig
from draftree.heads.layouts import HeadFolder, Values, rope_of

NAME = "mtp"
BLOCK = "block."
NEXT = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "norm.",
    "layers.0.": BLOCK,
}
DEEPSEEK = {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj.", "shared_head.norm.": "norm.", "": BLOCK}
SPECULATORS = {
    "input_proj.": "eh_proj.",
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "final_layernorm.": "norm.",
    "": BLOCK,
}
SHARED = ("shared_head.head.weight", "embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq")
"""Copies of the target's tensors inside MTP layers."""
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MAIN = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder is that of a target with an MTP layer."""
    return _prefix(folder) is not None


def configure(folder: HeadFolder) -> HeadConfig:
    """Return the configuration of the MTP layer of a target's folder."""
    return layer_config(_text_config(folder), depth=1, target_name=str(folder.path))


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    place = _prefix(folder)
    assert place is not None, "recognised before it is read"
    return renamed(folder, *place)


def _prefix(folder: HeadFolder) -> tuple[str, dict[str, str]] | None:
    names = folder.shapes
    inside = next((match.group() for match in map(_MAIN.match, names) if match), None)
    if inside is not None and f"{inside}fc.weight" in names:
        return inside, NEXT
    layers = _text_config(folder).get("num_hidden_layers")
    prefix = f"model.layers.{layers}."
    return (prefix, DEEPSEEK) if f"{prefix}eh_proj.weight" in names else None


def _text_config(folder: HeadFolder) -> Values:
    """Return the configuration of the language model, which some targets hold inside another."""
    inside = folder.values.part("text_config", optional=True)
    return inside if inside.content else folder.values


def renamed(folder: HeadFolder, prefix: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    held = folder.tensors(lambda name: name.startswith(prefix))
    stripped = {name.removeprefix(prefix): tensor for name, tensor in held.items()}
    return _with_joined_experts({_renamed(name, names): stripped[name] for name in stripped if name not in SHARED})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    theirs = next((start for start in names if name.startswith(start)), None)
    return name if theirs is None else names[theirs] + name.removeprefix(theirs)


def layer_config(layer: Values, *, depth: int, target_name: str, target_architecture: str = "") -> HeadConfig:
    """Return the configuration of an MTP head."""
    layer.require("hidden_size", "num_attention_heads", "vocab_size", "model_type")
    hidden, heads, vocab_size = (layer.whole(name) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    # keys of latent attention are expanded to all heads, and padded to the width of queries
    latent = layer.whole("qk_nope_head_dim", 0) + layer.whole("qk_rope_head_dim", 0)
    width = max(latent, layer.whole("v_head_dim", 0)) if latent else layer.whole("head_dim", hidden // max(heads, 1))
    return HeadConfig(
        kind=MTP,
        features=(LAST_LAYER,),
        target_hidden=hidden,
        hidden=hidden,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        depth=depth,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads if latent else layer.whole("num_key_value_heads", heads),
        head_dim=width,
        intermediate=layer.whole("intermediate_size", hidden),
        epsilon=layer.number("rms_norm_eps", 1e-6),
        rope=rope_of(layer),
        max_length=layer.whole("max_position_embeddings", 2048),
        own_output=False,
        layer=dict(layer.content),
        target_name=target_name,
        target_architecture=target_architecture,
    )


def _with_joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of all experts in one, as transformers has them."""
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            joined[name] = tensor
    for name, products in experts.items():
        count = 1 + max(index for index, _ in products)
        missing = [
            f"{name}.{i}.{part}_proj.weight"
            for i in range(count)
            for part in ("gate", "up", "down")
            if (i, part) not in products
        ]
        if missing:
            raise ModelLoadError(f"an MTP layer lacks products of experts: missing: {', '.join(missing[:12])}")
        both = [torch.cat((products[i, "gate"], products[i, "up"])) for i in range(count)]
        joined[f"{name}.gate_up_proj"] = torch.stack(both)
        joined[f"{name}.down_proj"] = torch.stack([products[i, "down"] for i in range(count)])
    return joined
