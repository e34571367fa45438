"""The C library for other processors, its passes recorded here and run there by an emulator. Not a test itself."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.models.native.build import FLAGS, SOURCES, VARIANTS
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.structures import (
    CDecoder,
    CExperts,
    CLayer,
    CLinear,
    CPass,
    Layout,
    latents_of,
    parse_layout,
)

DRIVER = Path(__file__).with_name("cross_driver.c")
UNUSED = ("search", "trees", "learning", "probe")
"""Sources that passes do not need."""
ALIGNMENT = 64
PASS, PACK, QUANTIZE, PACK_BLOCKS, UNPACK = range(5)
BY_ROW = ("tokens", "slot", "place", "position", "rope_position", "identical", "list_start")
SECONDS = 120


@dataclass(frozen=True, slots=True)
class Cross:
    """A build for another processor, or for this one without its vector instructions.

    Attributes:
        compiler: command.
        flags: its arguments.
        emulator: command that runs its programs; empty on this processor.
    """

    compiler: str
    flags: tuple[str, ...]
    emulator: tuple[str, ...]

    @property
    def missing(self) -> str:
        """What has to be installed, empty if nothing."""
        return ", ".join(name for name in (self.compiler, *self.emulator[:1]) if shutil.which(name) is None)


ARM, EMULATOR = "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-cpu", "max")
CROSS = {variant.name: Cross(ARM, variant.flags, EMULATOR) for variant in VARIANTS["aarch64"]}
CROSS["plain C"] = Cross(ARM, ("-march=armv8-a", "-U__ARM_NEON"), EMULATOR)
"""The last one takes the branches without intrinsics; the compiler chooses its instructions."""


def compiled(build: Cross, folder: Path) -> Path:
    """Compile the driver with the library; one process for each source."""
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-fPIC")]
    sources = [DRIVER, *(path for path in SOURCES if path.stem not in UNUSED)]

    def compile_one(source: Path) -> Path:
        to = folder / f"{source.stem}.o"
        command = [build.compiler, "-O1", *flags, *build.flags, "-c", "-o", os.fspath(to), os.fspath(source)]
        subprocess.run(command, check=True, timeout=SECONDS)
        return to

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "driver"
    link = [build.compiler, "-static", "-pthread", "-o", os.fspath(program), *map(os.fspath, objects), "-lm"]
    subprocess.run(link, check=True, timeout=SECONDS)
    return program


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program printed and left.

    Attributes:
        instructions: name of its instruction set.
        layout: of its structures.
        memory: bytes after all calls.
    """

    instructions: str
    layout: Layout
    memory: bytes

    def tensor(self, place: int, like: Tensor) -> Tensor:
        """Return numbers of the shape and dtype of `like` at a place."""
        size = like.numel() * like.element_size()
        return torch.frombuffer(bytearray(self.memory[place : place + size]), dtype=like.dtype).view(like.shape)


class Recording:
    """Memory with pointers, and calls of the library on it."""

    def __init__(self) -> None:
        self._bytes = bytearray(ALIGNMENT)  # offset 0 is no place
        self._moves: list[tuple[int, int]] = []
        self._calls: list[bytes] = []
        self._regions: list[tuple[int, int, int]] = []

    def add(self, content: bytes) -> int:
        """Add bytes; return their place."""
        self._bytes += bytes(-len(self._bytes) % ALIGNMENT)
        place = len(self._bytes)
        self._bytes += content
        return place

    def add_tensor(self, tensor: Tensor) -> int:
        """Add a contiguous tensor of this process; pointers into it are translated from then on."""
        address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return self._add_memory(address, size)

    def _add_memory(self, address: int, size: int) -> int:
        place = self.add(ctypes.string_at(address, size))
        self._regions.append((address, size, place))
        return place

    def place_of(self, address: int) -> int:
        """Return the place of an address in what was added."""
        for start, size, place in self._regions:
            if start <= address < start + size:
                return place + address - start
        raise LookupError("no tensor was added with this address")

    def add_structure(self, structure: ctypes.Structure) -> int:
        """Add a structure with all that it points at."""
        return self._add_fields(structure, self.add(bytes(structure)))

    def _add_fields(self, structure: ctypes.Structure, place: int) -> int:
        for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
            value, at = getattr(structure, name), place + getattr(type(structure), name).offset
            if isinstance(value, CLinear):
                self._add_fields(value, at)
            elif name == "experts" and value is not None:
                self._moves.append((at, self._add_experts(CExperts.from_address(value))))
            elif name in ("gate_up", "down") and isinstance(structure, CExperts):
                count = structure.count + structure.shared
                self._moves.append((at, self._add_array((CLinear * count).from_address(value))))
            elif name == "latents" and value is not None:
                self._moves.append((at, self._add_array(latents_of(structure))))
            elif name == "layers":
                whole = ctypes.cast(value, ctypes.POINTER(CLayer * structure.num_layers)).contents
                self._moves.append((at, self._add_array(whole)))
            elif kind is ctypes.c_void_p and value is not None:
                self._moves.append((at, self.place_of(value)))
        return place

    def _add_experts(self, experts: CExperts) -> int:
        return self.add_structure(experts)

    def _add_array(self, array: Any) -> int:
        place = self.add(bytes(array))
        for index, entry in enumerate(array):
            self._add_fields(entry, place + index * ctypes.sizeof(array._type_))
        return place

    def add_pass(self, run: CPass, vocab: int, hidden: int) -> tuple[int, int]:
        """Add the arguments of a pass; return their place and that of its logits."""
        own = CPass.from_buffer_copy(run)
        sizes = dict.fromkeys(BY_ROW, 8 * run.rows)
        sizes |= {"chunks": 8 * (run.num_chunks + 1), "logit_rows": 8 * run.num_logits}
        sizes |= {"hidden_in": 4 * run.rows * hidden, "list": 8 * _listed(run)}
        for name, size in sizes.items():
            address = getattr(run, name)
            if address is not None and size:
                self._add_memory(address, size)
            elif address is not None:
                self._regions.append((address, 8, self.add(bytes(8))))
        longest = 1 + max((ctypes.c_int64 * run.rows).from_address(run.rope_position))
        for tables in (own.cosines, own.sines):
            for kind in range(2):
                if tables[kind] is not None:
                    self._add_memory(tables[kind], 4 * longest * run.rotary_dim)
        logits = self.add(bytes(4 * run.num_logits * vocab))
        own.logits = None
        place = self.add(bytes(own))
        self._moves.append((place + CPass.logits.offset, logits))
        for name, kind in ((entry[0], entry[1]) for entry in CPass._fields_):
            at, value = place + getattr(CPass, name).offset, getattr(own, name)
            if name in ("cosines", "sines"):
                found = [(at + 8 * i, value[i]) for i in range(2) if value[i] is not None]
                self._moves += [(where, self.place_of(address)) for where, address in found]
            elif kind is ctypes.c_void_p and value is not None:
                self._moves.append((at, self.place_of(value)))
        self._regions = [region for region in self._regions if region[0] not in _passing(run)]
        return place, logits

    def call(self, function: int, *arguments: int | None, pointers: tuple[int, ...]) -> None:
        """Add a call; `pointers` are the indices of arguments that are places."""
        given = [0 if one is None else one for one in arguments]
        bits = sum(1 << index for index in pointers if arguments[index] is not None)
        self._calls.append(struct.pack("<12q", function, *given, *[0] * (10 - len(given)), bits))

    def run(self, program: Path, build: Cross, folder: Path) -> Outcome:
        """Run the calls in the program."""
        image, result = folder / "image", folder / "result"
        moves = b"".join(struct.pack("<2q", *move) for move in self._moves)
        head = struct.pack("<3q", len(self._moves), len(self._calls), len(self._bytes))
        image.write_bytes(head + moves + b"".join(self._calls) + self._bytes)
        command = [*build.emulator, os.fspath(program), os.fspath(image), os.fspath(result)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
        instructions, _, layout = said.partition("\n")
        return Outcome(instructions, parse_layout(layout), result.read_bytes())


class RecordedLibrary:
    """The library of a decoder; notes every pass.

    Args:
        decoder: the decoder, whose weights and slots have their final addresses.
        memory: keys and values, and other tensors that passes write.
    """

    def __init__(self, decoder: NativeDecoder, memory: list[Tensor]) -> None:
        self._library = decoder.library
        self.recording = Recording()
        self._tensors = [*decoder.packed._kept, *decoder.packed._lent, *memory]  # type: ignore[attr-defined]
        self._place: int | None = None
        self.passes: list[tuple[int, Tensor]] = []
        """For each pass, the place of its logits, and the logits of this processor."""
        decoder.library = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def run(self, decoder: CDecoder, run: CPass) -> None:
        """Note a pass and run it."""
        if self._place is None:
            for tensor in self._tensors:
                self.recording.add_tensor(tensor)
            self._place = self.recording.add_structure(decoder)
        place, logits = self.recording.add_pass(run, decoder.vocab, decoder.hidden)
        self.recording.call(PASS, self._place, place, pointers=(0, 1))
        self._library.run(decoder, run)
        found = (ctypes.c_float * (run.num_logits * decoder.vocab)).from_address(run.logits)
        copy = torch.from_numpy(np.frombuffer(found, dtype=np.float32).copy())
        self.passes.append((logits, copy.view(run.num_logits, decoder.vocab)))


def _listed(run: CPass) -> int:
    """Return the length of the list of places that rows of a pass use."""
    columns = {name: (ctypes.c_int64 * run.rows).from_address(getattr(run, name)) for name in BY_ROW}
    rows = zip(columns["list_start"], columns["position"], columns["identical"], strict=True)
    return max((start + position - same + 1 for start, position, same in rows if position >= same), default=0)


def _passing(run: CPass) -> set[int]:
    """Return the addresses of memory that belongs to a pass only."""
    own = {getattr(run, name) for name in (*BY_ROW, "chunks", "logit_rows", "hidden_in", "list")}
    return own | {run.cosines[0], run.cosines[1], run.sines[0], run.sines[1]}
