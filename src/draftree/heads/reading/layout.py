"""Interface of layouts, and parts that their readers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import HeadConfig
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.vocabulary import DraftVocabulary

MAPS = ("d2t", "t2d")
"""Vocabulary maps: offsets of the tokens that can be drafted, and whether a token can be drafted."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of the target that some layouts leave out.

    Attributes:
        hidden: width of its hidden states.
        vocab_size: width of its logits.
        num_layers: number of its layers.
    """

    hidden: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class ReadHead:
    """A head as read from its folder.

    Attributes:
        config: its configuration.
        vocabulary: tokens that it can propose.
        tensors: its tensors by our names (`tensor_shapes`).
        layout: name of the layout.
    """

    config: HeadConfig
    vocabulary: DraftVocabulary
    tensors: dict[str, Tensor]
    layout: str


class Layout(Protocol):
    """A module that reads one layout."""

    NAME: str

    def recognise(self, folder: HeadFolder) -> bool:
        """Return whether the folder has this layout."""

    def configure(self, folder: HeadFolder, target: TargetFacts | None) -> HeadConfig:
        """Return the configuration, without reading values of tensors.

        Raises:
            ModelLoadError: values are missing or not supported.
            ConfigurationError: values contradict each other.
        """

    def tensors(self, folder: HeadFolder) -> dict[str, Tensor]:
        """Return the tensors by our names, with the vocabulary maps.

        Raises:
            ModelLoadError: a file is missing or damaged.
        """


def vocabulary_of(maps: Mapping[str, Tensor], config: HeadConfig, folder: HeadFolder) -> DraftVocabulary:
    """Return the vocabulary of the maps.

    Raises:
        ModelLoadError: a reduced vocabulary has no map, or the maps contradict each other or the configuration.
    """
    offsets, mask = maps.get("d2t"), maps.get("t2d")
    if offsets is None:
        if not config.is_full:
            raise ModelLoadError(
                f"'{folder.path}' has a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens, "
                "and no tensor d2t that names them"
            )
        return DraftVocabulary.full(config.vocab_size)
    if offsets.numel() != config.draft_vocab_size:
        raise ModelLoadError(
            f"'{folder.path}' has d2t of {offsets.numel()} entries, and draft_vocab_size is {config.draft_vocab_size}"
        )
    vocabulary = DraftVocabulary.from_offsets(offsets, config.vocab_size)
    if mask is not None and not torch.equal(mask.bool(), vocabulary.mask()):
        raise ModelLoadError(f"'{folder.path}' has maps d2t and t2d that contradict each other: one is damaged")
    return vocabulary


def needed(config: Mapping[str, Any], names: Sequence[str], folder: HeadFolder) -> list[Any]:
    """Return values of a configuration.

    Raises:
        ModelLoadError: some are missing.
    """
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ModelLoadError(f"'{folder.path}' has a config.json without {', '.join(missing)}: they are needed")
    return [config[name] for name in names]


def rope_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary positions in the form of `HeadConfig.rope`, from older forms of configurations too."""
    found = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    if "rope_theta" not in found:
        found["rope_theta"] = float(layer.get("rope_theta") or 10000.0)
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    found.pop("type", None)
    return found


def layer_values(layer: Mapping[str, Any], folder: HeadFolder) -> dict[str, Any]:
    """Return the values of `HeadConfig` that describe decoder layers, from a flat configuration of transformers.

    Raises:
        ModelLoadError: sizes are missing.
    """
    hidden, num_heads, intermediate = needed(layer, ("hidden_size", "num_attention_heads", "intermediate_size"), folder)
    return {
        "hidden": hidden,
        "num_layers": int(layer.get("num_hidden_layers") or 1),
        "num_heads": num_heads,
        "num_kv_heads": layer.get("num_key_value_heads") or num_heads,
        "head_dim": layer.get("head_dim") or hidden // num_heads,
        "intermediate": intermediate,
        "epsilon": float(layer.get("rms_norm_eps") or 1e-6),
        "rope": rope_of(layer),
        "max_length": int(layer.get("max_position_embeddings") or 2048),
        "activation": layer.get("hidden_act") or "silu",
        "attention_bias": bool(layer.get("attention_bias") or False),
        "mlp_bias": bool(layer.get("mlp_bias") or False),
    }


def windows_of(layer: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; empty if no layer has one."""
    types = layer.get("layer_types") or []
    width = int(layer.get("sliding_window") or 0)
    windows = tuple(width if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def default_features(num_layers: int) -> tuple[int, int, int]:
    """Return the hidden states that EAGLE-3 reads if the configuration names none, in our numbering."""
    return (2, num_layers // 2, num_layers - 3)
