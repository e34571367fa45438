"""MTP heads inside the folder of a target, and those that speculators writes.

`PLACES` has where publishers store the first MTP layer, its names, and how it differs from the layers of its target.
Only the first MTP layer is read, and used for every level. Names inside the layer are those that transformers gives
the target's layers.

Sources: transformers 5 (`MtpModel`) and vLLM 0.32.0 (`model_executor/models/*_mtp.py`) for names and differences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import LAST_LAYER, MTP, SLIDING, HeadConfig
from draftree.heads.layouts import HeadFolder, Values
from draftree.heads.vocabulary import OUTPUT

NAME = "mtp"
BLOCK = "block."
HIDDEN_FIRST = "mtp_hidden_states_first"
"""Value of a configuration with which the state comes before the embedding."""
LAYER_TYPES, MLP_TYPES, DENSE, SPARSE = "mtp_layer_types", "mtp_mlp_layer_types", "dense", "sparse"
"""Values of a configuration with the kinds of MTP layers."""
NEXT = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "norm.",
    "layers.0.": BLOCK,
}
DEEPSEEK = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "norm.",
    "shared_head.output.": "lm_head.",
    "final_layernorm.": "norm.",
    "pre_mlp_layernorm.": f"{BLOCK}post_attention_layernorm.",
    "": BLOCK,
}
SPECULATORS = {
    "input_proj.": "eh_proj.",
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "final_layernorm.": "norm.",
    "": BLOCK,
}
OF_SPECULATORS = "mtp_layers.0.", SPECULATORS
"""Beginning of names in folders of speculators."""
ERNIE = {"emb_norm.0.": "enorm.", "hidden_norm.0.": "hnorm.", "linear_proj.0.": "eh_proj.", "block.0.": BLOCK}
NEMOTRON = {"0.enorm.": "enorm.", "0.hnorm.": "hnorm.", "0.eh_proj.": "eh_proj.", "": BLOCK}


@dataclass(frozen=True, slots=True)
class Place:
    """Where publishers store an MTP layer.

    Attributes:
        prefix: regular expression of the beginning of its names; LAYERS stands for the number of the target's layers.
        marker: name after the prefix that shows the place.
        names: beginnings of our names by theirs; the first that fits counts.
        layer: how its configuration differs from the target's.
    """

    prefix: str
    marker: str
    names: Mapping[str, str]
    layer: Mapping[str, Any] = field(default_factory=dict)


PLACES = {
    "Qwen3-Next, Qwen3.5, Mellum": Place(r"(?:model\.|language_model\.)*mtp\.", "fc.weight", NEXT),
    "DeepSeek, GLM, Step, Hunyuan, Ling": Place(
        r"(?:model\.|language_model\.)*layers\.LAYERS\.", "eh_proj.weight", DEEPSEEK
    ),
    "MiMo": Place(
        r"model\.mtp_layers\.0\.", "input_proj.weight", SPECULATORS, {"model_type": "qwen2", HIDDEN_FIRST: True}
    ),
    "MiMo-V2": Place(r"model\.mtp\.layers\.0\.", "hnorm.weight", DEEPSEEK, {LAYER_TYPES: [SLIDING]}),
    "ERNIE 4.5": Place(r"model\.mtp_", "linear_proj.0.weight", ERNIE),
    "Nemotron-H": Place(r"(?:language_model\.)?mtp\.layers\.", "0.eh_proj.weight", NEMOTRON),
}
SHARED = ("shared_head.head.weight", "embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq")
"""Copies of the target's tensors inside MTP layers."""
ROTATED_ALONE = ("exaone4", "exaone_moe")
"""Types of models whose layers with all keys have no rotary positions, except the MTP layer."""
INDEXER = ".indexer."
"""In names of tensors that choose the keys of long texts, in whose place the last keys are read."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_LAST_NORM = re.compile(r"\d+\.final_layernorm\.")


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder is that of a target with an MTP layer."""
    return _place(folder) is not None


def configure(folder: HeadFolder) -> HeadConfig:
    """Return the configuration of the MTP layer of a target's folder."""
    found = _place(folder)
    assert found is not None, "recognised before it is read"
    prefix, place = found
    values = _text_config(folder)
    if values.get("model_type") in ROTATED_ALONE:
        raise ModelLoadError("its MTP layer rotates keys, and other layers like it do not: not supported")
    shapes = shapes_of(folder, prefix, place.names)
    return layer_config(values, shapes, changes=place.layer, target_name=str(folder.path))


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    found = _place(folder)
    assert found is not None, "recognised before it is read"
    prefix, place = found
    return renamed(folder, prefix, place.names)


def _place(folder: HeadFolder) -> tuple[str, Place] | None:
    """Return the beginning of the names of the MTP layer, and its place; None for a folder without one."""
    layers = str(_text_config(folder).get("num_hidden_layers"))
    for place in PLACES.values():
        wanted = re.compile(f"({place.prefix.replace('LAYERS', layers)}){re.escape(place.marker)}")
        if match := next(filter(None, map(wanted.fullmatch, folder.shapes)), None):
            return match[1], place
    return None


def _text_config(folder: HeadFolder) -> Values:
    """Return the configuration of the language model, which some targets hold inside another."""
    inside = folder.values.part("text_config", optional=True)
    return inside if inside.content else folder.values


def shapes_of(folder: HeadFolder, prefix: str, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors by our names."""
    stored = {name.removeprefix(prefix): shape for name, shape in folder.shapes.items() if name.startswith(prefix)}
    return {_renamed(name, names): shape for name, shape in stored.items() if name not in SHARED}


def renamed(folder: HeadFolder, prefix: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    held = folder.tensors(lambda name: name.startswith(prefix) and INDEXER not in name)
    stripped = {name.removeprefix(prefix): tensor for name, tensor in held.items()}
    ours = {_renamed(name, names): stripped[name] for name in stripped if name not in SHARED}
    kinds = (values.text("model_type") for values in (folder.values, _text_config(folder)))
    return _with_joined_experts(_as_in_transformers(ours, dict.fromkeys(kinds)))


def _renamed(name: str, names: Mapping[str, str]) -> str:
    if names is NEMOTRON and _LAST_NORM.match(name):
        return _LAST_NORM.sub("norm.", name)
    name = name.removeprefix("transformer.")  # in folders of Step
    theirs = next((start for start in names if name.startswith(start)), None)
    return name if theirs is None else names[theirs] + name.removeprefix(theirs)


def _as_in_transformers(tensors: Mapping[str, Tensor], model_types: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors with the names that transformers gives those of the target's layers when it reads them."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    changes = [change for kind in model_types for change in get_checkpoint_conversion_mapping(kind) or ()]
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    result = {}
    for name, tensor in tensors.items():
        if name.startswith(BLOCK):
            inside = "." + name.removeprefix(BLOCK)
            for renaming in renamings:
                inside = renaming.rename_source_key(inside)[0]
            name = BLOCK + inside.removeprefix(".")
        result[name] = tensor
    return result


def layer_config(
    layer: Values,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    depth: int = 1,
    target_name: str,
    target_architecture: str = "",
) -> HeadConfig:
    """Return the configuration of an MTP head.

    Args:
        layer: configuration of its target, or of its layer.
        shapes: shapes of its stored tensors by our names; None for a head like the target's own layers.
        changes: how its layer differs.
    """
    changes, names = changes or {}, shapes or {"norm.weight": ()}
    layer.require("hidden_size", "num_attention_heads", "vocab_size", "model_type")
    hidden, heads, vocab_size = (layer.whole(name) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    # keys of latent attention are expanded to all heads, and padded to the width of queries
    latent = layer.whole("qk_nope_head_dim", 0) + layer.whole("qk_rope_head_dim", 0)
    key_width = latent or layer.whole("head_dim", hidden // max(heads, 1))
    value_width = layer.whole("v_head_dim", key_width)
    kv_heads = heads if latent else layer.whole("num_key_value_heads", heads)
    for name, shape in names.items():  # layers of one target may have several numbers of heads
        if not latent and name.endswith(".k_proj.weight") and shape[0] % key_width == 0:
            kv_heads = shape[0] // key_width
        if name.endswith(".o_proj.weight") and shape[-1] % value_width == 0:
            heads = shape[-1] // value_width
    mlp = {MLP_TYPES: [SPARSE if any(".experts." in name for name in names) else DENSE]} if shapes else {}
    longest = layer.whole("max_position_embeddings", 2048)
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
        num_kv_heads=heads if latent else kv_heads,
        head_dim=max(key_width, value_width),
        intermediate=layer.whole("intermediate_size", hidden),
        # an index chooses among more keys than it returns
        max_length=min(longest, layer.whole("index_topk", longest)),
        own_output=OUTPUT in names,
        has_norm="norm.weight" in names,
        layer={**layer.content, **mlp, **changes},
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
        parts = {part for _, part in products} | ({"gate", "up"} if (0, "gate") in products else set())
        if missing := [f"{name}.{i}.{p}_proj.weight" for i in range(count) for p in parts if (i, p) not in products]:
            raise ModelLoadError(f"an MTP layer lacks products of experts: missing: {', '.join(missing[:12])}")
        stacked = {part: torch.stack([products[i, part] for i in range(count)]) for part in parts}
        if "gate" in stacked:
            stacked["gate_up"] = torch.cat((stacked.pop("gate"), stacked.pop("up")), dim=1)
        joined |= {f"{name}.{part}_proj": tensor for part, tensor in stacked.items()}
    return joined
