"""Reader of a GGUF file: metadata as Python values, tensors as float32 arrays.

Source: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3, little-endian. The blocks of quantised tensors
are dequantized by the `gguf` package. Every read is checked against the end of the file, so that a damaged file raises
one clear error.

`gguf.GGUFReader` is no replacement: it takes 0.84 s for the header of TinyLlama, of which this reader takes 0.01 s, and
has no limits: a file of 64 bytes that declares a list of 2^40 bytes ends in a `MemoryError` after 8 s, nested lists in
a `RecursionError`.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftree.core.errors import ModelLoadError, WeightsError, import_extra, require_extra

DEFAULT_ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
IN_FLOAT32 = re.compile(r"ffn_gate_inp|\.(ssm_conv1d|shortconv\.conv|ssm_norm)\.|\.ssm_[ad]$")
FLOAT32, FLOAT16 = 0, 1
MAX_QUOTED = 300
MAX_ITEMS = 1 << 24  # items of a list of the metadata; the largest known vocabularies have a million
MAX_NESTED = 4  # lists inside lists
CHUNK_VALUES = 1 << 22  # values of a tensor that are dequantized at once
PURPOSE = "weights in the GGUF format need"
BLOCKS = {
    FLOAT32: ("F32", 1, 4),
    FLOAT16: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""Name, values and bytes of the kinds of blocks that need no import of the `gguf` package, by their numbers."""

Dtype = Literal["bfloat16", "float16", "float32"]


def require_gguf() -> None:
    require_extra("gguf", PURPOSE, error=WeightsError)


def _kind(number: int) -> tuple[str, int, int]:
    """Return name, values and bytes of a kind of blocks."""
    if number not in BLOCKS:
        gguf = import_extra("gguf", PURPOSE, error=WeightsError)
        kind = gguf.GGMLQuantizationType(number)
        values, size = gguf.GGML_QUANT_SIZES[kind]
        return str(kind.name), int(values), int(size)
    return BLOCKS[number]


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF by its first bytes or its name."""
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of one tensor; `shape` is outermost first, as in numpy and torch."""

    name: str
    shape: tuple[int, ...]
    kind: int
    first_byte: int
    num_bytes: int

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix in the type of the file; routers, filters and states' settings stay in float32."""
        return len(self.shape) > 1 and not IN_FLOAT32.search(self.name)


class GgufFile:
    __slots__ = ("_bytes", "_position", "_raw", "metadata", "path", "tensors")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if path.stat().st_size < 24:
            raise self.broken("it is shorter than a header")
        # copy on write, so that torch accepts views; nothing is written
        self._bytes = np.memmap(path, mode="c", dtype=np.uint8)
        self._raw: mmap.mmap = self._bytes._mmap  # type: ignore[attr-defined]
        self._read_header()

    @property
    def natural_dtype(self) -> Dtype:
        """The floating-point type of the file's matrices after dequantization: their own, or bfloat16."""
        kinds = {tensor.kind for tensor in self.tensors.values() if tensor.is_matrix}
        if FLOAT32 in kinds:
            return "float32"
        return "float16" if kinds == {FLOAT16} else "bfloat16"

    @property
    def unpacked_bytes(self) -> int:
        item_bytes = 4 if self.natural_dtype == "float32" else 2
        return item_bytes * sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def broken(self, why: str) -> ModelLoadError:
        """Return the error for an unreadable file; `why` may quote the content."""
        shown = "".join(letter if letter.isprintable() else "?" for letter in why[:MAX_QUOTED])
        return ModelLoadError(f"'{self.path}' is not a readable GGUF file: {shown}; get the file again")

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value among the keys of the file's architecture; one without a default is required."""
        key = f"{self.metadata.get('general.architecture')}.{key}"
        value = self.metadata.get(key, default)
        if value is None:
            raise self.broken(f"it lacks the key '{key}'")
        return value

    def tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise self.broken(f"it lacks the tensor '{name}'")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        import_extra("gguf", PURPOSE, error=WeightsError)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensor(name)
        kind = GGMLQuantizationType(tensor.kind)
        rows = self.rows(name)
        if kind.name == "BF16":
            return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
        values = np.empty((len(rows), tensor.shape[-1]), np.float32)
        count = max(1, CHUNK_VALUES // tensor.shape[-1])
        try:
            # the library takes several times the memory of what it dequantizes
            for first in range(0, len(rows), count):
                values[first : first + count] = dequantize(rows[first : first + count], kind)
            return values.reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"'{self.path}' holds '{name}' in blocks of type {kind.name}, which cannot be unpacked here: "
                "use a file of another quantisation"
            ) from error

    def kind_of(self, name: str) -> str:
        return _kind(self.tensor(name).kind)[0]

    def rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor as a view of the file, shape (rows, bytes of a row)."""
        tensor = self.tensor(name)
        content = self._bytes[tensor.first_byte : tensor.first_byte + tensor.num_bytes]
        return content.reshape(math.prod(tensor.shape[:-1]), -1)

    def release(self, name: str) -> None:
        """Release the mapped pages of a tensor; later reads load them again."""
        tensor = self.tensor(name)
        first = -(-tensor.first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.first_byte + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            self._raw.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _read_header(self) -> None:
        if bytes(self._bytes[:4]) != b"GGUF":
            raise self.broken("it does not begin with the letters GGUF")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self.broken(f"it has version {version}, and only versions 2 and 3 are supported")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise self.broken(f"it has the key '{key}' twice")
            self.metadata[key] = self._value(self._scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            num_dimensions = self._scalar("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise self.broken(f"tensor '{name}' has {num_dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
            infos.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment <= 0:
            raise self.broken(f"it declares an alignment of tensors to {str(alignment)[:MAX_QUOTED]} bytes")
        start = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise self.broken(f"it has the tensor '{name}' twice")
            if offset % alignment:
                raise self.broken(f"tensor '{name}' does not begin at a multiple of {alignment} bytes")
            self.tensors[name] = self._place(name, shape, kind=kind, first_byte=start + offset)

    def _place(self, name: str, shape: tuple[int, ...], *, kind: int, first_byte: int) -> GgufTensor:
        try:
            _, block_values, block_bytes = _kind(kind)
        except (ValueError, KeyError):
            raise self.broken(f"tensor '{name}' has blocks of the unknown type {kind}") from None
        if not shape or 0 in shape or shape[-1] % block_values:
            raise self.broken(f"tensor '{name}' of shape {list(shape)} is not made of blocks of {block_values}")
        num_bytes = math.prod(shape) // block_values * block_bytes
        if first_byte + num_bytes > len(self._bytes):
            raise self.broken(
                f"tensor '{name}' would end at byte {first_byte + num_bytes}, and the file at {len(self._bytes)}"
            )
        return GgufTensor(name, shape, kind, first_byte, num_bytes)

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._bytes):
            raise self.broken(f"it ends at byte {len(self._bytes)}, in the middle of its header")
        taken = self._raw[self._position : end]
        self._position = end
        return taken

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            # larger lists mean damage, and would only exhaust the memory
            if count > MAX_ITEMS:
                raise self.broken(f"a list claims {count} items, of {MAX_ITEMS} at most")
            if item == ARRAY and depth == MAX_NESTED:
                raise self.broken(f"lists are nested more than {MAX_NESTED} times")
            if item in SCALARS:
                code = SCALARS[item]
                return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
            return self._strings(count) if item == STRING else [self._value(item, depth + 1) for _ in range(count)]
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        raise self.broken(f"a value has the unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        """Return a list of strings; vocabularies have some hundred thousand, so that the loop calls little."""
        raw, end, length_at = self._raw, len(self._bytes), struct.Struct("<Q").unpack_from
        place = self._position
        strings = []
        for _ in range(count):
            start = place + 8
            place = start + length_at(raw, place)[0] if start <= end else start
            if place > end:
                raise self.broken(f"it ends at byte {end}, in the middle of its header")
            strings.append(raw[start:place].decode("utf-8", errors="replace"))
        self._position = place
        return strings


@functools.lru_cache(maxsize=1)
def _read(path: Path, facts: tuple[int, ...]) -> GgufFile:
    return GgufFile(path)


def forget_gguf() -> None:
    """Release the header that `read_gguf` keeps; the vocabulary of a large model takes tens of megabytes."""
    _read.cache_clear()


def read_gguf(path: Path) -> GgufFile:
    """Return a file; its header is read again only if the file has changed."""
    status = path.stat()
    return _read(path.resolve(), (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Names of the kinds, in the order of the C library."""


@dataclass(frozen=True, slots=True)
class BlockShare:
    """Matrices of a file that have one kind of blocks."""

    kind: str  # name of the kind
    num_matrices: int  # how many have it
    num_weights: int  # number of their values
    num_bytes: int  # size of their blocks


def block_shares(file: GgufFile) -> tuple[BlockShare, ...]:
    """Return the kinds of a file's matrices, that of most weights first.

    Routers are left out: they are never quantized. The matrices of all experts of a layer count as one.
    """
    shares: dict[str, BlockShare] = {}
    for name, tensor in file.tensors.items():
        if tensor.is_matrix:
            kind = file.kind_of(name)
            share = shares.get(kind, BlockShare(kind, 0, 0, 0))
            num_weights = share.num_weights + math.prod(tensor.shape)
            num_bytes = share.num_bytes + tensor.num_bytes
            shares[kind] = BlockShare(kind, share.num_matrices + 1, num_weights, num_bytes)
    return tuple(sorted(shares.values(), key=lambda share: (-share.num_weights, share.kind)))


def other_kinds(file: GgufFile) -> list[str]:
    """Return the kinds of a file's matrices that native kernels do not read, sorted."""
    return sorted({share.kind for share in block_shares(file)} - set(KINDS))
