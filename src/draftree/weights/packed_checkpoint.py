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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.core.files import JsonError, get_again, read_json

CODE_BITS = 4
ALL_INPUTS = -1  # size of the only group of a row, as GPTQ notes it
BLOCK = 32
AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""Method whose layout a packing format of AutoRound has."""
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zeros, by the format of a GPTQ checkpoint
EXCEPTIONS = ("dynamic", "extra_config")  # settings of single modules, as gptqmodel and AutoRound write them
NATURAL_ORDERS = (None, "static", "weight")  # values of `actorder` whose groups are in the order of inputs


class TensorNames(NamedTuple):
    """Last parts of the names of a packed module's tensors."""

    codes: str
    scales: str
    zeros: str
    order: str  # group of each input, optional


COMPRESSED = "compressed-tensors"
METHODS = {
    "gptq": TensorNames("qweight", "scales", "qzeros", "g_idx"),
    "awq": TensorNames("qweight", "scales", "qzeros", "g_idx"),
    COMPRESSED: TensorNames("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A declared quantization that native kernels support."""

    method: str  # one of `METHODS`
    # declared numbers of inputs of a group, those of single modules too; `ALL_INPUTS` for all of a row
    group_sizes: frozenset[int]
    zero_offset: int  # what is added to stored zeros


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization that a model folder declares; None for none."""
    try:
        settings = read_json(folder / "config.json").get("quantization_config")
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise ModelLoadError(f"'{folder / 'config.json'}' cannot be read: {error}") from error
    if not isinstance(settings, dict):
        return None
    is_autoround = settings.get("quant_method") == "auto-round"
    layout = AUTOROUND.get(str(settings.get("packing_format"))) if is_autoround else None
    return settings if layout is None else {**settings, "quant_method": layout}


def scheme_refusal(folder: Path, what: str) -> UnsupportedModelError:
    """Return the refusal of a checkpoint with such weights, for example "3 bits"."""
    return UnsupportedModelError(
        f"'{folder}' has weights of {what}: supported are 4 bits by gptq, awq or compressed-tensors, in groups of a "
        "multiple of 32 inputs in their order; use the model without quantization, or a GGUF file"
    )


def scheme_of(folder: Path, settings: Mapping[str, Any]) -> Scheme:
    method = str(settings.get("quant_method"))
    if method not in METHODS:
        raise scheme_refusal(folder, f"the method '{method}'")
    transforms = settings.get("transform_config")
    if transforms.get("config_groups", transforms) if isinstance(transforms, Mapping) else transforms:
        raise scheme_refusal(folder, "rotated inputs (transform_config), which passes would have to rotate")
    scheme = _of_groups(folder, settings) if method == COMPRESSED else settings
    bits = scheme.get("bits", scheme.get("w_bit"))
    size = scheme.get("group_size", scheme.get("q_group_size"))
    is_size = isinstance(size, int) and (size == ALL_INPUTS or (size > 0 and size % BLOCK == 0))
    if bits != CODE_BITS or not is_size:
        raise scheme_refusal(folder, f"{bits} bits in groups of {size}")
    if scheme.get("desc_act"):
        raise scheme_refusal(folder, "groups in another order of inputs (desc_act)")
    version = str(scheme.get("version", "gemm"))
    if method == "awq" and version.lower() != "gemm":
        raise scheme_refusal(folder, f"the AWQ version '{version}'")
    form = str(settings.get("checkpoint_format", "gptq"))
    if method == "gptq" and form not in ZERO_OFFSETS:
        raise scheme_refusal(folder, f"the GPTQ format '{form}'")
    tables = [table for table in map(settings.get, EXCEPTIONS) if isinstance(table, Mapping)]
    modules = [module for table in tables for module in table.values() if isinstance(module, Mapping)]
    sizes = [size, *(module.get("group_size") for module in modules)]
    return Scheme(
        method,
        frozenset(size for size in sizes if isinstance(size, int)),
        ZERO_OFFSETS[form] if method == "gptq" else 0,
    )


def _of_groups(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of compressed-tensors with the names of GPTQ."""

    def mapping(name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value or {}, Mapping):
            raise ModelLoadError(
                f"the setting '{name}' of quantization_config in '{folder / 'config.json'}' is {value!r}, and not an "
                f"object: {get_again(folder)}"
            )
        return value or {}

    groups = mapping("config_groups", settings.get("config_groups"))
    if settings.get("format") != "pack-quantized" or len(groups) != 1:
        raise scheme_refusal(folder, f"the format '{settings.get('format')}' in {len(groups)} groups of layers")
    ((name, group),) = groups.items()
    group = mapping(f"config_groups.{name}", group)
    weights = mapping(f"config_groups.{name}.weights", group.get("weights"))
    if group.get("input_activations"):
        raise scheme_refusal(folder, "quantized inputs (input_activations)")
    if weights.get("actorder") not in NATURAL_ORDERS:
        raise scheme_refusal(folder, f"groups in another order of inputs (actorder '{weights.get('actorder')}')")
    size = ALL_INPUTS if weights.get("strategy") == "channel" else weights.get("group_size")
    return {"bits": weights.get("num_bits"), "group_size": size}


CODES_OF_WORD = 8
WORD_BITS = 32
WORDS, INDICES = ("I32",), ("I32", "I64")
FLOATS = ("F16", "BF16", "F32", "F64")  # types of weights that are not packed, and of scales, as safetensors names them
OTHER_BITS = (2, 3, 8)
SYMMETRIC_ZERO = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of AWQ of each of its eight codes
EXPERT = re.compile(r"\.experts\.")
SHAPE = "weight_shape"  # tensor of the numbers of outputs and inputs, optional


@dataclass(frozen=True, slots=True)
class Header:
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


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
    """Files of a folder whose matrices have 4 bits. Types and shapes are checked when it is opened."""

    has_tiled_heads = False

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._scheme = scheme_of(folder, settings)
        self._names = METHODS[self._scheme.method]
        self._files: dict[str, Any] = {}
        self._headers: dict[str, Header] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(path, framework="pt")
                for key in file.keys():  # noqa: SIM118 (a file is no mapping)
                    part = file.get_slice(key)
                    self._files[key], self._headers[key] = file, Header(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"'{folder}' cannot be read: {error}") from error
        if expert := next(filter(EXPERT.search, self._files), None):
            raise UnsupportedModelError(
                f"'{folder}' has experts ('{expert}'), which are not supported in checkpoints of 4 bits: use the model "
                "without quantization, or a GGUF file"
            )
        suffix = self._names.codes
        stems = [key.removesuffix(suffix) for key in self._files if key.endswith(f".{suffix}")]
        self._packed = {f"{stem}weight": self._checked_shape(stem) for stem in stems}
        parts = {f"{stem}{part}" for stem in stems for part in (*self._names, SHAPE)}
        dense = {key for key, header in self._headers.items() if key not in parts and header.dtype in FLOATS}
        # names of all parameters in the transformers model
        self.sources = {name: name for name in self._packed.keys() | dense}
        self._read: tuple[str, Codes] | None = None

    def _checked_shape(self, stem: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a packed matrix whose tensors have the types and shapes of the scheme."""
        method = self._scheme.method
        names = self._names
        module = stem[:-1]
        parts = (*names, SHAPE)
        headers = {part: self._headers[key] for part in parts if (key := f"{stem}{part}") in self._headers}

        def damaged(part: str, needed: str) -> ModelLoadError:
            others = ", ".join(f"{name} {header}" for name, header in sorted(headers.items()) if name != part)
            return self._error(
                f"has a damaged matrix '{module}': its tensor '{part}' is {headers[part]}, and needs {needed} "
                f"(others: {others})"
            )

        def sizes(part: str, dtypes: tuple[str, ...]) -> tuple[int, ...]:
            if part not in headers:
                raise self._error(f"lacks the tensor '{stem}{part}'")
            header = headers[part]
            if header.dtype not in dtypes or len(header.shape) != 2 or 0 in header.shape:
                raise damaged(part, f"the type {' or '.join(dtypes)} and two dimensions that are not empty")
            return header.shape

        codes = sizes(names.codes, WORDS)
        scales = sizes(names.scales, FLOATS)
        if method == COMPRESSED:
            outputs = codes[0]
            groups = scales[1]
            inputs = CODES_OF_WORD * codes[1]
            if (header := headers.get(SHAPE)) is not None:
                if header.dtype not in INDICES or header.shape != (2,):
                    raise damaged(SHAPE, "two numbers")
                declared = self._tensor(f"{stem}{SHAPE}").tolist()
                if declared[0] != outputs or declared[1] <= 0:
                    raise damaged(names.codes, f"the shape {declared} of '{SHAPE}'")
                inputs = declared[1]
            if names.zeros in headers:
                sizes(names.zeros, WORDS)
            words = codes[1]
            num_codes = inputs
        else:
            groups, outputs = scales
            inputs = codes[0] if method == "awq" else CODES_OF_WORD * codes[0]
            words = sizes(names.zeros, WORDS)[1]
            num_codes = outputs
        for bits in OTHER_BITS:  # the words hold as many codes of other than 4 bits
            if words == -(-num_codes * bits // WORD_BITS) != -(-num_codes // CODES_OF_WORD):
                raise scheme_refusal(self._folder, f"{bits} bits in '{module}'")
        group_sizes = {inputs if size == ALL_INPUTS else size for size in self._scheme.group_sizes}
        if inputs % groups or inputs // groups not in group_sizes:
            expected = " or ".join(map(str, sorted(group_sizes)))
            raise damaged(names.scales, f"groups of {expected} of the {inputs} inputs, as config.json declares")
        if inputs // groups % BLOCK:
            raise scheme_refusal(self._folder, f"{inputs} inputs in groups of {inputs // groups} in '{module}'")
        if method != COMPRESSED and outputs % CODES_OF_WORD:
            raise damaged(names.scales, f"outputs in multiples of {CODES_OF_WORD}")
        by_inputs, by_outputs = -(-inputs // CODES_OF_WORD), -(-outputs // CODES_OF_WORD)  # numbers of words
        shapes = {
            "gptq": ((by_inputs, outputs), (groups, outputs), (groups, by_outputs)),
            "awq": ((inputs, by_outputs), (groups, outputs), (groups, by_outputs)),
            COMPRESSED: ((outputs, by_inputs), (outputs, groups), (by_outputs, groups)),
        }[method]
        for part, shape in zip(names, shapes, strict=False):
            if part in headers and headers[part].shape != shape:
                raise damaged(part, f"the shape {list(shape)}")
        order = headers.get(names.order)
        if order is not None and (order.dtype not in INDICES or order.shape != (inputs,)):
            raise damaged(names.order, f"the type {' or '.join(INDICES)} and the shape [{inputs}]")
        return outputs, inputs

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed and name not in self._headers:
            raise self._error(f"lacks the tensor '{name}'")
        return self._packed[name] if name in self._packed else self._headers[name].shape

    def kind(self, name: str) -> str:
        return self._codes(name).kind if name in self._packed else "dense"

    def in_block_order(self, name: str) -> Tensor:
        """Return the values: blocks have the heads in the order of transformers."""
        return self.values(name)

    def values(self, name: str) -> Tensor:
        if name in self._packed:
            return self._codes(name).values()
        header = self._headers.get(name)
        if header is not None and header.dtype not in FLOATS:
            raise self._error(
                f"is damaged: its tensor '{name}' is {header}, and needs one of the types {', '.join(FLOATS)}"
            )
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
            raise self._error(f"lacks the tensor '{name}'")
        return self._files[name].get_tensor(name)

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"'{self._folder}' {what}: {get_again(self._folder)}")

    def _codes(self, name: str) -> Codes:
        if self._read is None or self._read[0] != name:
            self._read = (name, self._unpacked(name.removesuffix("weight")))
        return self._read[1]

    def _unpacked(self, stem: str) -> Codes:
        names, (outputs, inputs) = self._names, self._packed[f"{stem}weight"]
        codes = self._tensor(f"{stem}{names.codes}")
        scales = self._tensor(f"{stem}{names.scales}").float()
        if self._scheme.method == COMPRESSED:
            codes, zeros = unpacked(codes)[:, :inputs], torch.full_like(scales, SYMMETRIC_ZERO)
            if f"{stem}{names.zeros}" in self._files:
                # signed zeros are stored like signed codes, 8 larger
                zeros = unpacked(self._tensor(f"{stem}{names.zeros}").T).T[:outputs].float()
        else:
            scales, zeros = scales.T, unpacked(self._tensor(f"{stem}{names.zeros}"))
            if self._scheme.method == "awq":
                order = torch.tensor(AWQ_ORDER)
                codes, zeros = (
                    part.unflatten(1, (-1, CODES_OF_WORD))[..., order].flatten(1) for part in (unpacked(codes), zeros)
                )
                codes = codes.T
            else:
                codes = unpacked(codes.T)
            zeros = zeros.T.float() + self._scheme.zero_offset
        if (name := f"{stem}{names.order}") in self._files:
            group_size = inputs // scales.shape[1]
            if not torch.equal(self._tensor(name).long(), torch.arange(inputs) // group_size):
                raise scheme_refusal(self._folder, f"groups in another order of inputs ('{name}')")
        return Codes(codes.contiguous(), scales.contiguous(), zeros.contiguous())


def unpacked(words: Tensor) -> Tensor:
    """Return the codes of 32-bit words, the lowest bits first, shape (rows, 8 * words), uint8."""
    shifts = torch.arange(0, 32, CODE_BITS, dtype=torch.int32)
    codes = words.contiguous()[..., None] >> shifts & (1 << CODE_BITS) - 1
    return codes.flatten(1).to(torch.uint8)
