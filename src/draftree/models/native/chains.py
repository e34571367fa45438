"""Chains of a head in C: the passes and choices of all levels in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from draftree.models.kv.slots import KVSlot
from draftree.models.native.rows import place_of
from draftree.models.native.structures import CChain
from draftree.sampling.chains import ChainSearch, Choice

MASK = (1 << 32) - 1


@final
class NativeChains:
    """Chains after the rows of one pass, in the format of the C library.

    Few arrays and no tensors: the code that runs between two passes of the target is not in the processor caches.

    Args:
        searches: of each chain, in the order of the rows with logits.
        slots: slot of each chain.
        places: for each chain, where the row of its first token is stored in the slot.
        positions: for each chain, the entry in the rotary tables of that row.

    Attributes:
        structure: arguments of the call; the caller sets `kept`, `kept_step`, `ids` and `is_normed`.
    """

    def __init__(
        self,
        searches: Sequence[ChainSearch],
        slots: Sequence[KVSlot],
        places: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        depths = [len(search.noise) for search in searches]
        count, levels = len(depths), max(depths)
        size = count * levels
        self._numbers = array(
            "q", [*depths, *(slot.index for slot in slots), *places, *positions, *[0] * (count + size)]
        )
        temperatures = [0.0 if search.noise[0] is None else search.noise[0][1] for search in searches]
        self._reals = array("d", [*temperatures, *[0.0] * (2 * size)])
        for chain, search in enumerate(searches):
            start = count + chain * levels
            self._reals[start : start + len(search.least)] = array("d", search.least)
        self._keys = _keys(searches, levels) if any(temperatures) else None
        self._count, self._levels = count, levels
        numbers, reals, step = place_of(self._numbers), place_of(self._reals), 8 * count
        self.structure = CChain(
            chains=count,
            levels=levels,
            depths=numbers,
            slots=numbers + step,
            places=numbers + 2 * step,
            positions=numbers + 3 * step,
            counts=numbers + 4 * step,
            tokens=numbers + 5 * step,
            temperatures=reals,
            least=reals + step,
            shares=reals + step + 8 * size,
            keys=None if self._keys is None else place_of(self._keys),
        )

    def choices(self) -> list[list[Choice]]:
        """Return the tokens of each chain."""
        found, first = [], 5 * self._count
        for chain in range(self._count):
            start, num = chain * self._levels, self._numbers[first - self._count + chain]
            shares = self._count * (1 + self._levels) + start
            tokens = self._numbers[first + start : first + start + num]
            found.append(list(zip(tokens, self._reals[shares : shares + num], strict=True)))
        return found


def _keys(searches: Sequence[ChainSearch], levels: int) -> array[int]:
    """Return the keys of the noise, shape (chains, levels, 2)."""
    keys = array("I", bytes(8 * levels * len(searches)))
    for chain, search in enumerate(searches):
        for place, entry in enumerate(search.noise, chain * levels):
            if entry is not None:
                (first, second), _ = entry
                keys[2 * place], keys[2 * place + 1] = first & MASK, second & MASK | 1
    return keys
