"""Interface of layouts: from the files of a folder to a configuration, a vocabulary and parameters, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import HeadConfig
from draftree.heads.vocabulary import DraftVocabulary

OFFSETS, MASK = "d2t", "t2d"
"""Names of the two tensors of a draft vocabulary."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Content of a folder in our names.

    Attributes:
        config: with `own_embedding` and `own_output` as the tensors say.
        vocabulary: the draft vocabulary.
        parameters: by the names of the head's parameters.
    """

    config: HeadConfig
    vocabulary: DraftVocabulary
    parameters: dict[str, Tensor]


class Layout(ABC):
    """A layout of folders."""

    name: ClassVar[str]

    @abstractmethod
    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether a folder with these values in `config.json` has this layout."""

    @abstractmethod
    def config(self, values: Mapping[str, Any]) -> HeadConfig:
        """Return the configuration as far as `config.json` has it: what depends on tensors may still be wrong.

        Raises:
            ModelLoadError: a value is missing or wrong.
            ConfigurationError: values contradict each other.
        """

    @abstractmethod
    def stored(self, config: HeadConfig, tensors: Mapping[str, Tensor]) -> Stored:
        """Return the content in our names.

        Args:
            config: from `config`.
            tensors: by the names of the folder's files.

        Raises:
            ModelLoadError: a tensor of the vocabulary is missing or damaged.
        """


def required(values: Mapping[str, Any], name: str, where: str = "config.json") -> Any:
    """Return a value.

    Raises:
        ModelLoadError: it is missing.
    """
    if values.get(name) is None:
        raise ModelLoadError(f"head: {where} has no value '{name}': the folder is incomplete, or of another layout")
    return values[name]


def whole(values: Mapping[str, Any], name: str, default: int | None = None, where: str = "config.json") -> int:
    """Return an integer.

    Raises:
        ModelLoadError: it is missing and has no default, or is no integer.
    """
    value = required(values, name, where) if default is None else values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"head: {where} has {name}={value!r}: it must be an integer")
    return value


def flag(values: Mapping[str, Any], name: str, *, default: bool, where: str = "config.json") -> bool:
    """Return true or false.

    Raises:
        ModelLoadError: it is neither.
    """
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"head: {where} has {name}={value!r}: it must be true or false")
    return value


def layer_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return layers from a list of JSON.

    Raises:
        ModelLoadError: it is not a list of integers.
    """
    if not isinstance(value, list) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in value
    ):
        raise ModelLoadError(f"head: config.json has {name}={value!r}: it must be a list of layers")
    return tuple(value)


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of JSON.

    Raises:
        ModelLoadError: it is missing, or no object.
    """
    value = required(values, name)
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"head: config.json has {name}={value!r}: it must be an object")
    return value


def rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary positions from the configuration of layers, as transformers 5 or earlier versions write them."""
    found = values.get("rope_parameters")
    if isinstance(found, Mapping):
        rope = dict(found)
    else:
        scaling = values.get("rope_scaling")
        rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    return rope


def layer_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return values of `HeadConfig` from the configuration of decoder layers.

    Args:
        values: flat configuration of transformers.
        where: name in messages.

    Raises:
        ModelLoadError: a value is missing or wrong.
    """
    hidden, heads = whole(values, "hidden_size", where=where), whole(values, "num_attention_heads", where=where)
    if heads < 1:
        raise ModelLoadError(f"head: {where} has num_attention_heads={heads}: it must be positive")
    epsilon = values.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, float | int):
        raise ModelLoadError(f"head: {where} has rms_norm_eps={epsilon!r}: it must be a number")
    return {
        "hidden": hidden,
        "num_layers": whole(values, "num_hidden_layers", 1, where=where),
        "num_heads": heads,
        "num_kv_heads": whole(values, "num_key_value_heads", heads, where=where),
        "head_dim": whole(values, "head_dim", hidden // heads, where=where),
        "intermediate": whole(values, "intermediate_size", where=where),
        "epsilon": float(epsilon),
        "rope": rope_of(values),
        "max_length": whole(values, "max_position_embeddings", 2048, where=where),
        "activation": str(values.get("hidden_act") or "silu"),
        "attention_bias": flag(values, "attention_bias", default=False, where=where),
        "mlp_bias": flag(values, "mlp_bias", default=False, where=where),
        "vocab_size": whole(values, "vocab_size", where=where),
    }


def vocabulary_of(config: HeadConfig, tensors: Mapping[str, Tensor]) -> DraftVocabulary:
    """Return the draft vocabulary from the tensors `d2t` and, if it is there, `t2d`.

    Raises:
        ModelLoadError: the map is missing although the vocabulary is reduced, is damaged, or both contradict each
            other.
    """
    offsets = tensors.get(OFFSETS)
    if offsets is None:
        if config.is_full:
            return DraftVocabulary.full(config.vocab_size)
        raise ModelLoadError(
            f"head: it has {config.draft_vocab_size} of {config.vocab_size} tokens, and no tensor '{OFFSETS}' that "
            "says which: the folder is incomplete"
        )
    vocabulary = DraftVocabulary.from_offsets(offsets.cpu(), config.vocab_size)
    if len(vocabulary) != config.draft_vocab_size:
        raise ModelLoadError(
            f"head: '{OFFSETS}' has {len(vocabulary)} entries, and config.json {config.draft_vocab_size} tokens"
        )
    mask = tensors.get(MASK)
    if mask is not None and (mask.shape != (config.vocab_size,) or not mask.bool().cpu().equal(vocabulary.mask())):
        raise ModelLoadError(f"head: '{MASK}' and '{OFFSETS}' contradict each other: the map is damaged")
    return vocabulary


def without(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors except some."""
    left_out = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}
