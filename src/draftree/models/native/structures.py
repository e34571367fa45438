"""C structures of a pass, declared in `models/native/csrc/shared.h`, and the check that both layouts agree."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

from draftree.models.native.build import NativeUnavailableError

Layout = Mapping[tuple[str, str], tuple[int, int]]
"""Offset and size in bytes by structure and field; field "-" for a whole structure, structure "-" for a constant."""

_size = ctypes.c_int64
_pointer = ctypes.c_void_p
_float = ctypes.c_float


class CLinear(ctypes.Structure):
    _fields_ = (
        ("weight", _pointer),
        ("scale", _pointer),
        ("sums", _pointer),
        ("bias", _pointer),
        ("blocks", _pointer),
        ("inputs", _size),
        ("outputs", _size),
        ("format", _size),
        ("first", _size),
    )


class CExperts(ctypes.Structure):
    _fields_ = (
        ("router", CLinear),
        ("gate_up", _pointer),
        ("down", _pointer),
        *((name, _size) for name in ("count", "chosen", "is_renormalized", "shared", "has_shared_gate")),
    )


def expert_products(experts: CExperts, name: str) -> ctypes.Array[CLinear]:
    """Return the products `gate_up` or `down` of all experts, the shared one last, as a view of their memory."""
    array: ctypes.Array[CLinear] = (CLinear * (experts.count + experts.shared)).from_address(getattr(experts, name))
    return array


class CLayer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _pointer),
        ("embedding_norm", _pointer),
        ("attention_post_norm", _pointer),
        ("mlp_norm", _pointer),
        ("mlp_post_norm", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("keys", _pointer),
        ("values", _pointer),
        ("window", _size),
        ("rope", _size),
        ("is_normed_residual", _size),
        ("score_bias", _pointer),
        ("source_norm", _pointer),
        ("source_query", CLinear),
        ("source_output", CLinear),
        ("source_scaling", _float),
        ("scaling", _float),
        ("score_cap", _float),
        ("sinks", _pointer),
        ("experts", _pointer),
    )


def product_of(layer: CLayer, name: str) -> CLinear:
    """Return a product of a layer by the name of its field; those of expert 3 are "gate_up.3" and "down.3"."""
    field, _, expert = name.partition(".")
    if not expert:
        found: CLinear = getattr(layer, field)
        return found
    return expert_products(CExperts.from_address(layer.experts), field)[int(expert)]


class CDecoder(ctypes.Structure):
    _fields_ = (
        *((name, _size) for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp", "num_layers", "vocab")),
        *((name, _size) for name in ("format", "kv_format", "cache_format", "activation")),
        *((name, _float) for name in ("epsilon", "embedding_scale", "norm_offset", "residual_scale", "logit_scale")),
        ("embedding", _pointer),
        ("final_norm", _pointer),
        ("layers", ctypes.POINTER(CLayer)),
        ("head", CLinear),
        ("lookup", CLinear),
        ("projection", CLinear),
        ("feature_norm", _pointer),
        ("feature_part", _size),
        ("all_heads", _size),
        ("first_head", _size),
        *((name, _size) for name in ("norm", "is_post_norm", "is_gated", "is_parallel", "has_joint_norms")),
        *((name, _float) for name in ("logit_cap", "gate_limit", "gate_slope")),
        ("positions", _pointer),
        ("unplaced", _size),
        ("start_norm", _pointer),
        ("is_start_norm_first", _size),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        *((name, _size) for name in ("rows", "num_threads", "first_layer", "last_layer", "num_logits", "num_chunks")),
        *((name, _size) for name in ("num_captured", "places", "slot_step", "rotary_dim")),
        *((name, _pointer) for name in ("tokens", "slot", "place", "position", "rope_position", "identical")),
        *((name, _pointer) for name in ("list_start", "list", "chunks")),
        ("cosines", _pointer * 2),
        ("sines", _pointer * 2),
        ("hidden_in", _pointer),
        ("features", _pointer),
        ("captured_layers", _pointer),
        ("captured", _pointer),
        ("skipped", _pointer),
        ("logit_rows", _pointer),
        ("logits", _pointer),
        *((name, _pointer) for name in ("source", "sources", "source_queries")),
        ("bias_length", _size),
        ("team", _pointer),
        ("team_rank", _size),
        ("team_size", _size),
    )


class CTrees(ctypes.Structure):
    _fields_ = (
        *((name, _size) for name in ("trees", "levels", "is_best", "is_normed")),
        *((name, _size) for name in ("room", "most_nodes", "most_rows", "most_width")),
        *((name, _pointer) for name in ("widths", "depths", "nodes", "keys", "temperatures", "maps")),
        *((name, _pointer) for name in ("least_confidence", "least_survival", "ids")),
        *((name, _pointer) for name in ("slots", "places", "positions", "kept")),
        ("kept_step", _size),
        *((name, _pointer) for name in ("tokens", "parents", "scores", "counts")),
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (CLinear, CExperts, CLayer, CDecoder, CPass, CTrees)


def parse_layout(text: str) -> Layout:
    """Parse the layout from the library: lines of structure, field, offset and size."""
    rows = (line.split() for line in text.splitlines())
    return {(kind, field): (int(offset), int(size)) for kind, field, offset, size in rows}


def layout_of(structures: Iterable[type[ctypes.Structure]]) -> Layout:
    """Return the layout of these structures. The name in C is the Python name without the leading C."""
    found = {}
    for structure in structures:
        kind = structure.__name__.removeprefix("C")
        for name in (entry[0] for entry in structure._fields_):
            field = getattr(structure, name)
            found[kind, name] = (field.offset, field.size)
        found[kind, "-"] = (0, ctypes.sizeof(structure))
    return found


def require_same_layout(
    layout: Layout, structures: Sequence[type[ctypes.Structure]], constants: Mapping[str, int]
) -> None:
    """Compare the library's layout with these structures and constants, field by field."""
    expected = {**layout_of(structures), **{("-", name): (0, value) for name, value in constants.items()}}
    keys = [key for key in layout if key[0] != "-" or key in expected]
    for kind, field in (*keys, *(key for key in expected if key not in layout)):
        found, wanted = layout.get((kind, field)), expected.get((kind, field))
        if found != wanted:
            name = f"constant {field}" if kind == "-" else kind if field == "-" else f"{kind}.{field}"
            raise NativeUnavailableError(
                f"the C library declares '{name}' with {_described(found)}, expected {_described(wanted)}: "
                "files of several versions are mixed, so reinstall draftree"
            )


def _described(entry: tuple[int, int] | None) -> str:
    return "nothing" if entry is None else f"offset {entry[0]} and size or value {entry[1]}"
