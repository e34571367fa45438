"""Structures of packed weights as JSON: pointers become places in a file or numbers of small tensors.

The experts of a layer are a structure of their own, and two arrays of products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from draftree.models.native.structures import CDecoder, CExperts, CLayer, CLinear, expert_products

PRODUCTS = ("qkv", "output", "gate_up", "down")
EXPERT_PRODUCTS = ("gate_up", "down")
SET_BY_PASSES = ("keys", "values")
"""Pointers of a layer that every memory of slots sets."""


def layout() -> dict[str, list[str]]:
    """Return the fields that a description has; another version of the package may have others."""
    kinds = (CDecoder, CLayer, CExperts, CLinear)
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
        elif name == "experts":
            found[name] = None if value is None else exported(CExperts.from_address(value), place_of)
        elif isinstance(structure, CExperts) and name in EXPERT_PRODUCTS:
            found[name] = [exported(linear, place_of) for linear in expert_products(structure, name)]
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
    """Return the structure of a layer, without its experts.

    Raises:
        KeyError, TypeError: the fields are malformed.
    """
    return CLayer(**_values(CLayer, fields, address_of))


def experts_of(fields: Mapping[str, Any], address_of: Callable[[Mapping[str, int]], int]) -> CExperts | None:
    """Return the structure of a layer's experts, which keeps its arrays; None if the layer has none.

    Raises:
        KeyError, TypeError: the fields are malformed.
    """
    own = fields["experts"]
    if own is None:
        return None
    found = CExperts(**_values(CExperts, own, address_of))
    arrays = []
    for name in EXPERT_PRODUCTS:
        linears = [CLinear(**_values(CLinear, each, address_of)) for each in own[name]]
        arrays.append((CLinear * len(linears))(*linears))
        setattr(found, name, ctypes.addressof(arrays[-1]))
    found.arrays = arrays
    return found


def products_of(layer: CLayer) -> list[CLinear]:
    """Return all products of a layer that lie in its part of the file, as views of its structures."""
    if layer.experts is None:
        return [getattr(layer, name) for name in PRODUCTS]
    experts = CExperts.from_address(layer.experts)
    each = [linear for name in EXPERT_PRODUCTS for linear in expert_products(experts, name)]
    return [layer.qkv, layer.output, experts.router, *each]


def places_of(fields: Mapping[str, Any]) -> list[int]:
    """Return the places in the file of the products of a layer, in the order of `products_of`."""
    experts = fields["experts"]
    if experts is None:
        parts = [fields[name] for name in PRODUCTS]
    else:
        each = [linear for name in EXPERT_PRODUCTS for linear in experts[name]]
        parts = [fields["qkv"], fields["output"], experts["router"], *each]
    return [part["weight"]["at"] for part in parts]


def _values(
    structure: type[ctypes.Structure], fields: Mapping[str, Any], address_of: Callable[[Mapping[str, int]], int]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
        if name in (*SET_BY_PASSES, "layers", "experts") or (structure is CExperts and name in EXPERT_PRODUCTS):
            continue
        value = fields[name]
        if kind is CLinear:
            values[name] = CLinear(**_values(CLinear, value, address_of))
        elif kind is ctypes.c_void_p:
            values[name] = None if value is None else address_of(value)
        else:
            values[name] = value
    return values
