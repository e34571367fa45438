"""Parts of exports: the target's facts, tensors with those shared with the target, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.base import Head
from draftree.heads.config import LAST_LAYER, HeadConfig
from draftree.heads.tensors import OUTPUT, maps_of, widest_dtype


@dataclass(frozen=True, slots=True, eq=False)
class ExportTarget:
    """The target of an exported head.

    Attributes:
        name: name or path with which servers load it.
        architecture: class in transformers.
        num_layers: number of layers.
        hidden: width of hidden states.
        output: output head, shape (vocabulary, hidden), logit scale included.
    """

    name: str
    architecture: str
    num_layers: int
    hidden: int
    output: Tensor


def features_of(config: HeadConfig, target: ExportTarget) -> tuple[int, ...]:
    """Return the hidden states with the last layer's by its number."""
    return tuple(target.num_layers if layer == LAST_LAYER else layer for layer in config.features)


def exported_tensors(head: Head, target: ExportTarget, *, with_output: bool) -> dict[str, Tensor]:
    """Return the tensors of a head, with the map of a reduced vocabulary.

    Args:
        head: the head.
        target: whose rows of the output head are added if the head has none of its own.
        with_output: whether the output head is added.
    """
    found = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if with_output and OUTPUT not in found:
        rows = target.output[head.vocabulary.ids.to(target.output.device)]
        found[OUTPUT] = rows.to("cpu", widest_dtype(found))
    return found | maps_of(head.vocabulary)


def with_equal_biases(tensors: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """Return the tensors with a bias in all products of attention, if any of them has one.

    One switch of these layouts stands for all four products; zeros are added where a bias is missing.
    """
    found = dict(tensors)
    if config.attention_bias == config.output_bias:
        return found
    for index in range(config.num_layers):
        for name in ("q", "k", "v", "o"):
            product = f"layers.{index}.self_attn.{name}_proj"
            weight = found[f"{product}.weight"]
            found.setdefault(f"{product}.bias", weight.new_zeros(weight.shape[0]))
    return found


def refuse(config: HeadConfig, layout: str, reasons: Mapping[str, bool]) -> None:
    """Raise an error if any reason is true.

    Raises:
        ConfigurationError: names the reasons.
    """
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigurationError(f"a head of kind '{config.kind}' cannot be exported to {layout}: {'; '.join(found)}")


def require_width(config: HeadConfig, target: ExportTarget) -> None:
    """Check that the target is the one that the head was made for.

    Raises:
        ConfigurationError: sizes differ.
    """
    found = (target.hidden, target.output.shape[0])
    if found != (config.target_hidden, config.vocab_size):
        raise ConfigurationError(
            f"the head was made for hidden states of {config.target_hidden} and a vocabulary of {config.vocab_size}, "
            f"and '{target.name}' has {found[0]} and {found[1]}: name its target"
        )


def require_empty(folder: Path) -> None:
    """Check that a folder is new or empty.

    Raises:
        ConfigurationError: it is neither.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"'{folder}' already exists and is not an empty folder: choose another path")
