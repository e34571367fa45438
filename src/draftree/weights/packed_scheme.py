"""The quantization that a checkpoint declares, and refusals of schemes that passes in C do not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.core.files import JsonError, get_again, read_json

__all__ = ["ALL_INPUTS", "BITS", "BLOCK", "SUFFIXES", "Scheme", "quantization_of", "refusal", "scheme_of"]

BITS = 4
ALL_INPUTS = -1
"""Size of the only group of a row, as GPTQ notes it."""
BLOCK = 32
AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Method whose layout a packing format of AutoRound has."""
SUFFIXES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
"""Last part of the names of tensors of codes, by method."""
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zeros, by the format of a GPTQ checkpoint."""
EXCEPTIONS = ("dynamic", "extra_config")
"""Settings of single modules, as gptqmodel and AutoRound write them."""
NATURAL_ORDERS = (None, "static", "weight")
"""Values of `actorder` whose groups are in the order of inputs."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A declared quantization that passes in C support.

    Attributes:
        folder: folder of the model.
        method: "gptq", "awq" or "compressed-tensors".
        group_sizes: declared numbers of inputs of a group, those of single modules too; `ALL_INPUTS` for all of a row.
        zero_offset: what is added to stored zeros.
    """

    folder: Path
    method: str
    group_sizes: frozenset[int]
    zero_offset: int


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization that a model folder declares; None for none.

    Raises:
        ModelLoadError: its configuration cannot be read.
    """
    try:
        config = read_json(folder / "config.json")
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise ModelLoadError(f"'{folder / 'config.json'}' cannot be read: {error}") from error
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    layout = AUTOROUND.get(str(found.get("packing_format"))) if found.get("quant_method") == "auto-round" else None
    return found if layout is None else {**found, "quant_method": layout}


def refusal(folder: Path, what: str) -> UnsupportedModelError:
    """Return the refusal of a checkpoint.

    Args:
        folder: folder of the model.
        what: kind of its weights, such as "3 bits".
    """
    return UnsupportedModelError(
        f"'{folder}' has weights of {what}: supported are 4 bits by gptq, awq or compressed-tensors, in groups of a "
        "multiple of 32 inputs in their order; use the model without quantization, or a GGUF file"
    )


def scheme_of(folder: Path, settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a quantization declares.

    Args:
        folder: folder of the model.
        settings: its quantization.

    Raises:
        UnsupportedModelError: passes in C do not support it; the message has the reason.
        ModelLoadError: a setting has another type than its method writes.
    """
    method = str(settings.get("quant_method"))
    if method not in SUFFIXES:
        raise refusal(folder, f"the method '{method}'")
    if _names_transforms(settings.get("transform_config")):
        raise refusal(folder, "rotated inputs (transform_config), which passes would have to rotate")
    scheme = _of_groups(folder, settings) if method == "compressed-tensors" else settings
    bits = scheme.get("bits", scheme.get("w_bit"))
    size = scheme.get("group_size", scheme.get("q_group_size"))
    _require_size(folder, bits, size)
    if scheme.get("desc_act"):
        raise refusal(folder, "groups in another order of inputs (desc_act)")
    version = str(scheme.get("version", "gemm"))
    if method == "awq" and version.lower() != "gemm":
        raise refusal(folder, f"the AWQ version '{version}'")
    form = str(settings.get("checkpoint_format", "gptq"))
    if method == "gptq" and form not in ZERO_OFFSETS:
        raise refusal(folder, f"the GPTQ format '{form}'")
    sizes = {size, *_sizes_of_modules(settings)}
    return Scheme(folder, method, frozenset(sizes), ZERO_OFFSETS[form] if method == "gptq" else 0)


def _require_size(folder: Path, bits: Any, size: Any) -> None:
    is_size = isinstance(size, int) and (size == ALL_INPUTS or (size > 0 and size % BLOCK == 0))
    if bits != BITS or not is_size:
        raise refusal(folder, f"{bits} bits in groups of {size}")


def _names_transforms(found: Any) -> bool:
    return bool(found.get("config_groups", found) if isinstance(found, Mapping) else found)


def _of_groups(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of compressed-tensors with the names of GPTQ."""
    groups = _mapping(folder, "config_groups", settings.get("config_groups"))
    if settings.get("format") != "pack-quantized" or len(groups) != 1:
        raise refusal(folder, f"the format '{settings.get('format')}' in {len(groups)} groups of layers")
    ((name, group),) = groups.items()
    group = _mapping(folder, f"config_groups.{name}", group)
    weights = _mapping(folder, f"config_groups.{name}.weights", group.get("weights"))
    if group.get("input_activations"):
        raise refusal(folder, "quantized inputs (input_activations)")
    if weights.get("actorder") not in NATURAL_ORDERS:
        raise refusal(folder, f"groups in another order of inputs (actorder '{weights.get('actorder')}')")
    size = ALL_INPUTS if weights.get("strategy") == "channel" else weights.get("group_size")
    return {"bits": weights.get("num_bits"), "group_size": size}


def _mapping(folder: Path, name: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found or {}, Mapping):
        raise ModelLoadError(
            f"the setting '{name}' of quantization_config in '{folder / 'config.json'}' is {found!r}, and not an "
            f"object: {get_again(folder)}"
        )
    return found or {}


def _sizes_of_modules(settings: Mapping[str, Any]) -> set[int]:
    tables = [table for table in map(settings.get, EXCEPTIONS) if isinstance(table, Mapping)]
    own = [one.get("group_size") for table in tables for one in table.values() if isinstance(one, Mapping)]
    return {size for size in own if isinstance(size, int)}
