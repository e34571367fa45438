"""Bindings of the C library: its structures, functions and memory for logits."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import threading
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftree.models.native.blueprint import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LATENTS,
    MAX_TAPS,
    NORM_KINDS,
    RECURRENCES,
    SCORES,
    Blueprint,
    LinearBlueprint,
)
from draftree.models.native.build import (
    NativeUnavailableError,
    NoCompilerError,
    Variant,
    built_library,
    preferred_variants,
)
from draftree.models.native.structures import (
    STRUCTURES,
    CDecoder,
    CLinear,
    CPass,
    CTrees,
    fields,
    parse_layout,
    require_same_layout,
)
from draftree.sampling.logits import NEAR, RowNoise, Top
from draftree.weights.gguf_file import KINDS

LAYER_KIND, HEAD_KIND = "Q4_K", "Q6_K"
"""Kinds of 4-bit weights that are quantized here: products of layers; the output head and the embedding."""
KIND_BITS = 4  # bits of the kind in an entry of a table of blocks; the other bits are the place of the block


@dataclass(frozen=True, slots=True)
class RowBlocks:
    kind: str  # name of the blocks, one of `KINDS`
    rows: Tensor  # bytes of the rows, shape (rows, bytes of a row), uint8, contiguous
    order: Tensor  # row of each output, int64

    def __len__(self) -> int:
        return len(self.order)

    def part(self, first: int, end: int) -> RowBlocks:
        return replace(self, order=self.order[first:end])


class GroupFunctions:
    def __init__(self, library: Any) -> None:
        self._library = library

    def block_bytes(self, inputs: int, kind: str) -> int:
        return int(self._library.draftree_group_bytes(inputs, KINDS.index(kind)))

    def pack(self, source: Tensor | RowBlocks, inputs: int, packed: Tensor, blocks: Tensor) -> None:
        """Pack outputs into blocks of `packed`: quantize a weight, or copy codes and scales.

        `blocks` are these outputs' entries in the product's table, int64, contiguous.
        """
        places = packed.data_ptr(), blocks.data_ptr()
        if isinstance(source, RowBlocks):
            rows = source.rows
            order = source.order.contiguous()
            self._library.draftree_pack_blocks(
                rows.data_ptr(), rows.shape[1], order.data_ptr(), len(order), inputs, *places
            )
        else:
            is_half = int(source.dtype == torch.bfloat16)
            self._library.draftree_quantize(source.data_ptr(), is_half, source.shape[0], inputs, *places)


def lookup_of(plan: Blueprint) -> LinearBlueprint:
    return LinearBlueprint(plan.embedding, None, plan.hidden, max(plan.vocab, plan.head.outputs))


def table_of(kinds: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Return the table of a product's blocks, int64, from their kinds and sizes in bytes."""
    starts = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0)
    return (starts << KIND_BITS) + torch.tensor([KINDS.index(kind) for kind in kinds], dtype=torch.int64)


FLOAT_BYTES = 4
MASK = (1 << 32) - 1
ALIGNMENT = 64
KEPT = 3  # maximum number of buffers: one for the last pass, others for passes whose logits are still in use
UNREAD = 3  # references to an unused buffer: by the list, the loop and the call of `getrefcount`


class RowsAt(NamedTuple):
    address: int
    rows: int
    stride: int  # distance between rows, in numbers
    width: int


class LogitBuffer(NamedTuple):
    memory: ctypes.Array[ctypes.c_float]
    address: int  # address of the first row


class LogitBufferPool:
    """Pool of buffers for rows of floats. A buffer is free when neither logits nor tensors refer to it.

    The logits of a pass take hundreds of kilobytes, and allocating them costs more than searching them, because the
    system zeroes every page. So the next pass overwrites a buffer that is not referenced any more.
    """

    def __init__(self) -> None:
        self._rooms: list[ctypes.Array[ctypes.c_float]] = []

    def take(self, count: int, width: int) -> LogitBuffer:
        """Return a buffer for `count` rows of undefined content."""
        needed = count * width + ALIGNMENT // FLOAT_BYTES
        for room in self._rooms:
            if len(room) >= needed and sys.getrefcount(room) == UNREAD:
                break
        else:
            room = (ctypes.c_float * needed)()
            self._rooms = [room, *self._rooms[: KEPT - 1]]
        address = ctypes.addressof(room)
        return LogitBuffer(room, address + -address % ALIGNMENT)

    def clear(self) -> None:
        """Keep no buffer; the memory of those that are in use is freed with the last reference to them."""
        self._rooms = []


logger = logging.getLogger(__name__)

FORMATS: Mapping[str, int] = MappingProxyType({"float32": 0, "bfloat16": 1, "int8": 2, "grouped": 3})
"""Formats of products; `groups.py` has the kinds of grouped ones."""
LANES = 16
_size = ctypes.c_int64
_pointer = ctypes.c_void_p
_float = ctypes.c_float
_decoder = ctypes.POINTER(CDecoder)
_pass = ctypes.POINTER(CPass)
FUNCTIONS: Mapping[str, tuple[Sequence[Any], Any]] = MappingProxyType(
    {
        "ready": ((), ctypes.c_int),
        "layout": ((), ctypes.c_char_p),
        "instructions": ((), ctypes.c_char_p),
        "block_bytes": ((_size, _size), _size),
        "pack": ((_pointer, _size, _size, _size, _pointer, _size, _size, _size, _pointer, _pointer), None),
        "pass": ((_decoder, _pass), ctypes.c_int),
        "team_bytes": ((_decoder, _size, _size), _size),
        "grow": ((_decoder, _pass, ctypes.POINTER(CTrees)), ctypes.c_int),
        "final_norm": ((_decoder, _pointer, _size, _pointer), None),
        "search": ((_pointer, _size), ctypes.c_int),
        "decode": (
            (_decoder, _pass, *[_pointer] * 4, _size, _size, ctypes.c_double, ctypes.c_double),
            _size,
        ),
        "correct": ((_pointer, _pointer, _size, _pointer, _size), None),
        "learn": ((_pointer, _pointer, _size, _pointer, _pointer, _pointer, _size, _float), None),
        "measure_blocks": ((_pointer, _size, _size, _size, _pointer, _pointer), None),
        "compact_blocks": ((_pointer, _size, _size, _size, _pointer, _pointer), ctypes.c_int),
        "product_bytes": ((ctypes.POINTER(CLinear),), _size),
        "unpack": ((ctypes.POINTER(CLinear), _size, _size, _pointer), None),
        "group_bytes": ((_size, _size), _size),
        "quantize": ((_pointer, _size, _size, _size, _pointer, _pointer), None),
        "pack_blocks": ((_pointer, _size, _pointer, _size, _size, _pointer, _pointer), None),
    }
)
"""Arguments and results of the functions, whose names begin with "draftree_"."""


class NotLoadableError(NativeUnavailableError):
    """The system does not load the library, for example from a file system without execution rights."""


class TilesRefusedError(NativeUnavailableError):
    """The processor has matrix tiles, but the system does not let this process use them."""


class CSearch(ctypes.Structure):
    _fields_ = (
        ("logits", _pointer),
        *fields(_size, "rows", "stride", "vocab", "count"),
        *fields(_pointer, "keys", "ids", "temperatures", "tokens", "scores", "totals"),
        ("next", ctypes.c_long),
        ("failed", ctypes.c_int),
    )


class SearchBuffers:
    """Buffers of one thread's searches, allocated once: after a pass the caches are cold and allocation is slow."""

    def __init__(self, rows: int, numbers: int) -> None:
        self.rows, self.numbers = rows, numbers
        self.keys, self.temperatures = (ctypes.c_uint32 * (2 * rows))(), (_float * rows)()
        self._tokens = (_size * numbers)()
        self._scores = (_float * numbers)()
        self._totals = (_float * rows)()
        self.totals_at = ctypes.addressof(self._totals)
        self.search = CSearch(
            keys=ctypes.addressof(self.keys),
            temperatures=ctypes.addressof(self.temperatures),
            tokens=ctypes.addressof(self._tokens),
            scores=ctypes.addressof(self._scores),
        )
        self.search_at = ctypes.addressof(self.search)

    def top(self, rows: int, count: int) -> Top:
        tokens, scores = self._tokens[: rows * count], self._scores[: rows * count]
        if rows == 1:
            return Top([tokens], [scores], self._totals[:1])
        starts = range(0, rows * count, count)
        each = [tokens[at : at + count] for at in starts], [scores[at : at + count] for at in starts]
        return Top(*each, self._totals[:rows])


class ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.buffers = SearchBuffers(16, 256)


class Library:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library: Any = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotLoadableError(f"the native library '{path}' does not load: {error}") from error
        for name, (arguments, result) in FUNCTIONS.items():
            function = getattr(self._library, f"draftree_{name}")
            function.argtypes = arguments
            function.restype = result
        self.correct, self.learn = self._library.draftree_correct, self._library.draftree_learn
        """The functions of corrections, see `learning.py`."""
        self._thread = ThreadBuffers()
        self.groups = GroupFunctions(self._library)  # functions for weights with a scale for each group of inputs
        layout = parse_layout(self._library.draftree_layout().decode())
        formats = {name.upper(): number for name, number in FORMATS.items()}
        constants = {**formats, **ACTIVATIONS, **NORM_KINDS, "LANES": LANES}
        constants |= (
            RECURRENCES | SCORES | {"MAX_EXPERTS": MAX_EXPERTS, "MAX_TAPS": MAX_TAPS, "MAX_LATENTS": MAX_LATENTS}
        )
        require_same_layout(layout, (*STRUCTURES, CSearch), constants | {"NUM_KINDS": len(KINDS)})
        self.rows_of_chunk = layout["-", "ATTENTION_ROWS"][1]
        self.max_count = layout["-", "MAX_COUNT"][1]
        self.keeps_compact = bool(layout["-", "KEEPS_COMPACT"][1])  # whether weights in bfloat16 take 12 bits
        if not self._library.draftree_ready():
            raise TilesRefusedError("the system does not let this process use the processor's matrix tiles")

    @property
    def instructions(self) -> str:
        return str(self._library.draftree_instructions().decode())

    def block_bytes(self, inputs: int, kind: int) -> int:
        return int(self._library.draftree_block_bytes(inputs, kind))

    def pack(
        self,
        weight: Tensor,
        packed: Tensor,
        *,
        kind: int,
        first: int,
        step: int,
        scales: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        """Pack a weight of shape (outputs, inputs) into blocks first, first + step, … of `packed`."""
        weight = weight.detach().contiguous()
        source = FORMATS["bfloat16" if weight.dtype == torch.bfloat16 else "float32"]
        place = (weight.data_ptr(), source, *weight.shape, packed.data_ptr(), kind, first, step)
        self._library.draftree_pack(*place, address(scales), address(sums))

    def product_bytes(self, linear: CLinear) -> int:
        """Return the size of a packed product in bytes, with the scales of groups; 0 for an empty one."""
        return int(self._library.draftree_product_bytes(ctypes.byref(linear)))

    def unpack(self, linear: CLinear, outputs: int) -> Tensor:
        """Return the first outputs of a product as passes use them, shape (outputs, inputs), float32."""
        weight = torch.empty(outputs, linear.inputs)
        self._library.draftree_unpack(ctypes.byref(linear), 0, outputs, weight.data_ptr())
        return weight

    def measure_blocks(
        self, packed: Tensor, inputs: int, first: int, end: int, high_bytes: Tensor, counts: Tensor
    ) -> None:
        """Find the most frequent high bytes and the number of exceptions of packed blocks in bfloat16."""
        place = packed.data_ptr(), inputs, first, end
        self._library.draftree_measure_blocks(*place, high_bytes.data_ptr(), counts.data_ptr())

    def compact_blocks(
        self, packed: Tensor, inputs: int, first: int, end: int, high_bytes: Tensor, table: Tensor
    ) -> None:
        """Write packed blocks in 12 bits over themselves, one after the other, and their exceptions into `table`."""
        place = packed.data_ptr(), inputs, first, end
        if self._library.draftree_compact_blocks(*place, high_bytes.data_ptr(), table.data_ptr()):
            raise MemoryError(f"no memory for {inputs} inputs of two blocks")

    def run(self, decoder: CDecoder, run: CPass) -> None:
        if self._library.draftree_pass(ctypes.byref(decoder), ctypes.byref(run)):
            raise MemoryError(f"no memory for a pass over {run.rows} rows")

    def team_bytes(self, decoder: CDecoder, rows: int, num_logits: int) -> int:
        """Return the size of the memory that the processes of a team share in a pass, in bytes."""
        return int(self._library.draftree_team_bytes(ctypes.byref(decoder), rows, num_logits))

    def grow_trees(self, decoder: CDecoder, run: CPass, trees: CTrees) -> None:
        if self._library.draftree_grow(ctypes.byref(decoder), ctypes.byref(run), ctypes.byref(trees)):
            raise MemoryError(f"no memory for trees after {run.rows} rows")

    def final_norm(self, decoder: CDecoder, states: Tensor) -> Tensor:
        """Return contiguous float32 states after the final norm, shape (rows, hidden)."""
        normed = torch.empty_like(states)
        self._library.draftree_final_norm(ctypes.byref(decoder), states.data_ptr(), len(states), normed.data_ptr())
        return normed

    def search(
        self,
        logits: RowsAt,
        noise: RowNoise,
        count: int,
        *,
        totals: bool,
        num_threads: int,
        ids: int | None = None,
    ) -> Top:
        """Return the `count` largest scores of each row, at most `max_count` and the width.

        With `totals`, sums are returned as well. `ids` is the address of the tokens of the columns, 32-bit integers
        filled up to a multiple of 64; None if column i is token i.
        """
        buffers = self._prepared(logits, noise, count)
        search = buffers.search
        search.ids = ids
        search.totals = buffers.totals_at if totals else None
        if logits.rows and self._library.draftree_search(buffers.search_at, num_threads):
            raise MemoryError(f"no memory for the scores of {logits.width} tokens")
        return buffers.top(logits.rows, count)

    def decode(
        self,
        decoder: CDecoder,
        run: CPass,
        logits: RowsAt,
        noise: Sequence[RowNoise],
        count: int,
        stop_ids: Collection[int],
        *,
        seconds: float,
    ) -> list[list[int]]:
        """Run passes that begin with `run`, one row for each text; otherwise as `LanguageModel.decode`.

        `logits` is the place of a pass's logits, `count` the number of scores that are compared, as in `search`.
        """
        rows = logits.rows
        buffers = self._prepared(logits, noise[0], count)
        buffers.search.ids = buffers.search.totals = None
        pairs = [(0, 0) if entry is None else entry[0] for step in noise for entry in step]
        keys = array("I", [number & MASK for first, second in pairs for number in (first, second | 1)])
        stops, tokens = array("q", stop_ids), array("q", bytes(8 * rows * len(noise)))
        places = [numbers.buffer_info()[0] for numbers in (keys, stops, tokens)]
        num_passes = self._library.draftree_decode(
            ctypes.byref(decoder), ctypes.byref(run), buffers.search_at, *places, len(noise), len(stops), seconds, NEAR
        )
        if num_passes < 0:
            raise MemoryError(f"no memory for a pass over {rows} rows")
        return [tokens[at : at + rows].tolist() for at in range(0, num_passes * rows, rows)]

    def _prepared(self, logits: RowsAt, noise: RowNoise, count: int) -> SearchBuffers:
        """Return this thread's buffers with the arguments of a search."""
        rows = logits.rows
        buffers = self._thread.buffers
        if rows > buffers.rows or rows * count > buffers.numbers:
            buffers = self._thread.buffers = SearchBuffers(2 * rows, 2 * rows * count)
        search = buffers.search
        search.logits = logits.address
        search.stride = logits.stride
        search.vocab = logits.width
        search.rows = rows
        search.count = count
        keys, temperatures = buffers.keys, buffers.temperatures
        for row, entry in enumerate(noise):
            if entry is None:
                temperatures[row] = 0.0
            else:
                (keys[2 * row], second), temperatures[row] = entry
                keys[2 * row + 1] = second | 1
        return buffers


@functools.cache
def library() -> Library:
    """Return the library of this machine's best variant that can be compiled and may run, loaded once."""
    first: NativeUnavailableError | None = None
    for variant in preferred_variants():
        try:
            return load_library(variant)
        except NoCompilerError:
            raise
        except NativeUnavailableError as error:  # an old compiler, or a sandbox without matrix tiles
            logger.info("variant '%s': %s", variant.name, error)
            first = first or error
    assert first is not None, "every machine runs a variant"
    raise first


def load_library(variant: Variant) -> Library:
    try:
        return Library(built_library(variant))
    except NotLoadableError as error:
        logger.info("%s: compiling it in another folder", error)
        return Library(built_library(variant, in_cache=False))


def format_of(quantization: str | None, dtype: str) -> int:
    """Return the format of a model's products: grouped for "int4" and for "gguf", the blocks of a GGUF file."""
    return FORMATS[{None: dtype, "int8": "int8"}.get(quantization, "grouped")]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
