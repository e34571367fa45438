"""Checkpoints with matrices of 4 bits as GPTQ, AWQ and compressed-tensors write them, in blocks of GGUF kinds.

A group's scale is repeated for each 32 inputs. Groups with the zero 8 become Q4_0, others Q4_1, whose minimum is
rounded to float16. Sources: arXiv 2210.17323 (GPTQ), 2306.00978 (AWQ); the layouts are those of the packages
gptqmodel, autoawq and compressed-tensors. AutoRound writes the first two under a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, UnsupportedModelError

__all__ = ["PackedCheckpoint", "quantization_of"]

BITS, CODES_OF_WORD = 4, 8
ALL_INPUTS = -1
"""Size of the only group of a row, as GPTQ notes it."""
BLOCK = 32
SYMMETRIC_ZERO = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AWQ of each of its eight codes."""
AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Method whose layout a packing format of AutoRound has."""
SUFFIXES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization that a model folder declares; None for none.

    Raises:
        ModelLoadError: its configuration cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"'{folder / 'config.json'}' cannot be read: {error}") from error
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        return None
    layout = AUTOROUND.get(str(found.get("packing_format"))) if found.get("quant_method") == "auto-round" else None
    return found if layout is None else {**found, "quant_method": layout}


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
        """Return the blocks of each output, shape (outputs, bytes), uint8.

        Raises:
            UnsupportedModelError: the number of inputs is no multiple of 32.
        """
        outputs, inputs = self.codes.shape
        if inputs % BLOCK:
            raise UnsupportedModelError(f"a matrix of 4 bits has {inputs} inputs, which is no multiple of {BLOCK}")
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
        UnsupportedModelError: a quantization of another kind; the message has the reason.
        ModelLoadError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._method = str(settings.get("quant_method"))
        self._scheme = self._checked(settings)
        self._files: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"'{folder}' cannot be read: {error}") from error
        suffix = SUFFIXES[self._method]
        self._packed = {f"{key.removesuffix(suffix)}weight" for key in self._files if key.endswith(f".{suffix}")}
        dense = {key for key in self._files if key.endswith((".weight", ".bias"))}
        self.sources = {name: name for name in self._packed | dense}
        self._read: tuple[str, Codes] | None = None

    def _checked(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._method not in SUFFIXES:
            raise self._refusal(f"the method '{self._method}'")
        scheme = settings
        if self._method == "compressed-tensors":
            groups = list((settings.get("config_groups") or {}).values())
            if settings.get("format") != "pack-quantized" or len(groups) != 1:
                raise self._refusal(f"the format '{settings.get('format')}' in {len(groups)} groups of layers")
            scheme = groups[0].get("weights") or {}
            if groups[0].get("input_activations") or scheme.get("actorder") not in (None, "static", "weight"):
                raise self._refusal("quantized inputs, or groups in another order of inputs")
            size = ALL_INPUTS if scheme.get("strategy") == "channel" else scheme.get("group_size")
            scheme = {"bits": scheme.get("num_bits"), "group_size": size}
        bits, size = scheme.get("bits", scheme.get("w_bit")), scheme.get("group_size", scheme.get("q_group_size"))
        if bits != BITS or not isinstance(size, int) or (size != ALL_INPUTS and (size <= 0 or size % BLOCK)):
            raise self._refusal(f"{bits} bits in groups of {size}")
        if scheme.get("desc_act"):
            raise self._refusal("groups in another order of inputs (desc_act)")
        if self._method == "awq" and str(scheme.get("version", "gemm")).lower() != "gemm":
            raise self._refusal(f"the AWQ version '{scheme.get('version')}'")
        return scheme

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"'{self._folder}' has weights of {what}: supported are 4 bits by gptq, awq or compressed-tensors, in "
            "groups of a multiple of 32 inputs in their order; use the model without quantization, or a GGUF file"
        )

    def kind(self, name: str) -> str:
        """Return the name of the blocks of a parameter."""
        return self._codes(name).kind if name in self._packed else "dense"

    def values(self, name: str) -> Tensor:
        """Return a parameter, float32."""
        return self._codes(name).values() if name in self._packed else self._tensor(name).float()

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
            raise ModelLoadError(f"'{self._folder}' lacks the tensor '{name}': get the model again")
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def _codes(self, name: str) -> Codes:
        if self._read is None or self._read[0] != name:
            stem = name.removesuffix("weight")
            found = {"gptq": self._gptq, "awq": self._awq}.get(self._method, self._compressed)(stem)
            self._read = (name, found)
        return self._read[1]

    def _gptq(self, stem: str) -> Codes:
        codes = unpacked(self._tensor(f"{stem}qweight").T)
        scales = self._tensor(f"{stem}scales").float().T
        zeros = unpacked(self._tensor(f"{stem}qzeros")).T.float()
        if self._scheme.get("checkpoint_format", "gptq") == "gptq":
            zeros = zeros + 1
        group = codes.shape[1] // scales.shape[1]
        if f"{stem}g_idx" in self._files:
            order = self._tensor(f"{stem}g_idx").long()
            if not torch.equal(order, torch.arange(len(order)) // group):
                raise self._refusal("groups in another order of inputs (g_idx)")
        return Codes(codes, scales.contiguous(), zeros.contiguous())

    def _awq(self, stem: str) -> Codes:
        order = torch.tensor(AWQ_ORDER)
        codes, zeros = (
            unpacked(self._tensor(f"{stem}{part}")).unflatten(1, (-1, CODES_OF_WORD))[..., order].flatten(1)
            for part in ("qweight", "qzeros")
        )
        scales = self._tensor(f"{stem}scales").float().T
        return Codes(codes.T.contiguous(), scales.contiguous(), zeros.T.float().contiguous())

    def _compressed(self, stem: str) -> Codes:
        codes = unpacked(self._tensor(f"{stem}weight_packed"))
        scales = self._tensor(f"{stem}weight_scale").float()
        shape = self._tensor(f"{stem}weight_shape").tolist() if f"{stem}weight_shape" in self._files else codes.shape
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
