"""Types and shapes of the tensors of a 4-bit matrix, compared with each other and with the declared groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftree.core.errors import ModelLoadError
from draftree.core.files import get_again
from draftree.weights.packed_scheme import ALL_INPUTS, BITS, BLOCK, Scheme, refusal

__all__ = ["FLOATS", "INDICES", "Header", "matrix_shape"]

CODES_OF_WORD, WORD_BITS = 8, 32
WORDS, INDICES = ("I32",), ("I32", "I64")
FLOATS = ("F16", "BF16", "F32", "F64")
"""Types of weights that are not packed, and of scales, as safetensors names them."""
OTHER_BITS = (2, 3, 8)


@dataclass(frozen=True, slots=True)
class Header:
    """Type, as safetensors names it, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def matrix_shape(
    scheme: Scheme, stem: str, headers: Mapping[str, Header], declared: tuple[int, ...]
) -> tuple[int, int]:
    """Check the tensors of a matrix of 4 bits and return its outputs and inputs.

    Args:
        scheme: the quantization.
        stem: name of the module and a dot.
        headers: tensors of the module, by the part of their names after `stem`.
        declared: the content of `weight_shape` of compressed-tensors; empty for none.

    Raises:
        ModelLoadError: a tensor is missing, or has another type or shape than the others and the groups need.
        UnsupportedModelError: its bits or groups are not supported.
    """
    return _Matrix(scheme, stem, headers).shape(declared)


@dataclass(frozen=True, slots=True)
class _Matrix:
    scheme: Scheme
    stem: str
    headers: Mapping[str, Header]

    def shape(self, declared: tuple[int, ...]) -> tuple[int, int]:
        if self.scheme.method == "compressed-tensors":
            return self._compressed(declared)
        codes, scales = self._sizes("qweight", WORDS), self._sizes("scales", FLOATS)
        groups, outputs = scales
        zeros = self._sizes("qzeros", WORDS)
        self._require_bits(zeros[1], outputs)
        inputs = codes[0] if self.scheme.method == "awq" else CODES_OF_WORD * codes[0]
        wanted = (inputs, -(-outputs // CODES_OF_WORD)) if self.scheme.method == "awq" else (codes[0], outputs)
        self._require("qweight", wanted)
        self._require_groups("scales", inputs, groups)
        self._require("qzeros", (groups, -(-outputs // CODES_OF_WORD)))
        if outputs % CODES_OF_WORD:
            raise self._damaged("scales", f"outputs in multiples of {CODES_OF_WORD}")
        self._require_order("g_idx", inputs)
        return outputs, inputs

    def _compressed(self, declared: tuple[int, ...]) -> tuple[int, int]:
        codes, scales = self._sizes("weight_packed", WORDS), self._sizes("weight_scale", FLOATS)
        outputs, inputs = codes[0], CODES_OF_WORD * codes[1]
        if declared:
            if len(declared) != 2 or declared[0] != outputs or declared[1] <= 0:
                raise self._damaged("weight_packed", f"the shape {list(declared)} of 'weight_shape'")
            inputs = declared[1]
        self._require_bits(codes[1], inputs)
        self._require("weight_packed", (outputs, -(-inputs // CODES_OF_WORD)))
        self._require_groups("weight_scale", inputs, scales[1])
        self._require("weight_scale", (outputs, scales[1]))
        if "weight_zero_point" in self.headers:
            self._sizes("weight_zero_point", WORDS)
            self._require("weight_zero_point", (-(-outputs // CODES_OF_WORD), scales[1]))
        self._require_order("weight_g_idx", inputs)
        return outputs, inputs

    def _sizes(self, part: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Return the sizes of a tensor of two dimensions, each at least 1."""
        header = self.headers.get(part)
        if header is None:
            raise self._error(f"lacks the tensor '{self.stem}{part}'")
        if header.dtype not in dtypes or len(header.shape) != 2 or 0 in header.shape:
            raise self._damaged(part, f"the type {' or '.join(dtypes)} and two dimensions that are not empty")
        return header.shape[0], header.shape[1]

    def _require(self, part: str, shape: tuple[int, ...]) -> None:
        if self.headers[part].shape != shape:
            raise self._damaged(part, f"the shape {list(shape)}")

    def _require_bits(self, words: int, codes: int) -> None:
        """Raise if `words` hold as many codes of other than 4 bits."""
        for bits in OTHER_BITS:
            if words == -(-codes * bits // WORD_BITS) != -(-codes * BITS // WORD_BITS):
                raise refusal(self.scheme.folder, f"{bits} bits in '{self.stem[:-1]}'")

    def _require_groups(self, part: str, inputs: int, groups: int) -> None:
        sizes = {inputs if size == ALL_INPUTS else size for size in self.scheme.group_sizes}
        if inputs % groups or inputs // groups not in sizes:
            declared = " or ".join(map(str, sorted(sizes)))
            raise self._damaged(part, f"groups of {declared} of the {inputs} inputs, as config.json declares")
        if inputs // groups % BLOCK:
            raise refusal(self.scheme.folder, f"{inputs} inputs in groups of {inputs // groups} in '{self.stem[:-1]}'")

    def _require_order(self, part: str, inputs: int) -> None:
        header = self.headers.get(part)
        if header is not None and (header.dtype not in INDICES or header.shape != (inputs,)):
            raise self._damaged(part, f"the type {' or '.join(INDICES)} and the shape [{inputs}]")

    def _damaged(self, part: str, needed: str) -> ModelLoadError:
        others = ", ".join(f"{name} {header}" for name, header in sorted(self.headers.items()) if name != part)
        return self._error(
            f"has a damaged matrix '{self.stem[:-1]}': its tensor '{part}' is {self.headers[part]}, and needs {needed} "
            f"(others: {others})"
        )

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"'{self.scheme.folder}' {what}: {get_again(self.scheme.folder)}")
