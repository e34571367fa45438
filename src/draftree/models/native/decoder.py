"""Native decoder: forward passes over slots."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import EmbeddingFacts
from draftree.models.kv.slots import KVMemory, KVSlot, LayerRange, RangeOutput
from draftree.models.native.blueprint import Blueprint, RopeTables
from draftree.models.native.library import (
    FORMATS,
    MASK,
    LogitBuffer,
    LogitBufferPool,
    RowsAt,
    address,
    format_of,
    library,
)
from draftree.models.native.logits import NativeLogits, num_compared
from draftree.models.native.packed import PackedSource, PackedWeights, read_bytes
from draftree.models.native.shares import Share, ShareWeights
from draftree.models.native.states import NativeStates, StepPlan
from draftree.models.native.structures import CPass, CTrees, product_of
from draftree.models.native.weights import Weights
from draftree.sampling.logits import RowNoise
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of 64-bit numbers.

    With one entry per row: token id; slot index; index of its keys and values in the slot; position in the text; first
    position whose key is not stored at the index of the same number; start of the indices of such keys in the list.
    Then the list of indices by position, which rows on one path share. Then the first row of each chunk, a run of rows
    of one slot, and the total number of rows.
    """

    numbers: array[int]  # all columns
    starts: Sequence[int]  # start of each column; the list is the last one
    count: int  # number of rows
    num_chunks: int
    longest: int  # largest position plus one
    num_context: int = 0  # last rows, which have features, and of which only keys and values are computed
    block_ends: int | None = None  # start of the column of the last positions that rows see in their blocks

    @classmethod
    def hidden(cls, count: int) -> Rows:
        """Return rows that start at states and run through no layer, of which nothing else is read."""
        return cls(array("q", [0]), (0,) * 8, count, 0, 1)

    @property
    def positions(self) -> array[int]:
        """Each row's position in the text."""
        return self.numbers[self.starts[3] : self.starts[3] + self.count]


@dataclass(frozen=True, slots=True)
class SourceRows:
    rows: array[int]  # index of each row's source
    table: array[int]  # address and length of the keys and values of each source, one after the other
    # receives the queries with which the last layer attends to them, shape (rows, heads, head_dim), float32; None
    # if they are not wanted
    queries: Tensor | None = None


def plan_rows(
    slots: Sequence[KVSlot], tokens: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], *, rows_of_chunk: int
) -> Rows:
    """Return the rows of a pass over these tentative nodes, ascending.

    Of a slot's nodes, the first ones form a chain, stored at their positions. After them, a node's first child extends
    the node's list of indices; every other child extends a copy. So Python takes one step for each node, at any depth.
    List 0 is empty, for nodes of the chain.
    """
    indices: list[int] = []
    places: list[int] = []
    positions: list[int] = []
    identical: list[int] = []
    starts: list[int] = []
    paths = array("q")
    chunks = [0]
    for slot, chosen in zip(slots, nodes, strict=True):
        length = slot.length
        depths = slot.depths
        parents = slot.parents
        chain = next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
        stored = [length + node for node in chosen]
        indices += [slot.index] * len(stored)
        places += stored
        if chain == len(parents):
            positions += stored
            identical += [place + 1 for place in stored]
            starts += [0] * len(stored)
        else:
            numbers = [0] * chain  # each node's list
            lists = [array("q")]
            firsts = [length]  # first position in each list
            for node in range(chain, len(parents)):
                parent = parents[node]
                number = numbers[parent] if parent >= chain else 0
                if not number or lists[number][-1] != length + parent:
                    first = firsts[number] if number else length + parent + 1
                    lists.append(lists[number][: length + depths[node] - 1 - first])
                    firsts.append(first)
                    number = len(lists) - 1
                lists[number].append(length + node)
                numbers.append(number)
            list_starts = []
            for path in lists:
                list_starts.append(len(paths))
                paths += path
            positions += [length - 1 + depths[node] for node in chosen]
            identical += [firsts[numbers[node]] if node >= chain else length + node + 1 for node in chosen]
            starts += [list_starts[numbers[node]] for node in chosen]
        end = chunks[-1] + len(chosen)
        chunks.extend(range(chunks[-1] + rows_of_chunk, end, rows_of_chunk))
        chunks.append(end)
    ids = [token for row in tokens for token in row]
    count = len(ids)
    numbers_of_pass = array("q", [*ids, *indices, *places, *positions, *identical, *starts, *chunks])
    column_starts = (*range(0, 6 * count, count), len(numbers_of_pass), 6 * count)
    numbers_of_pass += paths
    return Rows(numbers_of_pass, column_starts, count, len(chunks) - 1, max(positions) + 1)


def plan_blocks(
    slots: Sequence[KVSlot],
    blocks: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[int]],
    *,
    rows_of_chunk: int,
) -> Rows:
    """Return the rows of a pass over blocks, and after them their context rows.

    Args:
        blocks: tokens of the block of each slot, stored after its context rows; empty for none.
        contexts: tokens of the context rows of each slot, stored after its prefix.
    """
    tokens: list[int] = []
    places: list[int] = []
    indices, ends, chunks = [], [], [0]
    for slot, block, context in zip(slots, blocks, contexts, strict=True):
        first = slot.length + len(context)
        tokens += block
        places += range(first, first + len(block))
        ends += [first + len(block) - 1] * len(block)
        indices += [slot.index] * len(block)
        chunks += [*range(chunks[-1] + rows_of_chunk, len(tokens), rows_of_chunk), len(tokens)] if block else []
    num_asking = len(tokens)
    for slot, context in zip(slots, contexts, strict=True):
        tokens += context
        places += range(slot.length, slot.length + len(context))
        indices += [slot.index] * len(context)
    ends += places[num_asking:]
    count = len(tokens)
    identical = [end + 1 for end in ends]
    numbers = array("q", [*tokens, *indices, *places, *places, *identical, *[0] * count, *ends, *chunks])
    starts = (*range(0, 6 * count, count), 6 * count, 7 * count)
    return Rows(numbers, starts, count, len(chunks) - 1, max(ends) + 1, count - num_asking, 6 * count)


def place_of(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


@final
class NativeTrees:
    """Trees after the rows of one pass, in the format of the C library.

    Few arrays and no tensors: the code that runs between two passes of the target is not in the processor caches.
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
        self._results = array("q", bytes(8 * (count + 2 * count * most)))
        self._reals = array("d", [0.0 if search.noise[0] is None else search.noise[0][1] for search in searches])
        is_noisy = any(self._reals)
        self._reals.extend(search.least_confidence for search in searches)
        self._reals.extend(search.least_score for search in searches)
        self._scores = array("d", bytes(8 * count * most))
        self._maps = array("d", bytes(16 * count * levels)) if searches[0].maps else None  # (trees, levels, 2)
        self._keys = array("I", bytes(8 * count * levels)) if is_noisy else None  # (trees, levels, 2)
        for first, search in zip(range(0, count * levels, levels), searches, strict=True):
            if self._maps is not None:
                for place, (slope, offset) in enumerate(search.maps, first):
                    self._maps[2 * place], self._maps[2 * place + 1] = slope, offset
            for place, entry in enumerate(search.noise if self._keys is not None else (), first):
                if self._keys is not None and entry is not None:
                    (low, high), _ = entry
                    self._keys[2 * place], self._keys[2 * place + 1] = low & MASK, high & MASK | 1
        self._count, self._most = count, most
        numbers = place_of(self._numbers)
        reals = place_of(self._reals)
        results = place_of(self._results)
        step = 8 * count
        # arguments of the call; the caller sets `kept`, `kept_step`, `ids` and `is_normed`
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
            counts=results,
            tokens=results + step,
            parents=results + step * (1 + most),
            scores=place_of(self._scores),
        )

    def trees(self) -> list[FoundTree]:
        trees = []
        total = self._count * self._most
        for tree in range(self._count):
            first = tree * self._most
            end = first + self._results[tree]
            tokens = self._results[self._count + first : self._count + end]
            parents = self._results[self._count + total + first : self._count + total + end]
            trees.append(FoundTree(tokens.tolist(), parents.tolist(), self._scores[first:end].tolist()))
        return trees


PADDING = 64  # entries after each head's table, which are read and masked
FIRST_DISTANCES = 256


class ScoreBiases:
    """Score biases by distance, shape (heads, distances), whose tables grow with the texts."""

    def __init__(self, tables: Sequence[Tensor], used: Sequence[int | None]) -> None:
        self._tables, self._used = tables, used
        self._length = 0
        self._kept: list[Tensor] = []

    def point(self, run: CPass, layers: Any, *, longest: int) -> None:
        if not self._tables or longest <= self._length:
            return
        self._length = max(2 * self._length, longest, FIRST_DISTANCES)
        distances = torch.arange(self._length - 1, -1, -1)
        self._kept = [
            torch.nn.functional.pad(table[:, distances.clamp(max=table.shape[1] - 1)], (0, PADDING)).contiguous()
            for table in self._tables
        ]
        for layer, used in zip(layers, self._used, strict=True):
            if used is not None:
                layer.score_bias = self._kept[used].data_ptr()
        run.bias_length = self._length


PIECES_OF_THREAD = 4  # attention chunks per thread, if there are enough rows
LEAST_ROWS = 8
KV_SCALE_BYTES = 4  # size of the scale after the codes of a head's key or value in 8 bits
ROW_COLUMNS = ("tokens", "slot", "place", "position", "identical", "list_start", "list", "chunks")


class NativeDecoder:
    """Packed weights of a model, or of one process's share of it, and its forward passes."""

    def __init__(
        self,
        blueprint: Blueprint,
        weights: Weights | PackedSource,
        *,
        quantization: str | None = None,
        share: Share | None = None,
    ) -> None:
        self.library = library()
        self._share = share
        if share is not None:
            assert isinstance(weights, Weights), "a share packs its own weights"
            blueprint, weights = share.blueprint, ShareWeights(weights, share)
        self._blueprint = blueprint
        self._format = format_of(quantization, blueprint.dtype)
        self.dtype: torch.dtype = getattr(torch, blueprint.dtype)
        self._memory_version = self._states_version = -1
        self._ropes = RopeTables(blueprint.ropes, blueprint.query_scaling)
        self.logit_buffers = LogitBufferPool()
        self._form = CPass()  # arguments that all passes share
        if isinstance(weights, Weights):
            weights = PackedWeights(self.library, blueprint, weights, kind=self._format, share=share)
        self.packed: PackedSource = weights
        self._biases = ScoreBiases(self.packed.biases, [layer.score_bias for layer in blueprint.layers])
        self._starts = blueprint.starts

    def store_codes(self) -> None:
        """Store keys and values of later passes in 8 bits, in rows of `KV_SCALE_BYTES` more than a head has numbers."""
        self.packed.decoder.cache_format = FORMATS["int8"]
        self._memory_version = -1

    def settle(self) -> None:
        """Finish work that would slow the first passes."""

    @property
    def num_layers(self) -> int:
        return len(self._starts) - 1

    @property
    def weight_bytes(self) -> int:
        return self.packed.num_bytes

    @property
    def read_bytes(self) -> int:
        """Size of the packed products that a pass over one row reads, in bytes: of experts those of one row."""
        return read_bytes(self.library, self.packed.decoder)

    @property
    def row_bytes(self) -> int:
        """Size of a row's activations in bytes: residual stream, product, mixed values, next input."""
        plan = self._blueprint
        all_heads = max((plan.heads + 2 * plan.kv_heads) * plan.head_dim, *map(plan.width_before_mixer, plan.layers))
        results = [layer.output.inputs for layer in plan.layers if layer.output is not None]
        widest = max(plan.hidden, plan.heads * plan.head_dim, plan.mlp, *results)
        experts = [layer.experts for layer in plan.layers if layer.experts is not None]
        uses = max((part.chosen + (part.shared_down is not None) for part in experts), default=1)
        return 4 * (plan.hidden + uses * (max(all_heads, plan.hidden) + 2 * widest))  # each expert takes as much room

    def rows_of_chunk(self, rows: int) -> int:
        """Return the rows per attention chunk in a pass over `rows` rows, which makes threads end together."""
        threads = torch.get_num_threads()  # one thread shares nothing, and reads keys once for all rows
        pieces = 1 if threads == 1 else -(-PIECES_OF_THREAD * threads // self._blueprint.kv_heads)
        fair = -(-rows // (pieces * LEAST_ROWS)) * LEAST_ROWS
        return min(fair, self.library.rows_of_chunk)

    @property
    def _num_tokens(self) -> int:
        """Number of tokens whose logits this process computes."""
        return self._blueprint.vocab if self._share is None else len(self._share.vocab)

    def input_embedding(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the embedding as passes use it, shape (vocab, hidden); of a share, the rows of its tokens."""
        lookup = self.packed.decoder.lookup
        if lookup.weight is not None:
            return self.library.unpack(lookup, self._num_tokens).to(dtype or self.dtype)
        separate = self.packed.at(self.packed.decoder.embedding)
        return self.output_head(dtype) if separate is None else separate

    def output_head(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the head as passes use it, shape (vocab, hidden), as a new tensor; of a share, its tokens' rows."""
        return self.library.unpack(self.packed.decoder.head, self._num_tokens).to(dtype or self.dtype)

    def product_weight(self, layer: int, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a product as packed: (outputs, inputs), gate and up in turns of 16 rows."""
        linear = product_of(self.packed.layers[layer], name)
        return self.library.unpack(linear, linear.outputs).to(dtype or self.dtype), self.packed.at(linear.bias)

    def small_weight(self, layer: int | None, name: str) -> Tensor:
        """Return a norm of a layer, or of the whole model for None, float32."""
        owner = self.packed.decoder if layer is None else self.packed.layers[layer]
        weight = self.packed.at(getattr(owner, name))
        assert weight is not None, "the model has this norm"
        return weight

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.library.final_norm(self.packed.decoder, hidden.float().contiguous())

    def embedding_facts(self) -> EmbeddingFacts:
        plan = self._blueprint
        decoder = self.packed.decoder
        if plan.start_norm is not None:
            raise UnsupportedModelError(f"{plan.kind} normalizes embeddings: choose a drafter that reads none")
        bias = self.packed.at(decoder.head.bias)
        if bias is not None and self._share is not None:
            raise UnsupportedModelError("the head's bias is divided among processes: choose a drafter that needs none")
        return EmbeddingFacts(
            plan.embedding_scale,
            plan.logit_scale,
            soft_cap=plan.logit_cap,
            bias=None if bias is None else bias[: self._num_tokens],
            is_tied=decoder.lookup.weight == decoder.head.weight,
        )

    def run(
        self,
        memory: KVMemory | None,
        rows: Rows,
        logit_rows: Sequence[int],
        *,
        layer_range: LayerRange,
        features: Tensor | None = None,
        rope_positions: Sequence[int] | None = None,
        sources: SourceRows | None = None,
        states: NativeStates | None = None,
        steps: StepPlan | None = None,
    ) -> RangeOutput:
        """Run one pass over rows; their keys and values are written to the memory, None for a pass over no layers.

        `features` are projected to the input of the first layer, shape (rows, inputs of the projection), float32.
        `rope_positions` are entries of the rotary tables; None for the rows' positions. `sources` are those that rows
        attend to. `steps` are those of recurrent layers, on `states`.
        """
        requested, vocab = array("q", logit_rows), self._blueprint.vocab
        rotated = None if rope_positions is None else array("q", rope_positions)
        run, buffer = self._filled(memory, rows, requested, rotated)
        run.first_layer, run.last_layer = (self._starts[layer] for layer in (layer_range.first, layer_range.end))
        captured = layers = skipped = None
        if not layer_range.is_plain:
            layers = array("q", (self._starts[layer] for layer in layer_range.captured_layers))
            captured = torch.empty(rows.count, len(layers), self._blueprint.hidden) if layers else None
            run.num_captured = len(layers)
            run.captured_layers = place_of(layers)
            run.captured = address(captured)
            skipped = layer_range.skipped(self._starts)
            run.hidden_in, run.features = address(layer_range.hidden), address(features)
            run.skipped = None if skipped is None else skipped.ctypes.data
        if sources is not None:
            run.source, run.sources = place_of(sources.rows), place_of(sources.table)
            run.source_queries = address(sources.queries)
        columns = None
        if steps is not None and states is not None:
            if states.version != self._states_version:
                states.point(self.packed.layers)
                self._states_version = states.version
            columns = steps.set_in(run)
            run.state_step, run.stored_step, run.entry_step = states.strides
        self.library.run(self.packed.decoder, run)
        del columns  # the pass refers to them
        at = RowsAt(buffer.address, len(logit_rows), vocab, vocab)
        return layer_range.output(NativeLogits(self.library, at, buffer.memory, run.num_threads), captured)

    def decode(
        self,
        memory: KVMemory,
        rows: Rows,
        noise: Sequence[RowNoise],
        stop_ids: Collection[int],
        *,
        seconds: float,
        rope_positions: Sequence[int] | None,
    ) -> list[list[int]]:
        """Run passes over one row of each text, which is moved on; otherwise as `LanguageModel.decode`."""
        requested, vocab = array("q", range(rows.count)), self._blueprint.vocab
        rotated = None if rope_positions is None else array("q", rope_positions)
        run, buffer = self._filled(memory, rows, requested, rotated, ahead=len(noise))
        run.last_layer = self._starts[-1]
        at = RowsAt(buffer.address, rows.count, vocab, vocab)
        count = num_compared(noise[0], vocab)
        tokens = self.library.decode(self.packed.decoder, run, at, noise, count, stop_ids, seconds=seconds)
        del buffer  # the passes refer to its memory
        return tokens

    def grow_trees(
        self,
        memory: KVMemory,
        rows: Rows,
        logit_rows: Sequence[int],
        trees: NativeTrees,
        *,
        before: Tensor,
        rope_positions: Sequence[int],
    ) -> None:
        """Run one pass over rows through all layers, and grow trees after the rows with logits.

        `trees`: the trees, which contain the results afterwards. `before`: input of the first layer, shape
        (rows, hidden), or features, shape (rows, layers, hidden), contiguous float32.
        """
        requested, rotated = array("q", logit_rows), array("q", rope_positions)
        run, buffer = self._filled(
            memory, rows, requested, rotated, ahead=trees.structure.levels, logits=trees.structure.most_rows
        )
        run.last_layer = self.num_layers
        if before.dim() == 3:
            run.features, layers = before.data_ptr(), array("q", (0, self.num_layers))
        else:
            run.hidden_in, layers = before.data_ptr(), array("q", (self.num_layers,))
        states = self.logit_buffers.take(rows.count * len(layers), self._blueprint.hidden)
        run.num_captured = len(layers)
        run.captured_layers = place_of(layers)
        run.captured = states.address
        self.library.grow_trees(self.packed.decoder, run, trees.structure)
        del buffer, states  # the pass refers to their memory

    def _filled(
        self,
        memory: KVMemory | None,
        rows: Rows,
        requested: array[int],
        rope_positions: array[int] | None,
        *,
        ahead: int = 0,
        logits: int = 0,
    ) -> tuple[CPass, LogitBuffer]:
        """Return the arguments of a pass, which refer to the given arrays, and the memory of its logits.

        `ahead` is the number of positions that are needed after the last one, `logits` the number of rows that
        the memory has room for at least.
        """
        # avoids numpy and torch: a pass has evicted their code from the processor caches
        if memory is not None and memory.version != self._memory_version:
            for index, keys in memory.keys.items():
                if index >= 0:  # others are not read by layers
                    layer = self.packed.layers[index]
                    layer.keys, layer.values = keys.data_ptr(), memory.values[index].data_ptr()
                    self._form.slot_step = keys.stride(0) // keys.shape[-1]
            self._form.places = memory.length
            self._memory_version = memory.version
        longest = rows.longest if rope_positions is None else max(rope_positions, default=0) + 1
        self._ropes.point(self._form, longest=longest + ahead)
        self._biases.point(self._form, self.packed.layers, longest=rows.longest + ahead)
        buffer = self.logit_buffers.take(max(len(requested), logits), self._blueprint.vocab)
        run = CPass.from_buffer_copy(self._form)
        run.rows = rows.count
        run.num_chunks = rows.num_chunks
        run.num_context = rows.num_context
        run.num_logits = len(requested)
        run.num_threads = torch.get_num_threads()
        run.logit_rows, run.logits = place_of(requested), buffer.address
        if (share := self._share) is not None:
            run.team = share.memory.at_least(self.library.team_bytes(self.packed.decoder, run.rows, run.num_logits))
            run.team_rank = share.rank
            run.team_size = share.size
            if share.rank:
                run.logits = None  # only rank 0 reads them
        first = place_of(rows.numbers)
        for name, start in zip(ROW_COLUMNS, rows.starts, strict=True):
            setattr(run, name, first + start * rows.numbers.itemsize)
        if rows.block_ends is not None:
            run.block_end = first + rows.block_ends * rows.numbers.itemsize
        run.rope_position = run.position if rope_positions is None else place_of(rope_positions)
        return run, buffer
