"""C structures of a pass, declared in `models/native/csrc/shared.h`, and the check that both layouts agree."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftree.models.native.build import NativeUnavailableError

Layout = Mapping[tuple[str, str], tuple[int, int]]
"""Offset and size in bytes by structure and field; field "-" for a whole structure, structure "-" for a constant."""

_size = ctypes.c_int64
_pointer = ctypes.c_void_p
_float = ctypes.c_float


Fields = tuple[tuple[str, Any], ...]


def fields(kind: Any, *names: str) -> Fields:
    return tuple((name, kind) for name in names)


class CLinear(ctypes.Structure):
    _fields_ = (
        *fields(_pointer, "weight", "scale", "sums", "bias", "blocks"),
        *fields(_size, "inputs", "outputs", "format", "first"),
    )


class CLatent(ctypes.Structure):
    _fields_ = (("from", _size), ("norm", _pointer), ("epsilon", _float), ("product", CLinear))


class CExperts(ctypes.Structure):
    _fields_ = (
        ("router", CLinear),
        *fields(_pointer, "gate_up", "down"),
        *fields(_size, "count", "chosen", "is_renormalized", "shared", "has_shared_gate", "scores"),
        *fields(_size, "groups", "chosen_groups", "group_scores"),
        ("choice_bias", _pointer),
        ("scale", _float),
    )


def expert_products(experts: CExperts, name: str) -> ctypes.Array[CLinear]:
    """Return the products `gate_up` or `down` of all experts, the shared one last, as a view of their memory."""
    array: ctypes.Array[CLinear] = (CLinear * (experts.count + experts.shared)).from_address(getattr(experts, name))
    return array


class CRecurrence(ctypes.Structure):
    _fields_ = (
        *fields(_size, "kind", "first_input", "taps", "channels", "width", "state_size"),
        *fields(_size, "first_result", "all_results"),
        *fields(_pointer, "convolution", "convolution_bias", "states", "stored"),
        *fields(_size, "heads", "groups", "heads_of_group", "key_dim", "value_dim", "decays", "norm_groups"),
        *fields(_size, "is_norm_first", "is_logistic", "is_tiled", "has_joint_norm"),
        *fields(_pointer, "decay_rate", "step_bias", "skip", "norm"),
        *fields(_float, "least_step", "most_step", "factor_scale", "norm_epsilon"),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        *fields(_pointer, "attention_norm", "embedding_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        *fields(_pointer, "query_norm", "key_norm"),
        *fields(CLinear, "qkv", "output", "gate_up", "down"),
        *fields(_pointer, "keys", "values"),
        *fields(_size, "window", "sees_block", "rope", "is_normed_residual", "is_beside"),
        *fields(_pointer, "score_bias", "source_norm"),
        *fields(CLinear, "source_query", "source_output"),
        *fields(_float, "source_scaling", "scaling", "score_cap"),
        *fields(_pointer, "sinks", "experts", "recurrence"),
        ("gate_size", _size),
        ("latents", _pointer),
        *fields(_size, "num_latents", "first_input", "width"),
    )


def latents_of(layer: CLayer) -> Sequence[CLatent]:
    """Return the latents of a layer, as views of their memory."""
    return (CLatent * layer.num_latents).from_address(layer.latents) if layer.num_latents else ()


NORMS = tuple(entry[0] for entry in CLayer._fields_ if entry[0].endswith("_norm") and entry[0] != "source_norm")
"""Norms of a layer, which have these names in its blueprint as well."""


def product_of(layer: CLayer, name: str) -> CLinear:
    """Return a product of a layer by the name of its field.

    Those of expert 3 are "gate_up.3" and "down.3", that of the first latent is "latents.0".
    """
    field, _, number = name.partition(".")
    if field == "latents":
        return latents_of(layer)[int(number)].product
    if number:
        return expert_products(CExperts.from_address(layer.experts), field)[int(number)]
    linear: CLinear = getattr(layer, field)
    return linear


class CDecoder(ctypes.Structure):
    _fields_ = (
        *fields(
            _size, "hidden", "heads", "kv_heads", "head_dim", "value_dim", "shared_dim", "mlp", "num_layers", "vocab"
        ),
        *fields(_size, "format", "kv_format", "cache_format", "activation"),
        *fields(_float, "epsilon", "embedding_scale", "norm_offset", "residual_scale", "logit_scale"),
        *fields(_pointer, "embedding", "final_norm"),
        ("layers", ctypes.POINTER(CLayer)),
        *fields(CLinear, "head", "lookup", "projection", "fusion"),
        *fields(_pointer, "fusion_norm", "state_norm", "context_norm", "feature_norm"),
        *fields(_size, "feature_part", "all_heads", "first_head"),
        *fields(_size, "norm", "is_post_norm", "is_gated", "is_parallel", "has_joint_norms"),
        *fields(_float, "logit_cap", "gate_limit", "gate_slope"),
        ("positions", _pointer),
        ("unplaced", _size),
        ("start_norm", _pointer),
        ("is_start_norm_first", _size),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        *fields(_size, "rows", "num_context", "num_threads", "first_layer", "last_layer", "num_logits", "num_chunks"),
        *fields(_size, "num_captured", "places", "slot_step", "rotary_dim"),
        *fields(_pointer, "tokens", "slot", "place", "position", "rope_position", "block_end", "identical"),
        *fields(_pointer, "list_start", "list", "chunks"),
        *fields(_pointer * 2, "cosines", "sines"),
        ("query_scales", _pointer),
        *fields(_pointer, "hidden_in", "features", "captured_layers", "captured", "skipped", "logit_rows", "logits"),
        *fields(_pointer, "source", "sources", "source_queries"),
        *fields(_size, "bias_length", "num_runs", "num_levels", "keeps_states"),
        *fields(_size, "state_step", "stored_step", "entry_step"),
        *fields(_pointer, "run_slot", "run_step", "run_settled"),
        *fields(_pointer, "step_row", "step_entry", "step_parent", "step_from", "step_to"),
        ("team", _pointer),
        *fields(_size, "team_rank", "team_size"),
    )


class CTrees(ctypes.Structure):
    _fields_ = (
        *fields(_size, "trees", "levels", "is_best", "is_normed", "room", "most_nodes", "most_rows", "most_width"),
        *fields(_pointer, "widths", "depths", "nodes", "keys", "temperatures", "maps"),
        *fields(_pointer, "least_confidence", "least_survival", "ids", "slots", "places", "positions", "kept"),
        ("kept_step", _size),
        *fields(_pointer, "tokens", "parents", "scores", "counts"),
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    CLinear,
    CLatent,
    CExperts,
    CRecurrence,
    CLayer,
    CDecoder,
    CPass,
    CTrees,
)


def parse_layout(text: str) -> Layout:
    """Parse the layout from the library: lines of structure, field, offset and size."""
    rows = (line.split() for line in text.splitlines())
    return {(kind, field): (int(offset), int(size)) for kind, field, offset, size in rows}


def layout_of(structures: Iterable[type[ctypes.Structure]]) -> Layout:
    """Return the layout of these structures. The name in C is the Python name without the leading C."""
    layout = {}
    for structure in structures:
        kind = structure.__name__.removeprefix("C")
        for name, *_ in structure._fields_:
            field = getattr(structure, name)
            layout[kind, name] = (field.offset, field.size)
        layout[kind, "-"] = (0, ctypes.sizeof(structure))
    return layout


def require_same_layout(
    layout: Layout, structures: Sequence[type[ctypes.Structure]], constants: Mapping[str, int]
) -> None:
    """Compare the library's layout with these structures and constants, field by field."""
    expected = {**layout_of(structures), **{("-", name): (0, value) for name, value in constants.items()}}
    keys = [key for key in layout if key[0] != "-" or key in expected]
    for kind, field in (*keys, *(key for key in expected if key not in layout)):
        declared, wanted = (
            "nothing" if entry is None else f"offset {entry[0]} and size or value {entry[1]}"
            for entry in (layout.get((kind, field)), expected.get((kind, field)))
        )
        if declared != wanted:
            name = f"constant {field}" if kind == "-" else kind if field == "-" else f"{kind}.{field}"
            raise NativeUnavailableError(
                f"the C library declares '{name}' with {declared}, expected {wanted}: "
                "files of several versions are mixed, so reinstall draftree"
            )
