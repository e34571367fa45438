"""Attribution of nodes and gains to merged drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.tree import TokenTree, depths
from draftree.core.types import MAX_NODES, DraftPart


@dataclass(slots=True)
class Credit:
    """Summed survival and number of scored nodes of each level of one drafter, for one sequence's round.

    Attributes:
        gains: summed survival of the scored nodes, by level.
        rows: number of scored nodes, by level.
        depth: number of drafted levels.
        first: summed survival of the scored nodes of the first level, shared ones included.
    """

    gains: list[float]
    rows: list[float]
    depth: int = MAX_NODES
    first: float = 0.0


class Credits:
    """Attribution of nodes to drafters by the sources of trees.

    Args:
        parts: the drafters.
    """

    def __init__(self, parts: Sequence[DraftPart]) -> None:
        self._parts = tuple(parts)
        self._nothing = [Credit([0.0] * part.depth, [0.0] * part.depth, 0) for part in parts]
        self._guessers: dict[tuple[str, ...], tuple[int, ...]] = {}

    def depth_of(self, part: int, tree: TokenTree) -> int:
        """Return the deepest level of a tree with a node of this drafter."""
        levels = depths(tree.parents)
        if len(self._parts) == 1 or not tree.sources:
            return max(levels, default=0)
        shared = (level for level, names in zip(levels, tree.sources, strict=True) if part in self.guessers(names))
        return max(shared, default=0)

    def has_hit(self, part: int, tree: TokenTree, path: Sequence[int]) -> bool:
        """Return whether a drafter proposed the first accepted token."""
        return bool(path) and (
            len(self._parts) == 1 or not tree.sources or part in self.guessers(tree.sources[path[0]])
        )

    def guessers(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the drafters with these names; the first if there is none."""
        found = self._guessers.get(names)
        if found is None:
            found = tuple(
                index
                for index, part in enumerate(self._parts)
                if any(name == part.name or name.startswith(f"{part.name}/") for name in names)
            )
            self._guessers[names] = found = found or (0,)
        return found

    def of(
        self, tree: TokenTree, survivals: Sequence[float], *, costly: Sequence[bool], drafted: TokenTree | None = None
    ) -> list[Credit]:
        """Return every drafter's credit for a scored tree; a shared node counts for a drafter that is not costly.

        Args:
            tree: the scored tree.
            survivals: of its nodes.
            costly: which drafters cost time.
            drafted: the tree before it was cut; None if it was not.
        """
        whole = tree if drafted is None else drafted
        if not len(whole):
            return self._nothing
        credits = [
            Credit([0.0] * part.depth, [0.0] * part.depth, self.depth_of(index, whole))
            for index, part in enumerate(self._parts)
        ]
        is_alone = len(self._parts) == 1 or not tree.sources
        for node, (level, survival) in enumerate(zip(depths(tree.parents), survivals, strict=True)):
            named = (0,) if is_alone else self.guessers(tree.sources[node])
            if level == 1:
                for part in named:
                    credits[part].first += survival
            owner = named[0] if len(named) == 1 else next((part for part in named if not costly[part]), named[0])
            if level <= len(credits[owner].gains):
                credits[owner].gains[level - 1] += survival
                credits[owner].rows[level - 1] += 1.0
        return credits
