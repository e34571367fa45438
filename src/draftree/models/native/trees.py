"""Trees of a head in C: the passes and choices of all levels in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from draftree.models.kv.slots import KVSlot
from draftree.models.native.rows import place_of
from draftree.models.native.structures import CTrees
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths

MASK = (1 << 32) - 1


@final
class NativeTrees:
    """Trees after the rows of one pass, in the format of the C library.

    Few arrays and no tensors: the code that runs between two passes of the target is not in the processor caches.

    Args:
        shape: shape of the trees.
        searches: of each tree, in the order of the rows with logits.
        slots: slot of each tree.
        places: for each tree, where the row of its first node is stored in the slot.
        positions: for each tree, the entry in the rotary tables of that row.

    Attributes:
        structure: arguments of the call; the caller sets `kept`, `kept_step`, `ids` and `is_normed`.
    """

    def __init__(
        self,
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
        slots: Sequence[KVSlot],
        places: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        depths = [len(search.noise) for search in searches]
        sizes = [shape.sizes(search) for search in searches]
        count, levels = len(depths), max(depths)
        most = max(min(search.num_nodes, size.nodes) for search, size in zip(searches, sizes, strict=True))
        columns = (depths, [search.num_nodes for search in searches], [slot.index for slot in slots], places, positions)
        self._numbers = array("q", [number for column in columns for number in column])
        self._numbers.extend(shape.widths[:levels])
        self._found = array("q", bytes(8 * (count + 2 * count * most)))
        self._reals = array("d", [0.0 if search.noise[0] is None else search.noise[0][1] for search in searches])
        is_noisy = any(self._reals)
        self._reals.extend(search.least_confidence for search in searches)
        self._reals.extend(search.least_score for search in searches)
        self._scores = array("d", bytes(8 * count * most))
        self._maps = _maps(searches, levels) if searches[0].maps else None
        self._keys = _keys(searches, levels) if is_noisy else None
        self._count, self._most = count, most
        numbers, reals, found = place_of(self._numbers), place_of(self._reals), place_of(self._found)
        step = 8 * count
        self.structure = CTrees(
            trees=count,
            levels=levels,
            is_best=shape.is_best,
            room=max(size.nodes for size in sizes),
            most_nodes=most,
            most_rows=sum(size.rows for size in sizes),
            most_width=max(shape.widths[:levels]),
            depths=numbers,
            nodes=numbers + step,
            slots=numbers + 2 * step,
            places=numbers + 3 * step,
            positions=numbers + 4 * step,
            widths=numbers + 5 * step,
            temperatures=reals,
            least_confidence=reals + step,
            least_survival=reals + 2 * step,
            maps=None if self._maps is None else place_of(self._maps),
            keys=None if self._keys is None else place_of(self._keys),
            counts=found,
            tokens=found + step,
            parents=found + step * (1 + most),
            scores=place_of(self._scores),
        )

    def trees(self) -> list[FoundTree]:
        """Return the trees."""
        found, total = [], self._count * self._most
        for tree in range(self._count):
            first = tree * self._most
            end = first + self._found[tree]
            tokens = self._found[self._count + first : self._count + end]
            parents = self._found[self._count + total + first : self._count + total + end]
            found.append(FoundTree(tokens.tolist(), parents.tolist(), self._scores[first:end].tolist()))
        return found


def _keys(searches: Sequence[TreeSearch], levels: int) -> array[int]:
    """Return the keys of the noise, shape (trees, levels, 2)."""
    keys = array("I", bytes(8 * levels * len(searches)))
    for tree, search in enumerate(searches):
        for place, entry in enumerate(search.noise, tree * levels):
            if entry is not None:
                (first, second), _ = entry
                keys[2 * place], keys[2 * place + 1] = first & MASK, second & MASK | 1
    return keys


def _maps(searches: Sequence[TreeSearch], levels: int) -> array[float]:
    """Return the maps from shares to probabilities, shape (trees, levels, 2)."""
    maps = array("d", bytes(16 * levels * len(searches)))
    for tree, search in enumerate(searches):
        for place, (slope, offset) in enumerate(search.maps, tree * levels):
            maps[2 * place], maps[2 * place + 1] = slope, offset
    return maps
