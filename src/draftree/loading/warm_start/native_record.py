"""Record of a first start of a model: the next start needs neither to read nor to check it anew.

The weights themselves are not kept: packing them from their files takes as long as reading packed ones would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftree.models.check import CheckResult
from draftree.models.native.blueprint import Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.rotary import Rope
from draftree.models.native.weights import StoredWeight


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a model.

    Attributes:
        blueprint: how it is built.
        places: where its weights lie.
        check: what the self-check found.
        eos_ids: tokens that end a text.
        digest: of logits that it gave.
    """

    blueprint: Blueprint
    places: Mapping[str, StoredWeight]
    check: CheckResult
    eos_ids: tuple[int, ...]
    digest: str


def parsed(found: Mapping[str, Any]) -> Record:
    """A record as `dataclasses.asdict` and JSON made a dictionary of it.

    Raises:
        KeyError, TypeError: it is none.
    """
    places = found["places"].items()
    return Record(
        blueprint=_blueprint(found["blueprint"]),
        places={name: StoredWeight(**place | {"shape": tuple(place["shape"])}) for name, place in places},
        check=CheckResult(**found["check"]),
        eos_ids=tuple(found["eos_ids"]),
        digest=found["digest"],
    )


def _blueprint(found: dict[str, Any]) -> Blueprint:
    head = LinearBlueprint(**found["head"])
    ropes = tuple(Rope(tuple(rope["frequencies"]), rope["scaling"]) for rope in found["ropes"])
    layers = tuple(_layer(layer) for layer in found["layers"])
    return Blueprint(**found | {"head": head, "ropes": ropes, "layers": layers})


def _layer(found: dict[str, Any]) -> LayerBlueprint:
    many = {side: tuple(LinearBlueprint(**linear) for linear in found[side]) for side in ("qkv", "gate_up")}
    single = {side: LinearBlueprint(**found[side]) for side in ("output", "down")}
    return LayerBlueprint(**found | many | single)
