"""Folders of EAGLE-1, EAGLE-2 and EAGLE-3, as their authors, SpecForge and SGLang write them.

EAGLE-3 calls its layer `midlayer`. It is recognised by that name. Folders of EAGLE-1 and EAGLE-2 are alike: EAGLE-2
changed the trees, not the weights. Hidden states in `eagle_config` are numbered by the layers that put them out, one
less than ours. Heads of EAGLE-3 are also written, for SGLang.

Sources: github.com/SafeAILab/EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840), github.com/sgl-project/SpecForge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import EAGLE, EAGLE3, LAST_LAYER, HeadConfig
from draftree.heads.layouts import HeadFolder, layer_values, layers_json
from draftree.heads.vocabulary import EMBEDDING, OUTPUT

NAME = "eagle"
THEIRS, OURS = "midlayer.", "layers.0."
SETTINGS, FEATURES = "eagle_config", "eagle_aux_hidden_state_layer_ids"
DEPTHS = {EAGLE: 5, EAGLE3: 7}
"""Levels that the authors' code trains or drafts; configurations do not name them."""


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout: `fc`, and a `midlayer` or a first layer without a norm before it."""
    names = folder.shapes
    if "fc.weight" not in names or "hidden_norm.weight" in names:
        return False
    return any(name.startswith(THEIRS) for name in names) or (
        "layers.0.self_attn.q_proj.weight" in names and "layers.0.input_layernorm.weight" not in names
    )


def configure(folder: HeadFolder) -> HeadConfig:
    values = folder.values
    names = {_renamed(name, THEIRS, OURS) for name in folder.shapes}
    is_third = any(name.startswith(THEIRS) for name in folder.shapes)
    known = {
        **layer_values(values),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in names,
        "output_bias": "layers.0.self_attn.o_proj.bias" in names,
        "fc_bias": "fc.bias" in names,
        "own_embedding": EMBEDDING in names,
        "own_output": OUTPUT in names,
    }
    if not is_third:
        return HeadConfig(
            **known,
            kind=EAGLE,
            features=(LAST_LAYER,),
            target_hidden=known["hidden"],
            draft_vocab_size=known["vocab_size"],
            depth=DEPTHS[EAGLE],
        )
    if known["num_layers"] > 1:
        raise ModelLoadError(f"it is an EAGLE-3 head of {known['num_layers']} layers: use one of 1")
    settings = values.part(SETTINGS, optional=True)
    if not settings.get(FEATURES):
        raise ModelLoadError(
            f'config.json does not have {FEATURES}: for a target of N layers add "{SETTINGS}": {{"{FEATURES}": '
            "[1, N // 2 - 1, N - 4]}, with the numbers in place of N"
        )
    return HeadConfig(
        **known,
        kind=EAGLE3,
        features=tuple(layer + 1 for layer in settings.layers(FEATURES)),
        target_hidden=values.whole("target_hidden_size", known["hidden"]),
        draft_vocab_size=values.whole("draft_vocab_size", known["vocab_size"]),
        depth=DEPTHS[EAGLE3],
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    return {_renamed(name, THEIRS, OURS): tensor for name, tensor in folder.tensors().items()}


def values(config: HeadConfig) -> dict[str, Any]:
    """Return the content of `config.json` for a head of EAGLE-3 whose features are not negative."""
    return {
        **layers_json(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,  # True would replace the output head by the embedding
        SETTINGS: {FEATURES: [layer - 1 for layer in config.features], "use_aux_hidden_state": True},
    }


def with_their_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a head of EAGLE-3 by the names of this layout."""
    return {_renamed(name, OURS, THEIRS): tensor for name, tensor in tensors.items()}


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
