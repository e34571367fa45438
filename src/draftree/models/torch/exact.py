"""Forward passes whose rows have the same bits in every pass, on a GPU.

Libraries choose kernels by the number of rows, and so the order of their sums. Inside `exact_rows`, products and norms
run in kernels of our own, one configuration for a layer whatever the rows; operators that compute every number by
itself, or integers, run as they are; all others raise. Import this module only for models on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftree.core.errors import UnsupportedModelError
from draftree.core.tensors import runs_triton
from draftree.core.triton_language import jit, tl, triton

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _operators(names: str) -> frozenset[Any]:
    pairs = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(aten, name), overload or "default") for name, _, overload in pairs)


KEPT = _operators(
    "_to_copy _unsafe_view arange arange.start arange.start_step cat clone constant_pad_nd copy_ embedding "
    "empty.memory_format empty_like empty_strided full full_like gather index.Tensor index_select new_empty "
    "new_full new_ones new_zeros ones ones_like repeat scalar_tensor stack tril triu zeros zeros_like"
)
"""Operators that copy or make numbers, and no tag of torch says so."""
WIDEST_ROW = 1 << 16  # numbers of a row that a norm reads at once


class _RowError(Exception):
    """An operator that may round a row differently beside other rows."""


def require_exact_rows(model: Any) -> None:
    """Raise UnsupportedModelError unless `exact_rows` sees all that a transformers model computes here."""
    if not runs_triton(model.device):
        reason = f"needs Triton and a GPU of compute capability 8.0, and the model is on {model.device}"
    elif getattr(model.config, "quantization_config", None) is not None:
        reason = "is for plain weights, and these are quantized"
    elif not type(model).__module__.startswith("transformers."):
        reason = f"is for models of transformers, and {type(model).__name__} has code of its own"
    elif model.config.get_text_config() is not model.config:
        reason = f"is for text, and {type(model).__name__} encodes other inputs"
    else:
        return
    raise UnsupportedModelError(f"exactness on a GPU {reason}")


@contextmanager
def exact_rows(model: nn.Module) -> Iterator[None]:
    """Compute every row of the passes inside with the same bits, whatever other rows there are.

    Raises:
        UnsupportedModelError: an operator is neither replaced nor known to compute every number by itself.
    """
    try:
        with _ExactRows():
            yield
    except _RowError as error:
        raise UnsupportedModelError(
            f"{_layer_in(error.__traceback__, model)} computes '{error}', which may round a row differently beside "
            "other rows"
        ) from error


def _layer_in(traceback: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost module of the model whose code was running."""
    names = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    layer = type(model).__name__
    while traceback is not None:
        layer = names.get(id(traceback.tb_frame.f_locals.get("self")), layer)
        traceback = traceback.tb_next
    return layer.strip()


class _ExactRows(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REPLACED:
            return REPLACED[func](*args, **kwargs)
        if func in KEPT or func.is_view or torch.Tag.pointwise in func.tags:
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.is_floating_point() for tensor in tensors):
            return func(*args, **kwargs)  # integers are not rounded
        raise _RowError(func.name())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x has shape (..., depth), weight (columns, depth)."""
    return _multiplied(x, weight.T, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight + bias; weight has shape (depth, columns)."""
    return _multiplied(x, weight, bias)


def bmm(first: Tensor, second: Tensor) -> Tensor:
    """Return products of depth 1, such as those of rotary frequencies and positions."""
    if first.shape[2] != 1:
        raise _RowError("bmm")
    return first * second


def mean(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean over the last dimension."""
    if dims is None or [dim % x.dim() for dim in dims] != [x.dim() - 1] or dtype not in (None, x.dtype):
        raise _RowError("mean over rows")
    result = _normed(x, None, None, 0.0, is_mean=True)
    return result if keepdim else result.squeeze(-1)


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Return the layer norm over the last dimension."""
    if len(shape) != 1:
        raise _RowError("layer_norm over rows")
    return _normed(x, weight, bias, eps, has_mean=True)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the root-mean-square norm over the last dimension."""
    if len(shape) != 1:
        raise _RowError("rms_norm over rows")
    return _normed(x, weight, None, torch.finfo(x.dtype).eps if eps is None else eps)


REPLACED: Mapping[Any, Callable[..., Tensor]] = {
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.mm.default: lambda x, weight: _multiplied(x, weight, None),
    aten.bmm.default: bmm,
    aten.mean.dim: mean,
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
}


def _unknown(what: str, x: Tensor) -> NoReturn:
    raise _RowError(f"{what} in {str(x.dtype).removeprefix('torch.')}")


def _aligned(x: Tensor) -> Tensor:
    """Return rows that are contiguous and start where any tensor starts: one binary serves all passes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight + bias, with sums in float32; x has shape (..., depth), weight (depth, columns)."""
    depth, columns = weight.shape
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        _unknown("a product", x)
    rows = _aligned(x.reshape(-1, depth))
    output = x.new_empty((*x.shape[:-1], columns))
    # these may depend on the layer and its dtype only: 64 rows are one instruction on Hopper, 16 without tensor cores
    is_half = x.dtype.itemsize == 2
    block_rows, most_depth = (64, 128) if is_half else (16, 32)
    block_columns = 64 if columns >= 8192 else 32 if columns >= 4096 else 16
    block_depth = max(16, min(most_depth, triton.next_power_of_2(depth)))
    with torch.cuda.device_of(x):
        _product[triton.cdiv(len(rows), block_rows), triton.cdiv(columns, block_columns)](
            rows, weight, rows if bias is None else bias, output, len(rows), columns, *weight.stride(),
            DEPTH=depth, HAS_BIAS=bias is not None, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
            BLOCK_DEPTH=block_depth, num_warps=4, num_stages=3,
        )  # fmt: skip
    return output


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, has_mean: bool = False, is_mean: bool = False
) -> Tensor:
    """Return norms over the last dimension, or its means, computed in float32."""
    size = x.shape[-1]
    if x.dtype == torch.float64 or not x.is_floating_point() or size > WIDEST_ROW:
        _unknown(f"a norm of {size} numbers", x)
    rows = _aligned(x)
    output = x.new_empty((*x.shape[:-1], 1) if is_mean else x.shape)
    with torch.cuda.device_of(x):
        _norm[math.prod(x.shape[:-1]),](
            rows, rows if weight is None else weight, rows if bias is None else bias, output, eps,
            SIZE=size, BLOCK=triton.next_power_of_2(size), HAS_MEAN=has_mean, IS_MEAN=is_mean,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, num_warps=4 if size <= 4096 else 8,
        )  # fmt: skip
    return output


@jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, output, num_rows, num_columns, weight_depth, weight_column,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by a block of columns. Programs beside one another read the same weights."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row_mask = (row < num_rows)[:, None]
    column_mask = (column < num_columns)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(0, DEPTH, BLOCK_DEPTH):
        depth = first + tl.arange(0, BLOCK_DEPTH)
        x_mask, weight_mask = row_mask, column_mask
        if DEPTH % BLOCK_DEPTH != 0:
            x_mask = row_mask & (depth < DEPTH)[None, :]
            weight_mask = column_mask & (depth < DEPTH)[:, None]
        block = tl.load(x + row[:, None] * DEPTH + depth[None, :], mask=x_mask, other=0.0)
        weights = tl.load(
            weight + depth[:, None] * weight_depth + column[None, :] * weight_column, mask=weight_mask, other=0.0
        )
        total = tl.dot(block, weights, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    target = output + row[:, None] * num_columns + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=row_mask & column_mask)


@jit
def _norm(
    x, weight, bias, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_MEAN: tl.constexpr,
    IS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    values = tl.load(x + row * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    if IS_MEAN:
        tl.store(output + row, (tl.sum(values, axis=0) / SIZE).to(output.dtype.element_ty))
    else:
        if HAS_MEAN:
            values = tl.where(inside, values - tl.sum(values, axis=0) / SIZE, 0.0)
        values = values / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        if HAS_WEIGHT:
            values *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(output + row * SIZE + place, values.to(output.dtype.element_ty), mask=inside)
