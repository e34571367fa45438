"""Settings of a capture of training data, checked before the target is loaded where that is possible."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.train.data.teachers import HIDDEN, TOP_K

AUTO, NONE = "auto", "none"
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Settings of a capture.

    Attributes:
        features: captured layers, such as "2,15,27"; "auto" is 2, n // 2 and n - 3 of n layers; "none" is for whole
            models, which read tokens only. Index l is the input of layer l; n, or -1, is the output of the last layer.
        teacher: "hidden" stores outputs of the last layer, "top-k:K" the K most likely next tokens.
        chat: whether prompts are messages of a chat; None if the target has a chat template.
        temperatures: temperatures that texts take in turn.
        max_tokens: maximum number of new tokens of a text.
        max_prompt_tokens: longer prompts are skipped.
        limit_tokens: rows after which the capture ends; None for all prompts.
        seed: seed of the order of prompts and of the texts.
        batch: number of texts that are generated at a time.
        shard_megabytes: size at which a shard is closed.

    Raises:
        ConfigurationError: a value out of range.
    """

    features: str = AUTO
    teacher: str = HIDDEN
    chat: bool | None = None
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 200
    max_prompt_tokens: int = 800
    limit_tokens: int | None = None
    seed: int = 0
    batch: int = 64
    shard_megabytes: int = 64

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens", "batch", "shard_megabytes"):
            self._require_positive(name, getattr(self, name))
        if self.limit_tokens is not None:
            self._require_positive("limit_tokens", self.limit_tokens)
        if not self.temperatures or any(not math.isfinite(t) or t < 0 for t in self.temperatures):
            raise ConfigurationError(
                f"temperatures are {list(self.temperatures)}: give one or several numbers of at least 0"
            )
        if self.teacher != HIDDEN and not self.teacher.startswith(f"{TOP_K}:"):
            raise ConfigurationError(f"teacher is '{self.teacher}': give 'hidden' or 'top-k:K', such as top-k:64")
        if self.features not in (AUTO, NONE):
            _numbers(self.features)

    @staticmethod
    def _require_positive(name: str, value: int) -> None:
        if value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the captured layers of a target of `num_layers` layers, counted from 0.

        Raises:
            ConfigurationError: a layer that the target does not have, or one that is named twice.
        """
        if self.features == NONE:
            return ()
        if self.features == AUTO:
            low = min(2, num_layers // 3)  # small targets have other layers, so that all three are different
            middle = max(low + 1, num_layers // 2)
            high = max(middle + 1, num_layers - 3)
            return tuple(layer for layer in (low, middle, high) if layer <= num_layers)
        named = _numbers(self.features)
        found = tuple(layer if layer >= 0 else num_layers + 1 + layer for layer in named)
        strange = [given for given, layer in zip(named, found, strict=True) if not 0 <= layer <= num_layers]
        if strange:
            raise ConfigurationError(
                f"features name layer {strange[0]}, but the target has {num_layers} layers: choose from 0 to "
                f"{num_layers}, where {num_layers} is the output of the last one"
            )
        if len(set(found)) < len(found):
            raise ConfigurationError(f"features are '{self.features}': name each layer once")
        return found


def _numbers(features: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in features.split(","))
    except ValueError:
        raise ConfigurationError(
            f"features are '{features}': give 'auto', 'none', or layers with commas between them, such as 2,15,27"
        ) from None
