"""Bindings of the C library: its structures and functions."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.blueprint import ACTIVATIONS, MAX_EXPERTS, NORM_KINDS
from draftree.models.native.build import NativeUnavailableError, NoCompilerError, built_library
from draftree.models.native.groups import KINDS, GroupFunctions
from draftree.models.native.logit_buffers import RowsAt
from draftree.models.native.structures import STRUCTURES, CDecoder, CPass, CTrees, parse_layout, require_same_layout
from draftree.models.native.variants import Variant, preferred_variants
from draftree.sampling.logits import RowNoise, Top

logger = logging.getLogger(__name__)

FORMATS: Mapping[str, int] = MappingProxyType({"float32": 0, "bfloat16": 1, "int8": 2, "grouped": 3})
"""Formats of products; `groups.py` has the kinds of grouped ones."""
LANES = 16
_size, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
PACK_ARGUMENTS = (_pointer, _size, _size, _size, _pointer, _size, _size, _size, _pointer, _pointer)

CORRECT_ARGUMENTS = (_pointer, _pointer, _size, _pointer, _size)
LEARN_ARGUMENTS = (_pointer, _pointer, _size, _pointer, _pointer, _pointer, _size, _float)


class NotLoadableError(NativeUnavailableError):
    """The system does not load the library, for example from a file system without execution rights."""


class TilesRefusedError(NativeUnavailableError):
    """The processor has matrix tiles, but the system does not let this process use them."""


class CSearch(ctypes.Structure):
    """`Search`."""

    _fields_ = (
        ("logits", _pointer),
        *((name, _size) for name in ("rows", "stride", "vocab", "count")),
        *((name, _pointer) for name in ("keys", "ids", "temperatures", "tokens", "scores", "totals")),
        ("next", ctypes.c_long),
        ("failed", ctypes.c_int),
    )


class SearchBuffers:
    """Buffers of one thread's searches, allocated once: after a pass the caches are cold and allocation is slow.

    Args:
        rows: capacity in rows.
        numbers: capacity in results.
    """

    def __init__(self, rows: int, numbers: int) -> None:
        self.rows, self.numbers = rows, numbers
        self.keys, self.temperatures = (ctypes.c_uint32 * (2 * rows))(), (_float * rows)()
        self._tokens, self._scores, self._totals = (_size * numbers)(), (_float * numbers)(), (_float * rows)()
        self.totals_at = ctypes.addressof(self._totals)
        self.search = CSearch(
            keys=ctypes.addressof(self.keys),
            temperatures=ctypes.addressof(self.temperatures),
            tokens=ctypes.addressof(self._tokens),
            scores=ctypes.addressof(self._scores),
        )
        self.search_at = ctypes.addressof(self.search)

    def found(self, rows: int, count: int) -> Top:
        """Return the results of the search."""
        tokens, scores = self._tokens[: rows * count], self._scores[: rows * count]
        if rows == 1:
            return Top([tokens], [scores], self._totals[:1])
        starts = range(0, rows * count, count)
        each = [tokens[at : at + count] for at in starts], [scores[at : at + count] for at in starts]
        return Top(*each, self._totals[:rows])


class ThreadBuffers(threading.local):
    """`SearchBuffers` of each thread."""

    def __init__(self) -> None:
        self._buffers = SearchBuffers(16, 256)

    def of(self, rows: int, count: int) -> SearchBuffers:
        """Return buffers that are large enough."""
        buffers = self._buffers
        if rows > buffers.rows or rows * count > buffers.numbers:
            buffers = self._buffers = SearchBuffers(2 * rows, 2 * rows * count)
        return buffers


class Library:
    """Functions of a built library.

    Args:
        path: path of the shared library.

    Raises:
        NativeUnavailableError: the library does not load, has another layout, or may not run here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library: Any = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotLoadableError(f"the C pass '{path}' does not load: {error}") from error
        self._library.draftree_block_bytes.argtypes = [_size, _size]
        self._library.draftree_block_bytes.restype = _size
        self._library.draftree_pack.argtypes = PACK_ARGUMENTS
        self._library.draftree_pack.restype = None
        self._library.draftree_pass.argtypes = [ctypes.POINTER(CDecoder), ctypes.POINTER(CPass)]
        self._library.draftree_team_bytes.argtypes = [ctypes.POINTER(CDecoder), _size, _size]
        self._library.draftree_team_bytes.restype = _size
        self._library.draftree_instructions.restype = ctypes.c_char_p
        self._library.draftree_grow.argtypes = [
            ctypes.POINTER(CDecoder),
            ctypes.POINTER(CPass),
            ctypes.POINTER(CTrees),
        ]
        self._library.draftree_final_norm.argtypes = [ctypes.POINTER(CDecoder), _pointer, _size, _pointer]
        self._library.draftree_final_norm.restype = None
        self._library.draftree_search.argtypes = [_pointer, _size]
        self._library.draftree_correct.argtypes = CORRECT_ARGUMENTS
        self._library.draftree_correct.restype = None
        self._library.draftree_learn.argtypes = LEARN_ARGUMENTS
        self._library.draftree_learn.restype = None
        self.correct, self.learn = self._library.draftree_correct, self._library.draftree_learn
        """The functions of corrections, see `learning.py`."""
        self._library.draftree_layout.restype = ctypes.c_char_p
        self._buffers = ThreadBuffers()
        self.groups = GroupFunctions(self._library)
        """Functions for weights with a scale for each group of inputs."""
        self._require_same_layout()
        if not self._library.draftree_ready():
            raise TilesRefusedError("the system does not let this process use the processor's matrix tiles")

    def _require_same_layout(self) -> None:
        text: bytes = self._library.draftree_layout()
        layout = parse_layout(text.decode())
        formats = {name.upper(): number for name, number in FORMATS.items()}
        constants = {**formats, **ACTIVATIONS, **NORM_KINDS, "LANES": LANES, "MAX_EXPERTS": MAX_EXPERTS}
        constants["NUM_KINDS"] = len(KINDS)
        require_same_layout(layout, (*STRUCTURES, CSearch), constants)
        self.rows_of_chunk = layout["-", "ATTENTION_ROWS"][1]
        self.max_count = layout["-", "MAX_COUNT"][1]

    @property
    def instructions(self) -> str:
        """Instruction set of the kernels."""
        name: bytes = self._library.draftree_instructions()
        return name.decode()

    def block_bytes(self, inputs: int, kind: int) -> int:
        """Return the size of 16 packed outputs in bytes."""
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
        self._library.draftree_pack(
            weight.data_ptr(),
            source,
            weight.shape[0],
            weight.shape[1],
            packed.data_ptr(),
            kind,
            first,
            step,
            address(scales),
            address(sums),
        )

    def run(self, decoder: CDecoder, run: CPass) -> None:
        """Run one pass.

        Raises:
            MemoryError: there is no room for activations.
        """
        if self._library.draftree_pass(ctypes.byref(decoder), ctypes.byref(run)):
            raise MemoryError(f"no memory for a pass over {run.rows} rows")

    def team_bytes(self, decoder: CDecoder, rows: int, num_logits: int) -> int:
        """Return the size of the memory that the processes of a team share in a pass, in bytes."""
        return int(self._library.draftree_team_bytes(ctypes.byref(decoder), rows, num_logits))

    def grow_trees(self, decoder: CDecoder, run: CPass, trees: CTrees) -> None:
        """Run one pass, and grow trees after its rows with logits.

        Raises:
            MemoryError: there is no room for activations.
        """
        if self._library.draftree_grow(ctypes.byref(decoder), ctypes.byref(run), ctypes.byref(trees)):
            raise MemoryError(f"no memory for trees after {run.rows} rows")

    def final_norm(self, decoder: CDecoder, states: Tensor) -> Tensor:
        """Return contiguous float32 states after the final norm, shape (rows, hidden)."""
        found = torch.empty_like(states)
        self._library.draftree_final_norm(ctypes.byref(decoder), states.data_ptr(), len(states), found.data_ptr())
        return found

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

        Raises:
            MemoryError: there is no room for the scores of a row.
        """
        rows = logits.rows
        buffers = self._buffers.of(rows, count)
        search = buffers.search
        search.logits, search.stride, search.vocab = logits.address, logits.stride, logits.width
        search.rows, search.count, search.ids = rows, count, ids
        search.totals = buffers.totals_at if totals else None
        keys, temperatures = buffers.keys, buffers.temperatures
        for row, entry in enumerate(noise):
            if entry is None:
                temperatures[row] = 0.0
            else:
                (keys[2 * row], second), temperatures[row] = entry
                keys[2 * row + 1] = second | 1
        if rows and self._library.draftree_search(buffers.search_at, num_threads):
            raise MemoryError(f"no memory for the scores of {logits.width} tokens")
        return buffers.found(rows, count)


@functools.cache
def library() -> Library:
    """Return the library of this machine's best variant that can be compiled and may run, loaded once.

    Raises:
        NativeUnavailableError: there is none; the reason is that of the first variant.
    """
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
    """Load the library of a variant.

    Raises:
        NativeUnavailableError: it cannot be compiled or loaded.
    """
    try:
        return Library(built_library(variant))
    except NotLoadableError as error:
        logger.info("%s: compiling it in another folder", error)
        return Library(built_library(variant, in_cache=False))


def format_of(quantization: str | None, dtype: str) -> int:
    """Return the format of the products of a model.

    Args:
        quantization: "int8", "int4", "gguf" for the blocks of a GGUF file, or None for the model's dtype.
        dtype: torch's name of the model's dtype.
    """
    return FORMATS[{None: dtype, "int8": "int8"}.get(quantization, "grouped")]


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's values; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()
