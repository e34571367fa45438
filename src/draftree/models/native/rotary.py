"""Rotary positions: frequencies read from a model, and tables of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.structures import CPass

NEAR, FAR, MOST = 64, 97, 4096
"""Number of first positions that are all compared with the model; smallest step between later ones; their number."""
FIRST_POSITIONS = 1024
"""Number of positions in the first tables."""
TOLERANCE = 1e-3
"""Maximum error of a cosine; angles of thousands have few fractional digits in float32."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Kind of rotary positions.

    Attributes:
        frequencies: radians per position for each pair of numbers.
        scaling: factor of cosines and sines.
    """

    frequencies: tuple[float, ...]
    scaling: float

    def table(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions below `length`, shape (length, rotary size)."""
        return self.at(torch.arange(length))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions, shape (positions, rotary size)."""
        angles = positions.float()[:, None] * torch.tensor(self.frequencies, dtype=torch.float32)[None]
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.scaling, both.sin() * self.scaling


class RopeTables:
    """Tables of cosines and sines, computed once for every position."""

    def __init__(self, ropes: Sequence[Rope]) -> None:
        self._ropes = ropes
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def point(self, run: CPass, *, longest: int) -> None:
        """Set the tables of a pass whose positions are below `longest`."""
        if longest > self._length:
            self._length = max(2 * self._length, longest, FIRST_POSITIONS)
            self._tables = [rope.table(self._length) for rope in self._ropes]
            for kind, (cosines, sines) in enumerate(self._tables):
                run.cosines[kind], run.sines[kind] = cosines.data_ptr(), sines.data_ptr()
            run.rotary_dim = self._tables[0][0].shape[-1] if self._tables else 0


@torch.inference_mode()
def read_ropes(rotary: Any, kinds: Sequence[str], *, context: int) -> tuple[Rope, ...]:
    """Return the kinds of rotary positions of a model.

    Args:
        rotary: rotary embedding, a module of transformers.
        kinds: names of the kinds; "" if there is only one.
        context: maximum number of positions.

    Raises:
        NativeUnavailableError: its rotary positions are not supported.
    """
    positions = torch.cat((torch.arange(min(NEAR, context)), torch.arange(0, context, max(FAR, context // MOST))))
    return tuple(_read(rotary, kind, positions) for kind in kinds)


def _read(rotary: Any, kind: str, positions: Tensor) -> Rope:
    prefix = f"{kind}_" if kind else ""
    found = getattr(rotary, f"{prefix}inv_freq", None)
    if not isinstance(found, Tensor):
        raise NativeUnavailableError(f"{type(rotary).__name__} stores its frequencies under an unknown name")
    like, ids = torch.zeros(1, 1, 1), positions.unsqueeze(0)
    wanted = rotary(like, ids, kind) if kind else rotary(like, ids)
    rope = Rope(tuple(found.float().tolist()), float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
    for table, theirs in zip(rope.at(positions), wanted, strict=True):
        angles = table[:, : table.shape[-1] // 2]  # both halves of a head have the same; or both numbers of a pair
        forms = (table, angles, angles.repeat_interleave(2, dim=-1))
        of_size = [form for form in forms if form.shape == theirs[0].shape]
        if not any(torch.allclose(form, theirs[0], rtol=0, atol=TOLERANCE) for form in of_size):
            raise NativeUnavailableError("its rotary positions are computed in another way")
    return rope
