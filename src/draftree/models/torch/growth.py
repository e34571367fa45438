"""Trees that grow on a device: every level is drafted without the host, in work that a CUDA graph can replay.

The forward passes of all levels, the choice of candidates and the scores of nodes are tensors of fixed shapes. What
differs between two drafts is data in a buffer of integers: slots, noise keys, temperatures and limits. The host reads
the finished trees once. Rules and precision are those of `drafters/tree_builder` level by level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.core.noise import gumbel
from draftree.core.tensors import runs_triton, to_device, to_host
from draftree.models.torch.static import WORD_BITS, Inputs, StaticPasses, rounded
from draftree.sampling.logits import TokenSubset, leading, log_total
from draftree.sampling.tree_search import MOST_SURE, UNFILTERED, FoundTree, TreeSearch, TreeWidths

NO_NODE = -1
NUCLEUS = 256  # number of largest logits in which top-k and top-p of a draft search
MAX_NEW_ROWS = 64  # of a text: a graph for every length of a prompt would be used once
Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class Growth:
    """The shape of trees that grow together."""

    trees: int  # number of trees, rounded up
    widths: tuple[int, ...]  # number of children of a node by level
    num_nodes: int  # maximum number of nodes of a tree, rounded up
    is_best: bool  # whether the nodes of the highest scores stay; otherwise the first ones
    is_noisy: bool  # whether some trees have noise
    is_mapped: bool  # whether shares are mapped to probabilities
    is_filtered: bool  # whether some trees have filters

    @staticmethod
    def of(shape: TreeWidths, searches: Sequence[TreeSearch]) -> Growth:
        return Growth(
            trees=rounded(len(searches)),
            widths=tuple(shape.widths[: max(len(search.noise) for search in searches)]),
            num_nodes=rounded(max(search.num_nodes for search in searches)),
            is_best=shape.is_best,
            is_noisy=any(entry is not None for search in searches for entry in search.noise),
            is_mapped=bool(searches[0].maps),
            is_filtered=any(search.kept != UNFILTERED for search in searches),
        )

    @property
    def frontiers(self) -> list[int]:
        """Maximum number of nodes of a tree that get children, by level; the root at level 0."""
        counts = [1]
        for width in self.widths[:-1]:
            counts.append(min(counts[-1] * width, self.num_nodes))
        return counts

    def fits(self, passes: StaticPasses, counts: Sequence[int]) -> bool:
        """Return whether static passes can grow the trees after so many new rows of each slot."""
        most = max(counts)
        if most > MAX_NEW_ROWS:
            return False
        rows = max(sum(counts), self.trees * max(self.frontiers))
        return passes.fits(rows, tentative=most + self.num_read, deepest=most + len(self.widths))

    @property
    def num_read(self) -> int:
        """Maximum number of nodes of a tree that the model reads: they have children."""
        return sum(self.frontiers[1:])


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Array]):
    """What is wanted of each tree; padding trees have a depth of 0."""

    slots: Array
    starts: Array  # index in its slot of the first node that is read
    positions: Array  # position of the nodes of the first level
    limits: Array  # maximum number of nodes
    depths: Array  # maximum number of levels
    keys: Array  # keys of the noise, shape (trees, levels, 2)
    temperatures: Array  # float64; 0 for trees without noise
    least_confidence: Array  # float64
    least_score: Array  # float64
    kept: Array  # filters as in `Kept`, float64, shape (trees, 3)
    maps: Array  # slopes and offsets, float64, shape (trees, levels, 2)


def wanted_of(array: Array, growth: Growth, as_floats: Callable[[Array], Array]) -> Wanted[Array]:
    by_level = (growth.trees, len(growth.widths), 2)
    shapes: list[tuple[int, ...]] = [
        *[(growth.trees,)] * 5,
        by_level,
        *[(growth.trees,)] * 3,
        (growth.trees, 3),
        by_level,
    ]
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    parts = [array[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
    return Wanted(*parts[:6], *map(as_floats, parts[6:]))


def pack_wanted(
    growth: Growth,
    searches: Sequence[TreeSearch],
    *,
    slots: Sequence[int],
    starts: Sequence[int],
    positions: Sequence[int],
) -> np.ndarray:
    """Return the integers of the trees of a pass, float64 as their bits."""
    array = np.zeros(growth.trees * (11 + 4 * len(growth.widths)), dtype=np.int64)
    into = wanted_of(array, growth, lambda part: part.view(np.float64))
    count = len(searches)
    into.slots[:], into.starts[:] = slots[0], 1  # padding sees one key
    into.slots[:count], into.starts[:count], into.positions[:count] = slots, starts, positions
    into.limits[:count] = [search.num_nodes for search in searches]
    into.depths[:count] = [len(search.noise) for search in searches]
    into.least_confidence[:count] = [search.least_confidence for search in searches]
    into.least_score[:count] = [search.least_score for search in searches]
    into.kept[:] = UNFILTERED
    into.kept[:count] = [search.kept for search in searches]
    for tree, search in enumerate(searches):
        for level, entry in enumerate(search.noise):
            if entry is not None:
                into.keys[tree, level], into.temperatures[tree] = entry
        if growth.is_mapped:
            into.maps[tree, : len(search.maps)] = search.maps
    return array


@dataclass(frozen=True, slots=True)
class _Constants:
    """What the rows of a level have in common in all drafts, on the device."""

    rows: Tensor  # 0, 1, …
    bits: Tensor  # bit of each node of a tree among the nodes that are read, shape (frontier, words)
    places: Tensor  # index of each among them, shape (frontier,)
    tiles: Tensor
    tile_rows: Tensor


ReadLevel = Callable[[Inputs[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]
"""Runs a pass over rows, from the states before them; returns their logits and the states before their children."""


class TreeGrowth:
    """Grows trees of one shape. The constants that a captured graph reads stay where they are.

    `per_tile`: maximum number of rows of a tile of attention. `subset`: tokens of the columns of logits; None if column
    i is token i.
    """

    def __init__(
        self, growth: Growth, *, device: torch.device, per_tile: int, subset: TokenSubset | None = None
    ) -> None:
        self._growth = growth
        self._ids = None if subset is None else subset.token_ids.to(device)
        self._columns = None if subset is None else subset.columns.to(device)
        ends = list(accumulate(growth.frontiers[1:], initial=0))
        words = max(1, -(-growth.num_read // WORD_BITS))
        self._levels = [
            _constants(growth.trees, range(first, end), words=words, per_tile=per_tile, device=device)
            for first, end in pairwise(ends)
        ]
        self._num_words = words

    def grow(
        self, inputs: Inputs[Tensor], logits: Tensor, states: Tensor | None, *, read: ReadLevel, scratch: int
    ) -> Tensor:
        """Return the nodes of all trees, float64 of shape (trees, nodes, 5).

        Columns are index, token, index of the parent, score, and place among the nodes that are read; the index is -1
        where there is no node, and the place is -1 for nodes that are not read.

        `inputs`: of the pass over the texts, with what is wanted of the trees. `logits`: of the roots, shape (trees,
        columns). `states`: before the children of the roots, shape (trees, hidden); None for models without such
        states. `read`: runs the passes of the levels. `scratch`: index of keys that are never read.
        """
        growth = self._growth
        wanted = wanted_of(inputs.extra, growth, lambda part: part.view(torch.float64))
        trees, frontiers = growth.trees, growth.frontiers
        levels: list[tuple[Tensor, ...]] = []
        above = wanted.temperatures.new_zeros(trees, 1)  # scores of the frontier's nodes
        nodes = wanted.slots.new_full((trees, 1), NO_NODE)  # their indices
        is_open = (wanted.depths > 0)[:, None]
        seen = wanted.slots.new_zeros(trees, 1, self._num_words)
        count = torch.zeros_like(wanted.limits)
        first = 0
        for level, width in enumerate(growth.widths):
            size = frontiers[level] * width
            tokens, shares = self._candidates(wanted, logits, level)
            values = _mapped(shares, wanted.maps[:, level]) if growth.is_mapped else shares
            is_node = (values > -math.inf) & is_open[:, :, None]  # not so for NaN
            scores = above[:, :, None] + values.clamp(max=0)
            is_sure = scores >= wanted.least_score[:, None, None]
            if growth.is_mapped:
                is_sure = is_sure & (values.exp() >= wanted.least_confidence[:, None, None])
            parents = nodes[:, :, None].expand(trees, frontiers[level], width)
            tokens, scores, is_node, is_sure, parents = (
                part.reshape(trees, size) for part in (tokens, scores, is_node, is_sure, parents)
            )
            places = torch.full_like(tokens, NO_NODE)
            if growth.is_best:
                levels.append((tokens, parents, scores, is_node, places))
                leads = _leading_nodes(levels, wanted.limits)
                can_grow = leads[:, first:] & is_sure
            else:
                is_node = is_node & (count[:, None] + is_node.cumsum(1) <= wanted.limits[:, None])
                levels.append((tokens, parents, scores, is_node, places))
                leads = is_node
                count = count + is_node.sum(1)
                can_grow = is_node & is_sure & (count < wanted.limits)[:, None]
            if level + 1 < len(growth.widths):
                can_grow = can_grow & (wanted.depths > level + 1)[:, None]
                chosen, is_open = _compacted(can_grow, frontiers[level + 1])
                nodes, above = chosen + first, scores.gather(1, chosen)
                known = self._levels[level]
                # nodes that are not read note their place beside the table
                noted = torch.where(is_open, chosen, size)
                table = torch.cat((places, places[:, :1]), dim=1)
                places.copy_(table.scatter(1, noted, known.places.expand(trees, -1))[:, :size])
                row = chosen // width
                seen = seen.gather(1, row[:, :, None].expand(-1, -1, self._num_words)) | known.bits
                before = None
                if states is not None:
                    index = row[:, :, None].expand(-1, -1, states.shape[-1])
                    before = states.view(trees, frontiers[level], -1).gather(1, index).flatten(0, 1)
                places_of_rows = torch.where(is_open, wanted.starts[:, None] + known.places, scratch)
                # a model may have no position after those of a short tree
                positions = torch.where(is_open, (wanted.positions + level)[:, None], 0)
                rows = self._rows(wanted, level, tokens.gather(1, chosen), positions, places_of_rows, seen)
                logits, states = read(rows, before)
            first += size
        if growth.is_best:
            leads = _leading_nodes(levels, wanted.limits)
        else:
            leads = torch.cat([is_node for _, _, _, is_node, _ in levels], dim=1)
        return _written(levels, leads, growth.num_nodes)

    def _candidates(self, wanted: Wanted[Tensor], logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return tokens and logarithms of shares, float64, both of shape (trees, frontier, width)."""
        growth = self._growth
        trees, frontier = growth.trees, growth.frontiers[level]
        width = min(growth.widths[level], logits.shape[1])
        keys = wanted.keys[:, level].int()
        temperatures = wanted.temperatures.to(logits.dtype)
        scores = logits.view(trees, frontier, -1)
        if growth.is_filtered:
            divisors = torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
            scores = _filtered(scores / divisors, wanted.kept)
            temperatures = (temperatures > 0).to(logits.dtype)
        if width == 1 and runs_triton(logits.device) and logits.dtype == torch.float32:
            from draftree.sampling.choice_kernel import choose

            row_keys = keys.repeat_interleave(frontier, dim=0)
            row_temperatures = temperatures.repeat_interleave(frontier)
            best = choose(scores.flatten(0, 1), row_keys, row_temperatures, self._ids)
            columns, values, totals = best[:, :1].long(), best[:, 1:2], best[:, 3:]
        else:
            if growth.is_noisy:
                scores = self._perturbed(scores, keys, temperatures[:, None, None])
            columns, values = leading(scores.flatten(0, 1), width)
            totals = log_total(scores.flatten(0, 1))
        tokens = columns if self._columns is None else self._columns[columns]
        shares = values.double() - totals.double()
        if width < growth.widths[level]:  # a small vocabulary
            rest = (0, growth.widths[level] - width)
            tokens = torch.nn.functional.pad(tokens, rest)
            shares = torch.nn.functional.pad(shares, rest, value=-math.inf)
        return tokens.view(trees, frontier, -1), shares.view(trees, frontier, -1)

    def _perturbed(self, scores: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
        """Return scores (trees, frontier, columns) over temperature, plus noise of each tree's level."""
        ids = self._ids
        if ids is None:
            ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        is_noisy = temperatures > 0
        noise = gumbel(keys, ids)[:, None].to(scores.dtype) * is_noisy
        return scores / torch.where(is_noisy, temperatures, 1.0) + noise

    def _rows(
        self, wanted: Wanted[Tensor], level: int, tokens: Tensor, positions: Tensor, places: Tensor, seen: Tensor
    ) -> Inputs[Tensor]:
        known = self._levels[level]
        frontier = tokens.shape[1]

        def by_row(by_tree: Tensor) -> Tensor:
            return by_tree.repeat_interleave(frontier)  # kernels need a number for each row, not a view

        return Inputs(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            slots=by_row(wanted.slots),
            places=places.flatten(),
            prefixes=by_row(wanted.starts),
            reach=by_row(wanted.starts + level),
            requested=known.rows,
            seen=seen.flatten(0, 1),
            tiles=known.tiles,
            tile_rows=known.tile_rows,
            extra=wanted.slots[:0],
        )


def _constants(trees: int, places: range, *, words: int, per_tile: int, device: torch.device) -> _Constants:
    frontier = len(places)
    bits = np.zeros((frontier, words), dtype=np.uint64)
    for node, place in enumerate(places):
        bits[node, place // WORD_BITS] = 1 << place % WORD_BITS
    tiles = np.zeros((2, trees * frontier), dtype=np.int64)
    starts = [tree * frontier + row for tree in range(trees) for row in range(0, frontier, per_tile)]
    tiles[0, : len(starts)] = starts
    tiles[1, : len(starts)] = [min(per_tile, frontier - start % frontier) for start in starts]
    first_rows, num_rows = to_device(tiles, device).unbind()
    return _Constants(
        rows=torch.arange(trees * frontier, device=device),
        bits=to_device(bits.view(np.int64), device),
        places=to_device(list(places), device),
        tiles=first_rows,
        tile_rows=num_rows,
    )


def _mapped(shares: Tensor, maps: Tensor) -> Tensor:
    """Return logarithms of probabilities, as `heads/calibration.py` does; of shares (trees, rows, width)."""
    share = shares.exp().clamp(MOST_SURE, 1 - MOST_SURE)
    value = maps[:, :1, None] * (share / (1 - share)).log() + maps[:, 1:, None]
    return torch.where(shares > -math.inf, value.clamp(max=0) - (-value.abs()).exp().log1p(), shares)


def _filtered(scores: Tensor, kept: Tensor) -> Tensor:
    """Return scores (trees, rows, columns) with those at -inf that the filters of their tree drop.

    They are searched among the `NUCLEUS` largest: a draft needs no others.
    """
    values = scores.topk(min(NUCLEUS, scores.shape[-1]), dim=-1).values
    min_p, top_k, top_p = kept[:, None].unbind(-1)
    last = torch.where(top_k > 0, top_k, NUCLEUS).long().clamp(max=values.shape[-1]) - 1
    least = values.gather(2, last[:, :, None].expand(-1, values.shape[1], -1))
    least = torch.where((top_k > 0) & (top_k <= NUCLEUS), least[:, :, 0], -math.inf)
    least = torch.maximum(least, values[:, :, 0] + min_p.log().to(scores.dtype))[:, :, None]
    weights = (torch.where(scores >= least, scores, -math.inf) - values[:, :, :1]).exp()
    share = torch.where(values >= least, values - values[:, :, :1], -math.inf).exp() / weights.sum(-1, keepdim=True)
    # a token stays if those before it have less than the mass
    is_kept = (share.double().cumsum(-1) - share < top_p[:, :, None]) & (values >= least)
    end = is_kept.sum(-1, keepdim=True).clamp(min=1) - 1
    least = torch.where(top_p[:, :, None] < 1, torch.maximum(least, values.gather(2, end)), least)
    return torch.where(scores >= least, scores, -math.inf)


def _leading_nodes(levels: Sequence[tuple[Tensor, ...]], limits: Tensor) -> Tensor:
    """Return which nodes have the highest scores, as many as each limit; of equal ones the first."""
    scores = torch.cat([torch.where(is_node, scores, -math.inf) for _, _, scores, is_node, _ in levels], dim=1)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return (torch.empty_like(order).scatter_(1, order, places) < limits[:, None]) & (scores > -math.inf)


def _compacted(flags: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` columns that are set, ascending, and which of them are; shape (rows, count) both."""
    size = flags.shape[1]
    columns = torch.arange(size, device=flags.device).expand_as(flags)
    if count >= size:
        return columns, flags
    found = torch.where(flags, columns, size).sort(dim=1).values[:, :count]
    return found.clamp(max=size - 1), found < size


def _written(levels: Sequence[tuple[Tensor, ...]], leads: Tensor, num_nodes: int) -> Tensor:
    tokens, parents, scores, _, places = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    chosen, is_node = _compacted(leads, num_nodes)
    index = torch.where(is_node, chosen, NO_NODE)
    columns = (tokens.gather(1, chosen), parents.gather(1, chosen), scores.gather(1, chosen), places.gather(1, chosen))
    return torch.stack([column.double() for column in (index, *columns)], dim=2)


def found_trees(nodes: Tensor) -> list[FoundTree]:
    """Return trees from what `TreeGrowth.grow` returned; the host waits for the device."""
    return [_found(rows) for rows in to_host(nodes)]


def _found(rows: Sequence[Sequence[Any]]) -> FoundTree:
    rows = [row for row in rows if row[0] != NO_NODE]
    places = {int(row[0]): place for place, row in enumerate(rows)} | {NO_NODE: NO_NODE}
    return FoundTree(
        [int(row[1]) for row in rows],
        [places[int(row[2])] for row in rows],
        [row[3] for row in rows],
        [int(row[4]) for row in rows],
    )
