"""Sets of sublayers that a model drafts well without: found by tuning, kept in the cache by the model's fingerprint."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.models.base import LayerSubset
from draftree.weights.cache import Cache

HOW_TO_TUNE = "find one with 'draftree tune layers MODEL --prompts FILE', or name one: layer-skip,attention=3-5-8,mlp=4"


@dataclass(frozen=True, slots=True)
class LayerSet:
    """A set and what was measured when it was found.

    Attributes:
        fingerprint: of the model.
        attention: layers whose attention is left out.
        mlp: layers whose multilayer perceptron is left out.
        num_layers: of the model.
        seconds_per_token: with the set, on the prompts of the search.
        plain_seconds_per_token: without a drafter, there.
        unseen_seconds_per_token: with the set, on prompts that the search did not see; None if there were none.
        unseen_plain_seconds_per_token: without a drafter, there.
        num_trials: sets that were tried.
        computed_with: dtype and kernels of the model.
    """

    fingerprint: str
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    num_layers: int
    seconds_per_token: float
    plain_seconds_per_token: float
    unseen_seconds_per_token: float | None
    unseen_plain_seconds_per_token: float | None
    num_trials: int
    computed_with: str

    @property
    def part(self) -> LayerSubset:
        """What is left of the model."""
        return LayerSubset(attention=frozenset(self.attention), mlp=frozenset(self.mlp))

    @property
    def speedup(self) -> float:
        """Plain decoding's seconds per token over the set's: on unseen prompts if measured, else on searched ones."""
        if self.unseen_seconds_per_token is not None and self.unseen_plain_seconds_per_token is not None:
            return self.unseen_plain_seconds_per_token / self.unseen_seconds_per_token
        return self.plain_seconds_per_token / self.seconds_per_token

    @property
    def spec(self) -> str:
        """The drafter that leaves this set out, without what is stored."""
        return layer_spec(self.attention, self.mlp)

    def __str__(self) -> str:
        return (
            f"of {self.num_layers} layers {len(self.attention)} attentions ({text_of(self.attention)}) and "
            f"{len(self.mlp)} perceptrons ({text_of(self.mlp)}) are left out"
        )


def layer_spec(attention: Collection[int], mlp: Collection[int]) -> str:
    """The drafter that leaves these sublayers out."""
    named = (("attention", attention), ("mlp", mlp))
    return ",".join(["layer-skip", *(f"{name}={text_of(layers)}" for name, layers in named if layers)])


def numbers_of(text: str) -> frozenset[int]:
    """Layers of a text such as 3-5-8; none of an empty one.

    Raises:
        ValueError: it is something else.
    """
    parts = text.split("-") if text else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"'{text}' is no list of layers")
    return frozenset(map(int, parts))


def text_of(layers: Collection[int]) -> str:
    """The way back."""
    return "-".join(map(str, sorted(layers))) or "none"


def place_of(fingerprint: str, suffix: str = ".json") -> Path:
    """Where what belongs to a model's layers lies, or would lie."""
    return Cache().root / "layers" / f"{fingerprint}{suffix}"


def store(found: LayerSet) -> Path:
    """Keep a set; one that was kept before is replaced."""
    place = place_of(found.fingerprint)
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n", "utf-8")
    fresh.replace(place)
    return place


def stored_set(fingerprint: str) -> LayerSet:
    """The set that was kept for a model.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    place = place_of(fingerprint)
    try:
        found = json.loads(place.read_text("utf-8"))
        return LayerSet(**found | {side: tuple(found[side]) for side in ("attention", "mlp")})
    except FileNotFoundError:
        raise ConfigurationError(
            f"drafter 'layer-skip' knows no set of layers to leave out of this model: {HOW_TO_TUNE}"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"drafter 'layer-skip' cannot read '{place}', where tuning kept its set: {HOW_TO_TUNE}"
        ) from error
