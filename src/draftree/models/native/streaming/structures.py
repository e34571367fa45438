"""Structures of packed weights as JSON: pointers become places in a file or numbers of small tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from draftree.models.native.structures import CDecoder, CLayer, CLinear

PRODUCTS = ("qkv", "output", "gate_up", "down")
SET_BY_PASSES = ("keys", "values")
"""Pointers of a layer that every memory of slots sets."""


def layout() -> dict[str, list[str]]:
    """Return the fields that a description has; another version of the package may have others."""
    kinds = (CDecoder, CLayer, CLinear)
    return {kind.__name__: [entry[0] for entry in kind._fields_] for kind in kinds}


def exported(structure: ctypes.Structure, place_of: Callable[[int], Mapping[str, int]]) -> dict[str, Any]:
    """Return the fields of a structure; `place_of` describes what an address points at."""
    found: dict[str, Any] = {}
    for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
        value = getattr(structure, name)
        if name in SET_BY_PASSES or name == "layers":
            continue
        if isinstance(value, ctypes.Structure):
            found[name] = exported(value, place_of)
        elif kind is ctypes.c_void_p:
            found[name] = None if value is None else place_of(value)
        else:
            found[name] = value
    return found


def decoder_of(fields: Mapping[str, Any], layers: Any, address_of: Callable[[Mapping[str, int]], int]) -> CDecoder:
    """Return the structure of a model over an array of its layers.

    Raises:
        KeyError, TypeError: the fields are malformed.
    """
    return CDecoder(layers=layers, **_values(CDecoder, fields, address_of))


def layer_of(fields: Mapping[str, Any], address_of: Callable[[Mapping[str, int]], int]) -> CLayer:
    """Return the structure of a layer.

    Raises:
        KeyError, TypeError: the fields are malformed.
    """
    return CLayer(**_values(CLayer, fields, address_of))


def _values(
    structure: type[ctypes.Structure], fields: Mapping[str, Any], address_of: Callable[[Mapping[str, int]], int]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
        if name in SET_BY_PASSES or name == "layers":
            continue
        value = fields[name]
        if kind is CLinear:
            values[name] = CLinear(**_values(CLinear, value, address_of))
        elif kind is ctypes.c_void_p:
            values[name] = None if value is None else address_of(value)
        else:
            values[name] = value
    return values
