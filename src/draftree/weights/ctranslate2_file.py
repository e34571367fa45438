"""Reading of a model file of CTranslate2, version 6.

Layout, little-endian: version (uint32), name of the model's kind, its revision (uint32), number of variables (uint32);
for each variable its name, rank (uint8), dimensions (uint32 each), type (uint8), number of bytes (uint32) and values;
then the number of aliases (uint32) and for each two names. A name is a length (uint16) and so many bytes, the last one
of which is 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftree.core.errors import ModelLoadError, UnsupportedModelError

VERSION = 6
TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


@dataclass(frozen=True, slots=True)
class Variable:
    """Place of a variable in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


class Ctranslate2File:
    """A model file, and what follows it.

    Args:
        path: the file.

    Raises:
        ModelLoadError: it is damaged or truncated.
        UnsupportedModelError: it has another version, or values of another type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._place = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise self.broken("it is truncated or no model of CTranslate2") from error

    def _read(self) -> None:
        version = self._number("I")
        if version != VERSION:
            raise UnsupportedModelError(
                f"'{self.path}' has version {version} of CTranslate2's format: {VERSION} is read"
            )
        self.kind, self.revision = self._name(), self._number("I")
        self.variables: dict[str, Variable] = {}
        for _ in range(self._number("I")):
            name = self._name()
            shape = tuple(self._number("I") for _ in range(self._number("B")))
            code, size = self._number("B"), self._number("I")
            if code not in TYPES:
                raise UnsupportedModelError(f"'{self.path}': '{name}' has values of the unknown type {code}")
            if int(np.prod(shape, dtype=np.int64)) * np.dtype(TYPES[code]).itemsize != size:
                raise ValueError(name)
            self.variables[name] = Variable(shape, TYPES[code], self._place)
            self._take(size)
        self.aliases = {self._name(): self._name() for _ in range(self._number("I"))}
        self.rest = bytes(self._bytes[self._place :])
        """The bytes after the model in the file."""

    def values(self, name: str) -> np.ndarray:
        """Return a variable, float32 if it holds floats.

        Raises:
            ModelLoadError: there is none of this name, or a value is not finite.
        """
        if name not in self.variables:
            raise self.broken(f"'{name}' is missing")
        found = self.variables[name]
        count = int(np.prod(found.shape, dtype=np.int64)) * np.dtype(found.dtype).itemsize
        values = self._bytes[found.offset : found.offset + count].view(found.dtype).reshape(found.shape)
        if values.dtype.kind != "f":
            return np.array(values)
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise self.broken(f"'{name}' has values that are not finite")
        return values

    def broken(self, reason: str) -> ModelLoadError:
        """Return the error of a damaged file."""
        return ModelLoadError(f"'{self.path}' is damaged: {reason}")

    def _take(self, size: int) -> bytes:
        if self._place + size > len(self._bytes):
            raise ValueError(size)
        self._place += size
        return b"" if size > 1 << 16 else bytes(self._bytes[self._place - size : self._place])

    def _number(self, kind: str) -> int:
        found: int = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]
        return found

    def _name(self) -> str:
        return self._take(self._number("H"))[:-1].decode("utf-8")
