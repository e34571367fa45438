"""Cross-attention of passes: encoded sources, and stacks of them that attend in one call.

Sources of similar length that take part in one pass are stacked, padded to the longest. A source's own keys and values
then are a part of the stack, so that they are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.models.source import Source
from draftree.models.torch.attention import LayerCall, attend

MAX_STACKED_BYTES = 64 << 20
"""Larger groups are not copied into a stack when they change: their sources attend alone."""
SHORT = 32
"""Sources up to this length are of one group."""

KeysValues = tuple[Tensor, Tensor]


@dataclass(slots=True, eq=False)
class EncodedSource:
    """Cross-attention keys and values of a source. Its count is changed by its model only.

    Attributes:
        source: the source.
        layers: keys and values of each layer, shape (1, heads, length, head_dim).
        length: number of positions.
        num_slots: number of slots that refer to it.
        stack: the stack that holds its keys and values; None if they are stored alone.
        place: its index in the stack.
    """

    source: Source
    layers: Sequence[KeysValues]
    length: int
    num_slots: int = 0
    stack: Stack | None = None
    place: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of its keys and values."""
        return sum(one.numel() * one.element_size() for pair in self.layers for one in pair)


@dataclass(slots=True, eq=False)
class Stack:
    """Keys and values of several sources.

    Attributes:
        layers: keys and values of each layer, shape (sources, heads, length, head_dim), with zeros as padding.
        lengths: length of each source.
        masks: additive masks of slices, which are made once.
    """

    layers: Sequence[KeysValues]
    lengths: Sequence[int]
    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)

    def mask(self, first: int, end: int) -> Tensor | None:
        """Return the mask of padding for some sources, shape (sources, 1, 1, length); None without padding."""
        key = (first, end)
        if key not in self.masks:
            lengths, keys = self.lengths[first:end], self.layers[0][0]
            longest = max(lengths)
            if min(lengths) == longest:
                self.masks[key] = None
            else:
                each = torch.tensor(lengths, device=keys.device)[:, None]
                hidden = torch.arange(longest, device=keys.device) >= each
                mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
                self.masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[key]


@dataclass(slots=True, eq=False)
class CrossRun:
    """Sources that attend in one call.

    Attributes:
        layers: keys and values of each layer, shape (sources, heads, length, head_dim).
        mask: additive, shape (sources, 1, rows, length); None without padding.
        rows: rows of each source in the pass, shape (sources, rows), the first repeated as padding; None if they are
            all rows of the pass in order.
        places: indices of the real rows in `rows`; None if they are all.
    """

    layers: Sequence[KeysValues]
    mask: Tensor | None
    rows: Tensor | None
    places: Tensor | None

    def attend(self, layer: int, call: LayerCall, query: Tensor) -> Tensor:
        """Attend with queries of shape (1, heads, rows, head_dim); returns (sources * rows, heads, head_dim)."""
        keys, values = self.layers[layer]
        _, heads, _, dim = query.shape
        if self.rows is None:
            part = query[0].reshape(heads, keys.shape[0], -1, dim).transpose(0, 1)
        else:
            part = query[0][:, self.rows].transpose(0, 1)
        mixed = attend(part, keys, values, call=call, mask=self.mask).transpose(1, 2)
        return mixed.reshape(-1, heads, mixed.shape[-1])


@dataclass(frozen=True, slots=True)
class CrossPass:
    """The cross-attention of one pass: all its runs, which together have every row once."""

    runs: Sequence[CrossRun]

    def attend(self, layer: int, call: LayerCall, query: Tensor) -> Tensor:
        """Attend with queries of shape (1, heads, rows, head_dim); returns (1, rows, heads, head_dim)."""
        if self.runs[0].rows is None:
            return self.runs[0].attend(layer, call, query).unsqueeze(0)
        mixed: Tensor | None = None
        for run in self.runs:
            part = run.attend(layer, call, query)
            if mixed is None:
                mixed = part.new_empty(query.shape[2], *part.shape[1:])
            assert run.rows is not None
            rows = run.rows.flatten()
            if run.places is None:
                mixed[rows] = part
            else:
                mixed[rows[run.places]] = part[run.places]
        assert mixed is not None, "a pass has rows"
        return mixed.unsqueeze(0)


def plan_cross(sources: Sequence[EncodedSource], counts: Sequence[int], device: torch.device) -> CrossPass:
    """Plan the cross-attention of a pass; stacks sources of similar length that are not stacked yet.

    Args:
        sources: source of each job, in the order of the rows.
        counts: number of rows of each job.
        device: device of the row numbers.
    """
    found: dict[int, tuple[EncodedSource, list[int]]] = {}
    first = 0
    for source, count in zip(sources, counts, strict=True):
        found.setdefault(id(source), (source, []))[1].extend(range(first, first + count))
        first += count
    if len(found) == 1:
        return CrossPass([CrossRun(sources[0].layers, None, None, None)])
    groups: dict[int, list[EncodedSource]] = {}
    for source, _ in found.values():
        groups.setdefault((max(source.length, SHORT) - 1).bit_length(), []).append(source)
    parts = [part for group in groups.values() for part in _parts(group)]
    return CrossPass([_run(part, [found[id(source)][1] for source in part], first, device) for part in parts])


def _parts(group: list[EncodedSource]) -> list[list[EncodedSource]]:
    """Divide sources into neighbours in a stack; a small group with several parts is stacked anew."""
    parts: list[list[EncodedSource]] = []
    for source in sorted(group, key=lambda one: (id(one.stack), one.place)):
        if parts and _are_neighbours(parts[-1][-1], source):
            parts[-1].append(source)
        else:
            parts.append([source])
    if len(parts) > 1 and sum(source.num_bytes for source in group) <= MAX_STACKED_BYTES:
        stack(group)
        return [group]
    return parts


def _are_neighbours(one: EncodedSource, other: EncodedSource) -> bool:
    return one.stack is not None and one.stack is other.stack and other.place == one.place + 1


def stack(sources: Sequence[EncodedSource]) -> None:
    """Copy the keys and values of sources into a new stack, in this order."""
    lengths = [source.length for source in sources]
    longest, layers = max(lengths), []
    for layer in range(len(sources[0].layers)):
        pair = []
        for kind in (0, 1):
            like = sources[0].layers[layer][kind]
            whole = like.new_zeros(len(sources), like.shape[1], longest, like.shape[3])
            for place, source in enumerate(sources):
                whole[place, :, : source.length] = source.layers[layer][kind][0]
            pair.append(whole)
        layers.append((pair[0], pair[1]))
    made = Stack(layers, lengths)
    for place, source in enumerate(sources):
        source.stack, source.place, length = made, place, source.length
        source.layers = [
            (keys[place : place + 1, :, :length], values[place : place + 1, :, :length]) for keys, values in layers
        ]


def _run(part: Sequence[EncodedSource], rows: Sequence[Sequence[int]], num_rows: int, device: torch.device) -> CrossRun:
    if len(part) == 1:
        layers, mask = part[0].layers, None
    else:
        found, start, end = part[0].stack, part[0].place, part[-1].place + 1
        assert found is not None, "neighbours are in a stack"
        mask, longest = found.mask(start, end), max(source.length for source in part)
        layers = [(keys[start:end, :, :longest], values[start:end, :, :longest]) for keys, values in found.layers]
    most = max(map(len, rows))
    if mask is not None and most > 1:
        mask = mask.expand(-1, -1, most, -1)
    flat = [row for own in rows for row in own]
    is_even = len(flat) == most * len(part)
    if is_even and flat == list(range(num_rows)):
        return CrossRun(layers, mask, None, None)
    padded = torch.tensor([[*own, *[own[0]] * (most - len(own))] for own in rows], device=device)
    if is_even:
        return CrossRun(layers, mask, padded, None)
    places = [place * most + row for place, own in enumerate(rows) for row in range(len(own))]
    return CrossRun(layers, mask, padded, torch.tensor(places, device=device))
