"""Chains of a head in C: the passes and choices of all levels in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from torch import Tensor

from draftree.models.kv.slots import KVSlot
from draftree.models.native.rows import place_of
from draftree.models.native.structures import CChain
from draftree.sampling.chains import ChainSearch, Choice

MASK = (1 << 32) - 1


@final
class NativeChains:
    """Chains after the rows of one pass, in the format of the C library.

    Args:
        searches: of each chain, in the order of the rows with logits.
        ids: address of the tokens of the columns, see `Library.search`; None if column i is token i.
        is_normed: whether a row reads its parent's state after the final norm.

    Attributes:
        structure: arguments of the call.
    """

    def __init__(self, searches: Sequence[ChainSearch], *, ids: int | None, is_normed: bool) -> None:
        depths = array("q", [len(search.noise) for search in searches])
        count, levels = len(depths), max(depths)
        keys, least, temperatures = array("I"), array("d"), array("f")
        for search in searches:
            pairs = [(0, 0) if entry is None else entry[0] for entry in search.noise]
            pairs += [(0, 0)] * (levels - len(pairs))
            for first, second in pairs:
                keys.append(first & MASK)
                keys.append(second & MASK | 1)
            least.extend([*search.least, *[0.0] * (levels - len(search.least))])
            entry = search.noise[0]
            temperatures.append(0.0 if entry is None else entry[1])
        self._tokens, self._shares = array("q", bytes(8 * count * levels)), array("d", bytes(8 * count * levels))
        self._counts = array("q", bytes(8 * count))
        self._inputs: list[array[int] | array[float]] = [depths, keys, least, temperatures]
        self.structure = CChain(
            count,
            levels,
            is_normed,
            *(place_of(numbers) for numbers in self._inputs),
            ids,
            tokens=place_of(self._tokens),
            shares=place_of(self._shares),
            counts=place_of(self._counts),
        )

    def place(self, slots: Sequence[KVSlot], rows: Sequence[int], positions: Sequence[int], states: Tensor) -> None:
        """Set where rows are stored.

        Args:
            slots: slot of each chain.
            rows: number of rows of each slot before those of the chain.
            positions: for each chain, the entry in the rotary tables of the row of its first token.
            states: memory of the states before rows, shape (slots, 1, places, hidden).
        """
        columns = [array("q", numbers) for numbers in ([slot.index for slot in slots], rows, positions)]
        self._inputs.extend(columns)
        self.structure.slots, self.structure.places, self.structure.positions = map(place_of, columns)
        self.structure.kept, self.structure.kept_step = states.data_ptr(), states.stride(0)

    def choices(self) -> list[list[Choice]]:
        """Return the tokens of each chain."""
        levels, found = self.structure.levels, []
        for start, count in zip(range(0, len(self._tokens), levels), self._counts, strict=True):
            end = start + count
            found.append(list(zip(self._tokens[start:end], self._shares[start:end], strict=True)))
        return found
