"""Damaged GGUF files: raw headers, and changes of a sound file by a seed. As a program, it reads many of them.

    python gguf_mutants.py parse FILE FIRST_SEED COUNT
    python gguf_mutants.py load FILE FIRST_SEED COUNT

Every mutant is read in this process, whose address space and resident memory are limited. Prints one JSON object with
the number of outcomes. Ends with 1 if an error is no `DraftreeError`, or memory grows. Not a test itself.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftree.core.errors import DraftreeError
from draftree.weights.gguf_file import GgufFile

ODD = (0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
MIB = 1 << 20
ROOM = {"parse": (256 * MIB, 64 * MIB), "load": (3072 * MIB, 400 * MIB)}
"""Bytes by which the address space and the resident memory may grow."""


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """Entry of the table of tensors; the innermost size comes first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), *, data: int = 0) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return start + bytes(-len(start) % 32 + data)


class Recorder(GgufFile):
    """A file that notes the places of all scalars of its header: lengths, counts, kinds, sizes, values."""

    def __init__(self, path: Path) -> None:
        self.places: list[tuple[int, str]] = []
        super().__init__(path)

    def _scalar(self, code: str) -> Any:
        self.places.append((self._position, code))
        return super()._scalar(code)


def changed_scalars(raw: bytearray, places: list[tuple[int, str]], choose: random.Random) -> bytes:
    """Replace one to three scalars of the header."""
    for place, code in choose.sample(places, min(len(places), choose.randint(1, 3))):
        size = struct.calcsize("<" + code)
        if code in "fd" and choose.random() < 0.7:
            value = choose.choice([0.0, -1.0, 1e38, float("nan"), float("inf")])
            raw[place : place + size] = struct.pack("<" + code, value)
        else:
            value = choose.choice(ODD) + choose.randint(-1, 1)
            raw[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(raw)


def changed_bytes(raw: bytearray, places: list[tuple[int, str]], choose: random.Random) -> bytes:
    """Replace some bytes of the header."""
    end = places[-1][0]
    for _ in range(choose.randint(1, 20)):
        raw[choose.randrange(4, end)] = choose.randrange(256)
    return bytes(raw)


def shortened(raw: bytearray, places: list[tuple[int, str]], choose: random.Random) -> bytes:
    """Cut the file."""
    return bytes(raw[: choose.choice([choose.randrange(len(raw)), choose.randrange(places[-1][0]), len(raw) - 1])])


def moved(raw: bytearray, places: list[tuple[int, str]], choose: random.Random) -> bytes:
    """Copy one piece of the header over another, insert it, or remove it."""
    end = places[-1][0]
    first, second = choose.randrange(4, end), choose.randrange(4, end)
    size = choose.randint(1, 64)
    piece = raw[first : first + size]
    return bytes(choose.choice([raw[:second] + piece + raw[second + size :], raw[:second] + piece + raw[second:],
                                raw[:second] + raw[second + size :]]))  # fmt: skip


MUTATIONS: tuple[Callable[..., bytes], ...] = (changed_scalars, changed_scalars, changed_bytes, shortened, moved)


def mutant(raw: bytes, places: list[tuple[int, str]], seed: int) -> bytes:
    choose = random.Random(seed)
    return choose.choice(MUTATIONS)(bytearray(raw), places, choose)


def address_space() -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmSize:"))


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reader(action: str) -> Callable[[Path], Any]:
    if action == "parse":
        return GgufFile
    from draftree.loading.load import load_model

    return load_model


def main(action: str, source: str, first: str, count: str) -> int:
    """Read mutants."""
    path = Path(source)
    raw, places = path.read_bytes(), Recorder(path).places
    read = reader(action)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read(path)
        room, most = ROOM[action]
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + room, resource.RLIM_INFINITY))
        before, outcomes, wrong = peak(), Counter[str](), []
        target = path.with_name("mutant.gguf")
        for seed in range(int(first), int(first) + int(count)):
            target.write_bytes(mutant(raw, places, seed))
            try:
                read(target)
                outcomes["read"] += 1
            except DraftreeError as error:
                outcomes[type(error).__name__] += 1
            except BaseException as error:
                wrong.append(f"seed {seed}: {type(error).__name__}: {error}"[:300])
            if peak() - before > most:
                wrong.append(f"seed {seed}: memory grew by {(peak() - before) // MIB} MiB")
                break
    print(json.dumps({"outcomes": outcomes, "wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
