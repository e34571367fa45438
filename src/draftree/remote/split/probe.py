"""States of a few tokens, which show whether device and server have the same weights and compute alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.errors import FrameError
from draftree.remote.split.messages import PROBE_TOKENS, probe_tokens
from draftree.remote.split.states import StateFormat

__all__ = ["Probe", "ProbeResult"]

MAX_HIDDEN = 1 << 16
ACCEPTED = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of states that is rounding, by the dtype of the weights."""
LARGEST = 0.95
"""Larger values of a row, by share of its values, do not count: a few of them are many times as large as all others."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a comparison found.

    Attributes:
        is_same: whether all states and logits have the same bits.
        is_lossless: whether the states of both sides are unchanged by the format.
    """

    is_same: bool
    is_lossless: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """States of a few tokens.

    Attributes:
        middle: output of the device's layers, shape (tokens, hidden), float32.
        last: output of the last layer, shape (tokens, hidden), float32.
        best: largest logit of each token, shape (tokens,), float32.
    """

    middle: Tensor
    last: Tensor
    best: Tensor

    @property
    def hidden(self) -> int:
        """Values of a state."""
        return self.middle.shape[1]

    @classmethod
    def of_whole(cls, model: LanguageModel, split: int) -> Probe:
        """Return the states of a model with all layers."""
        hidden, logits = _run(model, (split, model.num_layers))
        return cls(hidden[:, 0], hidden[:, 1], logits.amax(dim=-1))

    def fields(self, kind: StateFormat) -> dict[str, Any]:
        """Return the fields of a reply, in float32, and whether the format keeps the server's states."""
        names = {"middle": self.middle, "last": self.last, "best": self.best}
        content = {name: value.numpy().astype("<f4").tobytes() for name, value in names.items()}
        return {**content, "lossless": kind.keeps(self.last)}

    @classmethod
    def read(cls, reply: Mapping[str, Any], hidden: int) -> Probe:
        """Return the states of a reply.

        Raises:
            FrameError: a field is missing, or of another size.
        """
        if not 0 < hidden <= MAX_HIDDEN:
            raise FrameError("the server's states have a size that no model has")
        rows = StateFormat("float32", hidden)
        each = {name: reply.get(name) for name in ("middle", "last", "best")}
        if not all(isinstance(value, bytes) for value in each.values()):
            raise FrameError("the server's reply has no states to compare")
        best = StateFormat("float32", 1).unpack(each["best"] or b"", PROBE_TOKENS)[:, 0]
        return cls(
            rows.unpack(each["middle"] or b"", PROBE_TOKENS), rows.unpack(each["last"] or b"", PROBE_TOKENS), best
        )

    def compare(self, local: SlottedModel, kind: StateFormat, *, reads_out: bool) -> ProbeResult:
        """Compare these states with those of a device's layers, and the output head with the device's.

        Args:
            local: the first layers, with final norm and head.
            kind: format of states.
            reads_out: whether the device computes logits.

        Raises:
            ModelLoadError: other weights.
        """
        hidden, _ = _run(local, (local.num_layers,))
        accepted, mine = ACCEPTED[local.dtype], hidden[:, 0]
        error = _difference(mine, self.middle)
        is_same, is_lossless = torch.equal(mine, self.middle), kind.keeps(mine)
        if reads_out and error <= accepted:
            best = local.read_out(self.last).tensor().float().amax(dim=-1).cpu()
            error = float((best - self.best).abs().max()) / (float(self.best.abs().max()) or 1.0)
            is_same = is_same and torch.equal(best, self.best)
        if not error <= accepted:
            raise ModelLoadError(
                f"the first {local.num_layers} layers or the output head of this device are not those of the server's "
                f"model (they differ by {error:.1e} of their size, and rounding by at most {accepted:.0e}): name the "
                "same weights as the server's, and the same dtype and quantization"
            )
        return ProbeResult(is_same, is_lossless)


@torch.inference_mode()
def _run(model: LanguageModel, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return captured states, shape (tokens, layers, hidden), and logits of the probe's tokens."""
    tokens = probe_tokens(model.vocab_size)
    slot = model.open_probe()
    try:
        result = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))], capture=capture))
        assert result.hidden is not None, "states were captured"
        return result.hidden.float().cpu().clone(), result.logits.tensor().float().cpu().clone()
    finally:
        model.close(slot)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of states in the row where it is largest, without the largest values."""
    if found.shape != wanted.shape:
        return float("inf")
    counts = wanted.abs() <= wanted.abs().quantile(LARGEST, dim=-1, keepdim=True)
    error, size = ((found - wanted) * counts).norm(dim=-1), (wanted * counts).norm(dim=-1)
    return float((error / size.clamp(min=1e-30)).amax())
