"""Triton kernel for attention of tentative token trees, split over keys.

The rows of one pass attend to the pool of one layer in place: each row sees its slot's prefix and its own ancestors.
Nothing depends on a value that is known to the host, so a CUDA graph of fixed shapes can replay the kernel with other
trees, slots and lengths, and only the keys that a row needs are read.

Results are batch-invariant: a row has the same bits in every batch, next to any other rows of its slot, and in a pool
of any length. One tile configuration serves all row counts, the keys are cut into splits of a fixed size, and the
partial results of the splits are combined in a fixed order. With `order`, a row has the same bits in every tree too:
its keys are read by position, wherever the tree stores them, and in one loop.

Import this module only for tensors on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.triton_language import jit, tl, triton

MAX_PARTIAL = 1 << 28  # maximum number of numbers in partial results
NUM_PROGRAMS = 2048  # approximate number of programs; bounds the idle ones of long pools and of padding tiles
CHUNK = 16  # number of partial results that are combined at once
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of the kernel. A row has the same bits in two calls only if their configurations are equal."""

    rows: int = 64  # rows of a tile: rows of the pass times query heads per key head
    keys: int = 64  # keys per iteration
    split: int = 512  # keys per partial result, a multiple of `keys`
    num_warps: int = 4
    num_stages: int = 3  # maximum number of key blocks in flight, at most what fits into shared memory


def tile_config(dtype: torch.dtype, dim: int) -> TileConfig:
    """Return the sizes that keep a model's tiles in registers; `dim` is the larger of key_dim and value_dim."""
    if dtype.itemsize > 2:
        return TileConfig(rows=16, keys=32)
    return TileConfig(num_warps=4 if dim <= 128 else 8)


def nodes_by_depth(seen: Tensor) -> Tensor:
    """Return the nodes that each row sees, ancestors first, shape (rows, nodes), int32; the other columns are unused.

    `seen`: as for `tree_attention`.
    """
    node = torch.arange(seen.shape[1] * 64, device=seen.device)
    is_seen = ((seen[:, node // 64] >> node % 64) & 1).bool()
    return torch.where(is_seen, node, len(node)).sort(dim=1).values.int()


def rows_per_tile(group: int, config: TileConfig) -> int:
    """Return how many rows of a slot one tile holds; `group` is the number of query heads per key head."""
    return max(1, config.rows // group)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slot_of_row: Tensor,
    prefix_of_row: Tensor,
    seen: Tensor,
    position_of_row: Tensor,
    first_row_of_tile: Tensor,
    num_rows_of_tile: Tensor,
    config: TileConfig,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Return the attention of each row to its slot's prefix and its ancestors, shape (rows, heads, value_dim).

    The keys and values of the rows are written before. The result has query's dtype; sums are float32.

    `query`: shape (rows, heads, key_dim). `keys`, `values`: the pool of one layer, shape (slots, kv_heads, length,
    dim). The last stride of the three is 1. Indices are int32 or int64:

    `slot_of_row`, `prefix_of_row`, `position_of_row`: slot, number of committed tokens of the slot, and position of
    each row, shape (rows,). `seen`: int64 of shape (rows, words); bit j of word w is set if the row sees tentative node
    64 * w + j, which is stored at index prefix + 64 * w + j. A row sees itself. The prefix token at index i has
    position i, and is in the window of a row if row position - i < window. All nodes that a row sees are in its window,
    unless `order` is given.

    `first_row_of_tile`, `num_rows_of_tile`: shape (tiles,). A tile is a run of at most `rows_per_tile` neighbouring
    rows of one slot; a tile of 0 rows is padding. Each row is in one tile, or has prefix 0 and no bit of `seen`: its
    result is 0. `tile_config` chooses the sizes.

    `sinks`: logits of the sinks, which enter the denominator only, shape (heads,). `order`: the nodes that each row
    sees, from `nodes_by_depth`; the rows of a tile are then a chain, each seeing the one before.

    Shapes determine the grid. Partial results take rows * heads * (length / split) * value_dim * 4 bytes; beyond 1 GiB,
    some heads follow after others. Cells that no row of a tile sees may contain NaN.
    """
    rows, heads, key_dim = query.shape
    _, kv_heads, length, value_dim = values.shape
    group = heads // kv_heads
    tiles = first_row_of_tile.shape[0]
    assert keys.shape[1:] == (kv_heads, length, key_dim), "keys and values have the same slots and heads"
    assert query.stride(2) == keys.stride(3) == values.stride(3) == 1, "heads are contiguous"
    assert length * max(keys.stride(2), values.stride(2)) < 1 << 31, "offsets in a slot are 32-bit integers"
    assert seen.dtype == torch.int64, "words have 64 bits"
    indices = (slot_of_row, prefix_of_row, position_of_row, first_row_of_tile, num_rows_of_tile)
    assert all(part.is_contiguous() for part in (*indices, seen if order is None else order)), "rows follow each other"
    seen = seen.view(torch.int32)  # the low half comes first; 64-bit masks need too many registers
    assert config.split % config.keys == 0, "a split is a number of whole blocks"
    num_splits = -(-length // config.split)
    num_parts = max(1, min(num_splits, NUM_PROGRAMS // max(1, tiles * kv_heads)))
    block_key, block_value = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    block_rows = max(16, triton.next_power_of_2(max(config.rows, group)))
    num_stages = _num_stages(query, config, block_rows, block_key, block_value)
    step = max(1, min(kv_heads, MAX_PARTIAL // (rows * group * num_splits * value_dim)))  # key heads at a time
    accumulated = query.new_empty((rows, step * group, num_splits, value_dim), dtype=torch.float32)
    maxima, sums = (query.new_empty((rows, step * group, num_splits), dtype=torch.float32) for _ in range(2))
    output = query.new_empty((rows, heads, value_dim))
    # scores are compared in a unit that makes them a dot product, or a hyperbolic tangent
    unit = scale if softcap is None else softcap
    squeeze = 0.0 if softcap is None else 2 * LOG2_E * scale / softcap
    span = 0 if window is None else window
    nodes, words = (seen, seen.shape[1]) if order is None else (order, 0)
    for first in range(0, kv_heads, step):
        count = min(step, kv_heads - first)
        part, part_of_key = (slice(first * size, (first + count) * size) for size in (group, 1))
        with torch.cuda.device_of(query):
            _attend_to_splits[(tiles, count, num_parts)](
                query[:, part], keys[:, part_of_key], values[:, part_of_key], accumulated, maxima, sums,
                slot_of_row, prefix_of_row, nodes, position_of_row, first_row_of_tile, num_rows_of_tile,
                query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
                values.stride(0), values.stride(1), values.stride(2), nodes.stride(0),
                num_splits, num_parts, span, unit * LOG2_E, squeeze,
                GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_KEY=block_key, BLOCK_VALUE=block_value,
                BLOCK_ROWS=block_rows, BLOCK_KEYS=config.keys, SPLIT=config.split, WORDS=words,
                HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_ORDER=order is not None,
                num_warps=config.num_warps, num_stages=num_stages,
            )  # fmt: skip
            _combine_splits[(rows, count * group)](
                accumulated, maxima, sums, output[:, part], prefix_of_row, nodes, position_of_row,
                query if sinks is None else sinks[part], output.stride(0), nodes.stride(0), num_splits, span,
                unit * LOG2_E, 1 / unit,
                VALUE_DIM=value_dim, BLOCK_VALUE=block_value, SPLIT=config.split, WORDS=words, CHUNK=CHUNK,
                HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, HAS_ORDER=order is not None, num_warps=4,
            )  # fmt: skip
    return output


def _num_stages(query: Tensor, config: TileConfig, block_rows: int, block_key: int, block_value: int) -> int:
    if query.device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(query.device)
    limit = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    free = limit - block_rows * (block_key + config.keys) * query.itemsize - (4 << 10)
    return max(1, min(config.num_stages, free // (config.keys * (block_key + block_value) * query.itemsize)))


def store_rows(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *, slots: Tensor, places: Tensor) -> None:
    """Write the keys and values of rows, shape (rows, kv_heads, dim), into the pool, at a slot and a place each."""
    assert all(part.is_contiguous() for part in (slots, places)), "rows follow each other"
    dims = (key.shape[2], value.shape[2])
    blocks = [triton.next_power_of_2(dim) for dim in dims]
    with torch.cuda.device_of(key):
        _store_rows[key.shape[:2]](
            key, value, keys, values, slots, places,
            *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            KEY_DIM=dims[0], VALUE_DIM=dims[1], BLOCK_KEY=blocks[0], BLOCK_VALUE=blocks[1], num_warps=1,
        )  # fmt: skip


# these change between shapes and buffers: one binary serves all their values and alignments
VALUES = ["num_splits", "num_parts", "window"]
INDICES = [
    "slot_of_row",
    "prefix_of_row",
    "nodes",
    "position_of_row",
    "first_row_of_tile",
    "num_rows_of_tile",
    "sinks",
]


@jit
def _num_seen_nodes(words, WORDS: tl.constexpr):
    """Return one more than the last node that any of the rows sees; `words` points to the rows' first words."""
    bit = tl.arange(0, 32)
    count = 0
    for word in tl.static_range(WORDS):
        # the largest integer has the highest bit of all
        largest = tl.max(tl.load(words + word).to(tl.uint32, bitcast=True), axis=0)
        is_set = ((largest >> bit.to(tl.uint32)) & 1) != 0
        count = tl.maximum(count, tl.max(tl.where(is_set, word * 32 + bit + 1, 0), axis=0))
    return count


@jit
def _first_visible(prefix, position, window, HAS_WINDOW: tl.constexpr, HAS_ORDER: tl.constexpr):
    """Return an index before which no key is visible to rows of which `position` is the lowest."""
    first = position - window + 1 if HAS_ORDER else tl.minimum(position - window + 1, prefix)
    return tl.maximum(first, 0) if HAS_WINDOW else 0


@jit
def _add_block(
    accumulated, total, best, query, key_pointers, value_pointers, first, end, prefix, nodes, position,
    key_stride, value_stride, window, unit, squeeze,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to a running softmax; `nodes` points to words of bits, or to the nodes of one row in order.

    A block in which a row sees no key leaves its sums bit by bit unchanged. Scores are shifted before they are scaled,
    so no compiler fuses these operations in one of the two loops only.
    """
    index = first + tl.arange(0, BLOCK_KEYS)
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    place = index
    if HAS_ORDER:
        is_node = (index >= prefix) & (index < end)
        place = tl.where(is_node, prefix + tl.load(nodes + index - prefix, mask=is_node, other=0), index)
        visible = index[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (position[:, None] - index[None, :] < window)
    elif HAS_TREE:
        node = index - prefix
        is_node = (node >= 0) & (index < end)
        node = tl.minimum(tl.maximum(node, 0), WORDS * 32 - 1)
        if WORDS == 2:
            bits = tl.where((node < 32)[None, :], tl.load(nodes)[:, None], tl.load(nodes + 1)[:, None])
        else:
            bits = tl.load(nodes[:, None] + (node // 32)[None, :], mask=is_node[None, :], other=0)
        is_ancestor = ((bits >> (node % 32)[None, :]) & 1) != 0
        is_before = (index < prefix)[None, :]
        if HAS_WINDOW:
            is_before = is_before & (position[:, None] - index[None, :] < window)
        visible = is_before | (is_ancestor & is_node[None, :])
    elif HAS_WINDOW:
        visible = position[:, None] - index[None, :] < window
    if HAS_TREE:
        # values that no row sees may be NaN
        is_used = tl.max(visible.to(tl.int32), axis=0) != 0
        key_mask = is_used[:, None] & (key_dims < KEY_DIM)[None, :]
        value_mask = is_used[:, None] & (value_dims < VALUE_DIM)[None, :]
    else:
        key_mask = (key_dims < KEY_DIM)[None, :]
        value_mask = (value_dims < VALUE_DIM)[None, :]
    key = tl.load(key_pointers + place[:, None] * key_stride, mask=key_mask, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = 1 - 2 / (1 + tl.exp2(scores * squeeze))
    if HAS_TREE or HAS_WINDOW:
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shift = new_best
    if HAS_TREE or HAS_WINDOW:
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2((scores - shift[:, None]) * unit)
    decay = tl.exp2((best - shift) * unit)
    value = tl.load(value_pointers + place[:, None] * value_stride, mask=value_mask, other=0.0)
    accumulated = tl.dot(weights.to(value.dtype), value, accumulated * decay[:, None], input_precision="ieee")
    return accumulated, total * decay + tl.sum(weights, axis=1), new_best


@jit(do_not_specialize=VALUES, do_not_specialize_on_alignment=INDICES)
def _attend_to_splits(
    query, keys, values, accumulated, maxima, sums, slot_of_row, prefix_of_row, nodes, position_of_row,
    first_row_of_tile, num_rows_of_tile, query_row, query_head, keys_slot, keys_head, key_stride,
    values_slot, values_head, value_stride, nodes_row, num_splits, num_parts, window, unit, squeeze,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Attend with a tile's rows, and all query heads of a key head, to every `num_parts`-th split of their keys."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    num_rows = tl.load(num_rows_of_tile + tile).to(tl.int32)
    if num_rows == 0:
        return
    first_row = tl.load(first_row_of_tile + tile).to(tl.int64)
    slot = tl.load(slot_of_row + first_row).to(tl.int64)
    prefix = tl.load(prefix_of_row + first_row).to(tl.int32)
    line = tl.arange(0, BLOCK_ROWS)
    row = first_row + tl.minimum(line // GROUP, num_rows - 1)  # the last row is repeated, its copies are not stored
    head = kv_head * GROUP + line % GROUP
    position = tl.load(position_of_row + row).to(tl.int32)
    if HAS_ORDER:
        seen = nodes + (first_row + num_rows - 1) * nodes_row  # the last row sees what the others see
        end = tl.max(position, axis=0) + 1
    else:
        seen = nodes + row * nodes_row
        end = prefix + _num_seen_nodes(seen, WORDS)
    begin = _first_visible(prefix, tl.min(position, axis=0), window, HAS_WINDOW, HAS_ORDER)
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    query_pointers = query + row[:, None] * query_row + head[:, None] * query_head + key_dims[None, :]
    q = tl.load(query_pointers, mask=(key_dims < KEY_DIM)[None, :], other=0.0)
    key_pointers = keys + slot * keys_slot + kv_head.to(tl.int64) * keys_head + key_dims[None, :]
    value_pointers = values + slot * values_slot + kv_head.to(tl.int64) * values_head + value_dims[None, :]
    is_stored = line < num_rows * GROUP
    place = (row * (tl.num_programs(1) * GROUP) + head) * num_splits
    for split in range(begin // SPLIT + part, tl.cdiv(end, SPLIT), num_parts):
        best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
        start = tl.maximum(split * SPLIT, begin // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(split * SPLIT + SPLIT, end)
        middle = tl.maximum(tl.minimum(prefix // BLOCK_KEYS * BLOCK_KEYS, stop), start)  # end of blocks without nodes
        if HAS_ORDER:
            middle = start  # the compiler may let two loops add in two orders
        for first in range(start, middle, BLOCK_KEYS):
            acc, total, best = _add_block(
                acc, total, best, q, key_pointers, value_pointers, first, end, prefix, seen, position,
                key_stride, value_stride, window, unit, squeeze,
                KEY_DIM, VALUE_DIM, BLOCK_KEY, BLOCK_VALUE, BLOCK_KEYS, WORDS, HAS_WINDOW, HAS_SOFTCAP, False, False,
            )  # fmt: skip
        for first in range(middle, stop, BLOCK_KEYS):
            acc, total, best = _add_block(
                acc, total, best, q, key_pointers, value_pointers, first, end, prefix, seen, position,
                key_stride, value_stride, window, unit, squeeze,
                KEY_DIM, VALUE_DIM, BLOCK_KEY, BLOCK_VALUE, BLOCK_KEYS, WORDS, HAS_WINDOW, HAS_SOFTCAP, True, HAS_ORDER,
            )  # fmt: skip
        tl.store(maxima + place + split, best, mask=is_stored)
        tl.store(sums + place + split, total, mask=is_stored)
        pointers = accumulated + (place + split)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(pointers, acc, mask=is_stored[:, None] & (value_dims < VALUE_DIM)[None, :])


@jit(do_not_specialize=VALUES, do_not_specialize_on_alignment=INDICES)
def _combine_splits(
    accumulated, maxima, sums, output, prefix_of_row, nodes, position_of_row, sinks, output_row, nodes_row,
    num_splits, window, unit, per_unit,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one row and head; which splits it reads depends on that row only."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    prefix = tl.load(prefix_of_row + row).to(tl.int32)
    position = tl.load(position_of_row + row).to(tl.int32)
    begin = _first_visible(prefix, position, window, HAS_WINDOW, HAS_ORDER) // SPLIT
    if HAS_ORDER:
        end = position // SPLIT + 1
    else:
        end = tl.cdiv(prefix + _num_seen_nodes(nodes + row * nodes_row + tl.zeros((1,), tl.int32), WORDS), SPLIT)
    heads = tl.num_programs(1)
    place = (row * heads + head) * num_splits
    chunk = tl.arange(0, CHUNK)
    dims = tl.arange(0, BLOCK_VALUE)
    best = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * per_unit
        best = sink
    for first in range(begin, end, CHUNK):
        split = first + chunk
        best = tl.maximum(best, tl.max(tl.load(maxima + place + split, mask=split < end, other=float("-inf")), axis=0))
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = 0.0
    if HAS_SINKS:
        total = tl.exp2((sink - shift) * unit)
    acc = tl.zeros((BLOCK_VALUE,), tl.float32)
    for first in range(begin, end, CHUNK):
        split = first + chunk
        mask = split < end
        weights = tl.exp2((tl.load(maxima + place + split, mask=mask, other=float("-inf")) - shift) * unit)
        total += tl.sum(weights * tl.load(sums + place + split, mask=mask, other=0.0), axis=0)
        pointers = accumulated + (place + split)[:, None] * VALUE_DIM + dims[None, :]
        partial = tl.load(pointers, mask=mask[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
        acc += tl.sum(weights[:, None] * partial, axis=0)
    result = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    target = output + row * output_row + head * VALUE_DIM + dims
    tl.store(target, result.to(output.dtype.element_ty), mask=dims < VALUE_DIM)


@jit(do_not_specialize_on_alignment=["slots", "places"])
def _store_rows(
    key, value, keys, values, slots, places, key_row, key_head, value_row, value_head, keys_slot, keys_head,
    keys_place, values_slot, values_head, values_place,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    dims = tl.arange(0, BLOCK_KEY)
    target = keys + slot * keys_slot + head * keys_head + place * keys_place
    row_of_key = tl.load(key + row * key_row + head * key_head + dims, mask=dims < KEY_DIM)
    tl.store(target + dims, row_of_key, mask=dims < KEY_DIM)
    dims = tl.arange(0, BLOCK_VALUE)
    target = values + slot * values_slot + head * values_head + place * values_place
    row_of_value = tl.load(value + row * value_row + head * value_head + dims, mask=dims < VALUE_DIM)
    tl.store(target + dims, row_of_value, mask=dims < VALUE_DIM)
