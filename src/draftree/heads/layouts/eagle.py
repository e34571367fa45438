"""Folders of EAGLE-1, EAGLE-2, EAGLE-3 and P-EAGLE, as their authors, SpecForge, SGLang and vLLM have them.

EAGLE-3 calls its layer `midlayer`, or has a norm of the state in its first layer; P-EAGLE also has `mask_hidden`.
Folders of EAGLE-1 and EAGLE-2 are alike: EAGLE-2 changed the trees, not the weights. Hidden states in `eagle_config`
are numbered by the layers that put them out, one less than ours. Without them the authors' choice is meant, which
depends on the number of the target's layers. Heads of EAGLE-3 are also written, for SGLang.

Sources: github.com/SafeAILab/EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840), github.com/sgl-project/SpecForge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import EAGLE, EAGLE3, LAST_LAYER, NORMS, PEAGLE, HeadConfig
from draftree.heads.layouts import HeadFolder, Values, layer_values, layers_json
from draftree.heads.vocabulary import EMBEDDING, OUTPUT

NAME = "eagle"
THEIRS, OURS = "midlayer.", "layers.0."
SETTINGS, FEATURES = "eagle_config", "eagle_aux_hidden_state_layer_ids"
MASK_HIDDEN, MASK_TOKEN = "mask_hidden", "ptd_token_id"
DEPTHS = {EAGLE: 5, EAGLE3: 7, PEAGLE: 7}
"""Levels that the authors' code trains or drafts; configurations do not name them."""
TARGET_LAYERS = {
    (4096, 32000): 32,  # Vicuna 7B
    (5120, 32000): 40,  # Vicuna 13B
    (4096, 128256): 32,  # Llama 3.1 8B and models distilled into it
    (8192, 128256): 80,  # Llama 3.3 70B
    (2560, 151936): 36,  # Qwen3 4B
    (4096, 151936): 36,  # Qwen3 8B
}
"""Number of layers of targets by their width and vocabulary, where these tell them apart."""


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout: `fc`, and an EAGLE-3 layer or a first layer without a norm before."""
    names = folder.shapes
    if "fc.weight" not in names or "hidden_norm.weight" in names:
        return False
    return _is_third(names) or (
        "layers.0.self_attn.q_proj.weight" in names and "layers.0.input_layernorm.weight" not in names
    )


def _is_third(names: Mapping[str, Any]) -> bool:
    return "layers.0.hidden_norm.weight" in names or any(name.startswith(THEIRS) for name in names)


def configure(folder: HeadFolder) -> HeadConfig:
    values = folder.values
    names = {_renamed(name, THEIRS, OURS) for name in folder.shapes}
    known: dict[str, Any] = {
        **layer_values(values),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in names,
        "output_bias": "layers.0.self_attn.o_proj.bias" in names,
        "fc_bias": "fc.bias" in names,
        "own_embedding": EMBEDDING in names,
        "own_output": OUTPUT in names,
    }
    if not _is_third(folder.shapes):
        return HeadConfig(
            **known,
            kind=EAGLE,
            features=(LAST_LAYER,),
            target_hidden=known["hidden"],
            draft_vocab_size=known["vocab_size"],
            depth=DEPTHS[EAGLE],
        )
    if known["num_layers"] > 1 and "layers.1.input_layernorm.weight" not in names:
        raise ModelLoadError(f"it is an EAGLE-3 head of {known['num_layers']} layers: use one of 1")
    kind = PEAGLE if MASK_HIDDEN in names else EAGLE3
    target_hidden = values.whole("target_hidden_size", known["hidden"])
    known |= {name: values.flag(name) for name in NORMS}
    known |= _features(values, (target_hidden, known["vocab_size"]))
    return HeadConfig(
        **known,
        kind=kind,
        target_hidden=target_hidden,
        draft_vocab_size=values.whole("draft_vocab_size", known["vocab_size"]),
        depth=DEPTHS[kind],
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        mask_token_id=values.whole(MASK_TOKEN) if kind == PEAGLE else None,
    )


def _features(values: Values, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the hidden states, and the number of the target's layers if they follow from it."""
    settings = values.part(SETTINGS, optional=True)
    if settings.get(FEATURES):
        return {"features": tuple(layer + 1 for layer in settings.layers(FEATURES))}
    if (layers := TARGET_LAYERS.get(sizes)) is not None:
        return {"features": (2, layers // 2, layers - 3), "target_layers": layers}
    raise ModelLoadError(
        f'config.json does not have {FEATURES}: for a target of N layers add "{SETTINGS}": {{"{FEATURES}": '
        "[1, N // 2 - 1, N - 4]}, with the numbers in place of N"
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    held = {_renamed(name, THEIRS, OURS): tensor for name, tensor in folder.tensors().items()}
    if (hidden := held.get(MASK_HIDDEN)) is not None:
        held[MASK_HIDDEN] = hidden.reshape(1, 1, -1)
    return held


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
