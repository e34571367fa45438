"""Size of the packed weights that a pass over one row reads."""

from __future__ import annotations

import ctypes
from collections import Counter

from draftree.models.native.groups import KIND_BITS, KINDS
from draftree.models.native.library import FORMATS, LANES, Library
from draftree.models.native.structures import CDecoder, CExperts, CLinear, expert_products


def read_bytes(library: Library, decoder: CDecoder) -> int:
    """Return the size of the products that a pass over one row reads at least, in bytes.

    Of the experts of a layer, these are as many as a row uses, the smallest ones, and the shared one. Embedding, norms,
    biases and scales of int8 outputs are not counted.
    """
    total = product_bytes(library, decoder.head) + product_bytes(library, decoder.projection)
    for layer in decoder.layers[: decoder.num_layers]:
        products = [layer.qkv, layer.output, layer.source_query, layer.source_output]
        if layer.experts is None:
            products += [layer.gate_up, layer.down]
        else:
            experts = CExperts.from_address(layer.experts)
            total += _bytes_of_experts(library, experts)
            products.append(experts.router)
        total += sum(product_bytes(library, product) for product in products)
    return total


def product_bytes(library: Library, linear: CLinear) -> int:
    """Return the size of a packed product in bytes, with the scales of groups; 0 for an empty one."""
    count = -(-linear.outputs // LANES)
    if linear.format != FORMATS["grouped"] or not count:
        return count * library.block_bytes(linear.inputs, linear.format)
    kinds = Counter(entry % (1 << KIND_BITS) for entry in (ctypes.c_int64 * count).from_address(linear.blocks))
    return sum(number * library.groups.block_bytes(linear.inputs, KINDS[kind]) for kind, number in kinds.items())


def _bytes_of_experts(library: Library, experts: CExperts) -> int:
    both = zip(expert_products(experts, "gate_up"), expert_products(experts, "down"), strict=True)
    sizes = [product_bytes(library, first) + product_bytes(library, last) for first, last in both]
    return sum(sorted(sizes[: experts.count])[: experts.chosen]) + sum(sizes[experts.count :])
