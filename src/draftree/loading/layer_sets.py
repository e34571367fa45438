"""Sets of sublayers to skip when a model drafts: found by tuning, cached by the model's fingerprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, read_json, write_json
from draftree.models.base import LayerSubset
from draftree.weights.cache import Cache

HOW_TO_TUNE = "find one with 'draftree tune layers MODEL --prompts FILE', or name one: layer-skip,attention=3-5-8,mlp=4"


@dataclass(frozen=True, slots=True)
class LayerSet:
    fingerprint: str  # fingerprint of the model
    attention: tuple[int, ...]  # layers whose attention is skipped
    mlp: tuple[int, ...]  # layers whose multilayer perceptron is skipped
    num_layers: int  # number of layers of the model
    seconds_per_token: float  # with the set, on the prompts of the search
    plain_seconds_per_token: float  # plain decoding, on the same prompts
    unseen_seconds_per_token: float | None  # with the set, on held-out prompts; None if there were none
    unseen_plain_seconds_per_token: float | None  # plain decoding, on the held-out prompts
    num_trials: int  # number of sets tried
    computed_with: str  # dtype and kernels of the model

    @property
    def part(self) -> LayerSubset:
        return LayerSubset(attention=frozenset(self.attention), mlp=frozenset(self.mlp))

    @property
    def speedup(self) -> float:
        """Plain seconds per token divided by the set's: on held-out prompts if measured, else on searched ones."""
        if self.unseen_seconds_per_token is not None and self.unseen_plain_seconds_per_token is not None:
            return self.unseen_plain_seconds_per_token / self.unseen_seconds_per_token
        return self.plain_seconds_per_token / self.seconds_per_token

    @property
    def spec(self) -> str:
        """The drafter's spec with this set written out."""
        return layer_spec(self.attention, self.mlp)

    def __str__(self) -> str:
        return (
            f"of {self.num_layers} layers {len(self.attention)} attentions ({text_of(self.attention)}) and "
            f"{len(self.mlp)} perceptrons ({text_of(self.mlp)}) are left out"
        )


def layer_spec(attention: Collection[int], mlp: Collection[int]) -> str:
    named = (("attention", attention), ("mlp", mlp))
    return ",".join(["layer-skip", *(f"{name}={text_of(layers)}" for name, layers in named if layers)])


def numbers_of(text: str) -> frozenset[int]:
    """Parse layers such as 3-5-8; an empty text gives none."""
    parts = text.split("-") if text else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"'{text}' is not a list of layers")
    return frozenset(map(int, parts))


def text_of(layers: Collection[int]) -> str:
    """Format layers as 3-5-8; the inverse of `numbers_of`."""
    return "-".join(map(str, sorted(layers))) or "none"


def place_of(fingerprint: str, suffix: str = ".json") -> Path:
    """Return the path of a model's layer data, whether it exists or not."""
    return Cache().root / "layers" / f"{fingerprint}{suffix}"


def store(layer_set: LayerSet) -> Path:
    place = place_of(layer_set.fingerprint)
    write_json(place, dataclasses.asdict(layer_set), indent=2)
    return place


def stored_set(fingerprint: str) -> LayerSet:
    place = place_of(fingerprint)
    try:
        stored = read_json(place)
        return LayerSet(**stored | {side: tuple(stored[side]) for side in ("attention", "mlp")})
    except FileNotFoundError:
        raise ConfigurationError(
            f"drafter 'layer-skip' has no stored set of layers to skip for this model: {HOW_TO_TUNE}"
        ) from None
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(
            f"drafter 'layer-skip' cannot read '{place}', the set stored by tuning: {HOW_TO_TUNE}"
        ) from error
