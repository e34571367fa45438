"""Validation of the sizes in a configuration before any module or memory is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import get_again

__all__ = ["check_sizes"]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
VOCABULARY = "vocab_size"
LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(LAYERS, (1, 10_000)),
    **dict.fromkeys(WIDTHS, (1, 10_000_000)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "d_ff"), (0, 100_000_000)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 100_000)),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"), (0, 100_000)),
    "head_dim": (1, 1_000_000),
    "num_labels": (0, 100_000),  # transformers makes a name for each
    VOCABULARY: (1, 100_000_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, 1_000_000_000)),
}
"""Smallest and largest value of each size; the largest is a hundred times that of the largest known models."""
TEXT_CONFIGS = ("text_config", "decoder", "llm_config", "language_config")


def check_sizes(
    source: Path, config: Mapping[str, Any], *, num_tensors: int | None = None, num_values: int | None = None
) -> None:
    """Raise for sizes that are not numbers, are out of range, or do not match the weights.

    Args:
        source: file of the configuration, for the message.
        config: the model's configuration; that of a text model inside it is checked too.
        num_tensors: number of tensors in the weight files; None if unknown.
        num_values: upper bound of the values in all tensors together; None if unknown.

    Raises:
        ModelLoadError: a size is wrong; the message names it.
    """
    for part in _parts(config):
        for name, (least, greatest) in LIMITS.items():
            for value in _values(part.get(name)):
                _require(source, name, value, least=least, greatest=greatest)
        _check_weights(source, part, num_tensors=num_tensors, num_values=num_values)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in TEXT_CONFIGS:
        if isinstance(inner := config.get(name), Mapping):
            yield inner


def _values(value: Any) -> list[Any]:
    """Return the values of a size; some models have one for each layer."""
    if value is None:
        return []
    return [one for one in value if one is not None] if isinstance(value, list) else [value]


def _require(source: Path, name: str, value: Any, *, least: int, greatest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
        raise ModelLoadError(
            f"'{source}' has {name}={str(value)[:40]}: it must be a whole number from {least} to {greatest}; "
            f"{get_again(source.parent)}"
        )


def _check_weights(source: Path, config: Mapping[str, Any], *, num_tensors: int | None, num_values: int | None) -> None:
    layers = _first(config, LAYERS)
    if num_tensors is not None and layers is not None and layers > num_tensors:
        raise ModelLoadError(
            f"'{source}' declares {layers} layers, and the weight files hold {num_tensors} tensors; "
            f"{get_again(source.parent)}"
        )
    width, vocabulary = _first(config, WIDTHS), _first(config, (VOCABULARY,))
    if num_values is None or width is None or vocabulary is None:
        return
    if "embedding_size" not in config and width * vocabulary > num_values:
        raise ModelLoadError(
            f"'{source}' declares embeddings of {vocabulary} tokens with {width} values each, and the weight files "
            f"hold at most {num_values} values; {get_again(source.parent)}"
        )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
