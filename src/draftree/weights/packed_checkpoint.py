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
from draftree.core.files import JsonError, get_again, read_json

CODE_BITS = 4
ALL_INPUTS = -1  # size of the only group of a row, as GPTQ notes it
BLOCK = 32
AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Method whose layout a packing format of AutoRound has."""
SUFFIXES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
"""Last part of the names of tensors of codes, by method."""
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zeros, by the format of a GPTQ checkpoint
EXCEPTIONS = ("dynamic", "extra_config")  # settings of single modules, as gptqmodel and AutoRound write them
NATURAL_ORDERS = (None, "static", "weight")  # values of `actorder` whose groups are in the order of inputs


@dataclass(frozen=True, slots=True)
class Scheme:
    """A declared quantization that native kernels support."""

    folder: Path  # folder of the model
    method: str  # "gptq", "awq" or "compressed-tensors"
    # declared numbers of inputs of a group, those of single modules too; `ALL_INPUTS` for all of a row
    group_sizes: frozenset[int]
    zero_offset: int  # what is added to stored zeros


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization that a model folder declares; None for none."""
    try:
        config = read_json(folder / "config.json")
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise ModelLoadError(f"'{folder / 'config.json'}' cannot be read: {error}") from error
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    layout = AUTOROUND.get(str(found.get("packing_format"))) if found.get("quant_method") == "auto-round" else None
    return found if layout is None else {**found, "quant_method": layout}


def scheme_refusal(folder: Path, what: str) -> UnsupportedModelError:
    """Return the refusal of a checkpoint with such weights, for example "3 bits"."""
    return UnsupportedModelError(
        f"'{folder}' has weights of {what}: supported are 4 bits by gptq, awq or compressed-tensors, in groups of a "
        "multiple of 32 inputs in their order; use the model without quantization, or a GGUF file"
    )


def scheme_of(folder: Path, settings: Mapping[str, Any]) -> Scheme:
    method = str(settings.get("quant_method"))
    if method not in SUFFIXES:
        raise scheme_refusal(folder, f"the method '{method}'")
    transforms = settings.get("transform_config")
    if transforms.get("config_groups", transforms) if isinstance(transforms, Mapping) else transforms:
        raise scheme_refusal(folder, "rotated inputs (transform_config), which passes would have to rotate")
    scheme = _of_groups(folder, settings) if method == "compressed-tensors" else settings
    bits = scheme.get("bits", scheme.get("w_bit"))
    size = scheme.get("group_size", scheme.get("q_group_size"))
    _require_size(folder, bits, size)
    if scheme.get("desc_act"):
        raise scheme_refusal(folder, "groups in another order of inputs (desc_act)")
    version = str(scheme.get("version", "gemm"))
    if method == "awq" and version.lower() != "gemm":
        raise scheme_refusal(folder, f"the AWQ version '{version}'")
    form = str(settings.get("checkpoint_format", "gptq"))
    if method == "gptq" and form not in ZERO_OFFSETS:
        raise scheme_refusal(folder, f"the GPTQ format '{form}'")
    sizes = {size, *_sizes_of_modules(settings)}
    return Scheme(folder, method, frozenset(sizes), ZERO_OFFSETS[form] if method == "gptq" else 0)


def _require_size(folder: Path, bits: Any, size: Any) -> None:
    is_size = isinstance(size, int) and (size == ALL_INPUTS or (size > 0 and size % BLOCK == 0))
    if bits != CODE_BITS or not is_size:
        raise scheme_refusal(folder, f"{bits} bits in groups of {size}")


def _of_groups(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of compressed-tensors with the names of GPTQ."""
    groups = _required_mapping(folder, "config_groups", settings.get("config_groups"))
    if settings.get("format") != "pack-quantized" or len(groups) != 1:
        raise scheme_refusal(folder, f"the format '{settings.get('format')}' in {len(groups)} groups of layers")
    ((name, group),) = groups.items()
    group = _required_mapping(folder, f"config_groups.{name}", group)
    weights = _required_mapping(folder, f"config_groups.{name}.weights", group.get("weights"))
    if group.get("input_activations"):
        raise scheme_refusal(folder, "quantized inputs (input_activations)")
    if weights.get("actorder") not in NATURAL_ORDERS:
        raise scheme_refusal(folder, f"groups in another order of inputs (actorder '{weights.get('actorder')}')")
    size = ALL_INPUTS if weights.get("strategy") == "channel" else weights.get("group_size")
    return {"bits": weights.get("num_bits"), "group_size": size}


def _required_mapping(folder: Path, name: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found or {}, Mapping):
        raise ModelLoadError(
            f"the setting '{name}' of quantization_config in '{folder / 'config.json'}' is {found!r}, and not an "
            f"object: {get_again(folder)}"
        )
    return found or {}


def _sizes_of_modules(settings: Mapping[str, Any]) -> set[int]:
    tables = [table for table in map(settings.get, EXCEPTIONS) if isinstance(table, Mapping)]
    own = [one.get("group_size") for table in tables for one in table.values() if isinstance(one, Mapping)]
    return {size for size in own if isinstance(size, int)}


CODES_OF_WORD = 8
WORD_BITS = 32
WORDS, INDICES = ("I32",), ("I32", "I64")
FLOATS = ("F16", "BF16", "F32", "F64")  # types of weights that are not packed, and of scales, as safetensors names them
OTHER_BITS = (2, 3, 8)


@dataclass(frozen=True, slots=True)
class Header:
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


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
            if words == -(-codes * bits // WORD_BITS) != -(-codes * CODE_BITS // WORD_BITS):
                raise scheme_refusal(self.scheme.folder, f"{bits} bits in '{self.stem[:-1]}'")

    def _require_groups(self, part: str, inputs: int, groups: int) -> None:
        sizes = {inputs if size == ALL_INPUTS else size for size in self.scheme.group_sizes}
        if inputs % groups or inputs // groups not in sizes:
            declared = " or ".join(map(str, sorted(sizes)))
            raise self._damaged(part, f"groups of {declared} of the {inputs} inputs, as config.json declares")
        if inputs // groups % BLOCK:
            raise scheme_refusal(
                self.scheme.folder, f"{inputs} inputs in groups of {inputs // groups} in '{self.stem[:-1]}'"
            )

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


SYMMETRIC_ZERO = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of AWQ of each of its eight codes
SCALES = {"gptq": "scales", "awq": "scales", "compressed-tensors": "weight_scale"}
"""Last part of the names of tensors of scales, by method."""
EXPERT = re.compile(r"\.experts\.")
PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
         "weight_g_idx")  # fmt: skip
"""Last parts of the names of a module's tensors."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of 4 bits: a weight is scale * (code - zero)."""

    codes: Tensor  # shape (outputs, inputs), uint8
    scales: Tensor  # shape (outputs, groups), float32
    zeros: Tensor  # shape (outputs, groups), float32

    @property
    def kind(self) -> str:
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
    """Files of a folder whose matrices have 4 bits."""

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
        # names of all parameters in the transformers model
        self.sources = {name: name for name in self._packed.keys() | dense}
        self._read: tuple[str, Codes] | None = None

    def _shape(self, stem: str) -> tuple[int, int]:
        headers = {part: self._headers[key] for part in PARTS if (key := f"{stem}{part}") in self._headers}
        declared = headers.get("weight_shape")
        if declared is not None and (declared.dtype not in INDICES or declared.shape != (2,)):
            raise self._damaged(f"its tensor '{stem}weight_shape' is {declared}, and needs two numbers")
        shape = () if declared is None else tuple(self._tensor(f"{stem}weight_shape").tolist())
        return _Matrix(self._scheme, stem, headers).shape(shape)

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"'{self._folder}' is damaged: {what}: {get_again(self._folder)}")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed and name not in self._headers:
            raise self._missing(name)
        return self._packed[name] if name in self._packed else self._headers[name].shape

    def kind(self, name: str) -> str:
        return self._codes(name).kind if name in self._packed else "dense"

    def values(self, name: str) -> Tensor:
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
        raise UnsupportedModelError(f"'{name}' holds experts: checkpoints of 4 bits with experts are not supported")

    def order(self, name: str) -> Tensor:
        return torch.arange(len(self._codes(name).codes))

    def release(self, name: str) -> None:
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
                raise scheme_refusal(self._folder, f"groups in another order of inputs ('{name}')")

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
    shifts = torch.arange(0, 32, CODE_BITS, dtype=torch.int32)
    codes = words.contiguous()[..., None] >> shifts & (1 << CODE_BITS) - 1
    return codes.flatten(1).to(torch.uint8)
