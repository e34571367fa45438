"""Checkpoints with matrices of 4 bits as GPTQ, AWQ and compressed-tensors write them, in blocks of GGUF kinds.

A group's scale is repeated for each 32 inputs. Groups with the zero 8 become Q4_0, others Q4_1, whose minimum is
rounded to float16. Sources: arXiv 2210.17323 (GPTQ), 2306.00978 (AWQ); the layouts are those of the packages
gptqmodel, autoawq and compressed-tensors. AutoRound writes the first two under a name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.core.files import get_again
from draftree.weights.packed_scheme import BITS, BLOCK, SUFFIXES, quantization_of, refusal, scheme_of
from draftree.weights.packed_shapes import FLOATS, INDICES, Header, matrix_shape

__all__ = ["PackedCheckpoint", "quantization_of"]

CODES_OF_WORD = 8
SYMMETRIC_ZERO = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AWQ of each of its eight codes."""
SCALES = {"gptq": "scales", "awq": "scales", "compressed-tensors": "weight_scale"}
"""Last part of the names of tensors of scales, by method."""
EXPERT = re.compile(r"\.experts\.")
PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
         "weight_g_idx")  # fmt: skip
"""Last parts of the names of a module's tensors."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of 4 bits: a weight is scale * (code - zero).

    Attributes:
        codes: shape (outputs, inputs), uint8.
        scales: shape (outputs, groups), float32.
        zeros: shape (outputs, groups), float32.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def kind(self) -> str:
        """Kind of the blocks that hold it."""
        return "Q4_0" if bool((self.zeros == SYMMETRIC_ZERO).all()) else "Q4_1"

    def values(self) -> Tensor:
        """Return the weights, float32, with scales and minimums as blocks hold them."""
        group = self.codes.shape[1] // self.scales.shape[1]
        scales = self.scales.half().float().repeat_interleave(group, 1)
        if self.kind == "Q4_0":
            return scales * (self.codes.float() - SYMMETRIC_ZERO)
        return scales * self.codes.float() + (-self.scales * self.zeros).half().float().repeat_interleave(group, 1)

    def rows(self) -> Tensor:
        """Return the blocks of each output, shape (outputs, bytes), uint8."""
        outputs, inputs = self.codes.shape
        repeats = inputs // self.scales.shape[1] // BLOCK
        parts = [self.scales] if self.kind == "Q4_0" else [self.scales, -self.scales * self.zeros]
        heads = [part.half().repeat_interleave(repeats, 1)[..., None].view(torch.uint8) for part in parts]
        halves = self.codes.view(outputs, -1, 2, BLOCK // 2)
        return torch.cat([*heads, halves[:, :, 0] | halves[:, :, 1] << 4], -1).reshape(outputs, -1).contiguous()


class PackedCheckpoint:
    """Files of a folder whose matrices have 4 bits.

    Args:
        folder: the folder.
        settings: the quantization that it declares.

    Attributes:
        sources: names of all parameters in the transformers model.

    Raises:
        UnsupportedModelError: a quantization of another kind, or experts; the message has the reason.
        ModelLoadError: a file is missing or damaged, or tensors of a matrix do not fit each other or the settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._scheme = scheme_of(folder, settings)
        self._method = self._scheme.method
        self._files: dict[str, Any] = {}
        self._headers: dict[str, Header] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                for key in file.keys():  # noqa: SIM118 (a file is no mapping)
                    found = file.get_slice(key)
                    self._files[key], self._headers[key] = file, Header(found.get_dtype(), tuple(found.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"'{folder}' cannot be read: {error}") from error
        if expert := next(filter(EXPERT.search, self._files), None):
            raise UnsupportedModelError(
                f"'{folder}' has experts ('{expert}'), which are not supported in checkpoints of 4 bits: use the model "
                "without quantization, or a GGUF file"
            )
        suffix = SUFFIXES[self._method]
        self._packed = {
            f"{key.removesuffix(suffix)}weight": self._shape(key.removesuffix(suffix))
            for key in self._files
            if key.endswith(f".{suffix}")
        }
        dense = {key for key in self._files if key.endswith((".weight", ".bias"))}
        self.sources = {name: name for name in self._packed.keys() | dense}
        self._read: tuple[str, Codes] | None = None

    def _shape(self, stem: str) -> tuple[int, int]:
        headers = {part: self._headers[key] for part in PARTS if (key := f"{stem}{part}") in self._headers}
        declared = headers.get("weight_shape")
        if declared is not None and (declared.dtype not in INDICES or declared.shape != (2,)):
            raise self._damaged(f"its tensor '{stem}weight_shape' is {declared}, and needs two numbers")
        shape = () if declared is None else tuple(self._tensor(f"{stem}weight_shape").tolist())
        return matrix_shape(self._scheme, stem, headers, shape)

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"'{self._folder}' is damaged: {what}: {get_again(self._folder)}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter.

        Raises:
            ModelLoadError: there is no such parameter.
        """
        if name not in self._packed and name not in self._headers:
            raise self._missing(name)
        return self._packed[name] if name in self._packed else self._headers[name].shape

    def kind(self, name: str) -> str:
        """Return the name of the blocks of a parameter."""
        return self._codes(name).kind if name in self._packed else "dense"

    def values(self, name: str) -> Tensor:
        """Return a parameter, float32."""
        if name in self._packed:
            return self._codes(name).values()
        found = self._headers.get(name)
        if found is not None and found.dtype not in FLOATS:
            raise self._damaged(f"its tensor '{name}' is {found}, and needs one of the types {', '.join(FLOATS)}")
        return self._tensor(name).float()

    def rows(self, name: str) -> Tensor:
        """Return the blocks of a matrix, shape (rows, bytes of a row), uint8."""
        return self._codes(name).rows()

    def expert(self, name: str, expert: int) -> tuple[tuple[str, Tensor], ...]:
        """Raise: experts of such checkpoints are not known."""
        raise UnsupportedModelError(f"'{name}' holds experts: checkpoints of 4 bits with experts are not supported")

    def order(self, name: str) -> Tensor:
        """Return the row of each output of a matrix, int64."""
        return torch.arange(len(self._codes(name).codes))

    def release(self, name: str) -> None:
        """Free the matrix that was read last."""
        self._read = None

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise self._missing(name)
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def _missing(self, name: str) -> ModelLoadError:
        return ModelLoadError(f"'{self._folder}' lacks the tensor '{name}': {get_again(self._folder)}")

    def _codes(self, name: str) -> Codes:
        if self._read is None or self._read[0] != name:
            stem = name.removesuffix("weight")
            found = {"gptq": self._gptq, "awq": self._awq}.get(self._method, self._compressed)(stem)
            self._read = (name, found)
        return self._read[1]

    def _gptq(self, stem: str) -> Codes:
        self._require_natural_order(f"{stem}g_idx", stem)
        codes = unpacked(self._tensor(f"{stem}qweight").T)
        scales = self._tensor(f"{stem}scales").float().T
        zeros = unpacked(self._tensor(f"{stem}qzeros")).T.float() + self._scheme.zero_offset
        return Codes(codes, scales.contiguous(), zeros.contiguous())

    def _require_natural_order(self, name: str, stem: str) -> None:
        """Raise UnsupportedModelError if a tensor of the group of each input has another order than the inputs."""
        if name in self._files:
            order, scales = self._tensor(name).long(), self._headers[f"{stem}{SCALES[self._method]}"].shape
            groups = scales[1] if self._method == "compressed-tensors" else scales[0]
            if not torch.equal(order, torch.arange(len(order)) // (len(order) // groups)):
                raise refusal(self._folder, f"groups in another order of inputs ('{name}')")

    def _awq(self, stem: str) -> Codes:
        order = torch.tensor(AWQ_ORDER)
        codes, zeros = (
            unpacked(self._tensor(f"{stem}{part}")).unflatten(1, (-1, CODES_OF_WORD))[..., order].flatten(1)
            for part in ("qweight", "qzeros")
        )
        scales = self._tensor(f"{stem}scales").float().T
        return Codes(codes.T.contiguous(), scales.contiguous(), zeros.T.float().contiguous())

    def _compressed(self, stem: str) -> Codes:
        self._require_natural_order(f"{stem}weight_g_idx", stem)
        codes = unpacked(self._tensor(f"{stem}weight_packed"))
        scales = self._tensor(f"{stem}weight_scale").float()
        shape = self._packed[f"{stem}weight"]
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
        if f"{stem}weight_zero_point" in self._files:
            # signed zeros are stored like signed codes, 8 larger
            zeros = unpacked(self._tensor(f"{stem}weight_zero_point").T).T[: shape[0]].float()
        return Codes(codes[:, : shape[1]].contiguous(), scales.contiguous(), zeros.contiguous())


def unpacked(words: Tensor) -> Tensor:
    """Return the codes of 32-bit words, the lowest bits first, shape (rows, 8 * words), uint8."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    codes = words.contiguous()[..., None] >> shifts & (1 << BITS) - 1
    return codes.flatten(1).to(torch.uint8)
