"""Record of a model's first start: the next start needs no transformers and no self-check.

The weights themselves are not recorded: packing them from their files takes as long as reading packed ones would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftree.models.check import CheckResult
from draftree.models.native.blueprint import (
    Blueprint,
    ExpertsBlueprint,
    LayerBlueprint,
    LinearBlueprint,
    Rope,
    ScoreBias,
    SourceBlueprint,
)
from draftree.models.native.weights import StoredWeight


@dataclass(frozen=True, slots=True)
class Record:
    """The recorded facts of a model.

    Attributes:
        blueprint: structure of the native model.
        places: locations of its weights in files.
        check: result of the self-check.
        eos_ids: tokens that end a text.
        digest: hash of logits that it computed.
    """

    blueprint: Blueprint
    places: Mapping[str, StoredWeight]
    check: CheckResult
    eos_ids: tuple[int, ...]
    digest: str


def parsed(found: Mapping[str, Any]) -> Record:
    """Return a record from its `dataclasses.asdict` form after JSON.

    Raises:
        KeyError, TypeError: it is malformed.
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
    biases = tuple(ScoreBias(bias["weight"], tuple(bias["buckets"])) for bias in found["score_biases"])
    return Blueprint(**found | {"head": head, "ropes": ropes, "layers": layers, "score_biases": biases})


def _layer(found: dict[str, Any]) -> LayerBlueprint:
    many = {side: tuple(LinearBlueprint(**linear) for linear in found[side]) for side in ("qkv", "gate_up")}
    single = {side: LinearBlueprint(**found[side]) for side in ("output", "down")}
    source = found["source"]
    if source is not None:
        parts = {side: LinearBlueprint(**source[side]) for side in ("query", "output")}
        source = SourceBlueprint(**source | parts)
    experts = None if found["experts"] is None else _experts(found["experts"])
    return LayerBlueprint(**found | many | single | {"source": source, "experts": experts})


def _experts(found: dict[str, Any]) -> ExpertsBlueprint:
    names = ("router", "gate_up", "down", "shared_down", "shared_gate")
    single = {name: None if found[name] is None else LinearBlueprint(**found[name]) for name in names}
    many = {"shared_gate_up": tuple(LinearBlueprint(**linear) for linear in found["shared_gate_up"])}
    return ExpertsBlueprint(**found | single | many)
