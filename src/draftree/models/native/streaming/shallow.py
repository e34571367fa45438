"""The first layers of packed weights as a model of their own, for checks that need no more than one layer of a kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from draftree.models.native.blueprint import Blueprint, LayerBlueprint
from draftree.models.native.streaming.store import WeightStore

LEAST_LAYERS = 2


def shallow(blueprint: Blueprint, store: WeightStore) -> tuple[Blueprint, WeightStore]:
    """Return the shortest beginning of a model that has two layers, and one of every kind.

    Layers of one kind differ in the values of their weights only: passes run the same kernels for them.

    Args:
        blueprint: architecture of the model.
        store: its packed weights.
    """
    kinds = [_kind(layer) for layer in blueprint.layers]
    count = max(min(LEAST_LAYERS, len(kinds)), *(1 + kinds.index(kind) for kind in kinds))
    return (
        dataclasses.replace(blueprint, layers=blueprint.layers[:count]),
        dataclasses.replace(
            store,
            decoder={**store.decoder, "num_layers": count},
            layers=store.layers[:count],
            extents=store.extents[:count],
        ),
    )


def _kind(layer: LayerBlueprint) -> Any:
    """Return everything about a layer except the names of its weights."""
    return _without_names(dataclasses.asdict(layer))


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_names(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_names(part) for part in value]
    return "" if isinstance(value, str) else value
