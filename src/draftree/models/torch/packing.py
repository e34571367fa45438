"""Linear layers with prepacked weights, for float32 on CPUs with MKL.

The ordinary `linear` repacks the weights in every call with a few rows: a pass over eight rows takes three times as
long as one over one row. With prepacked weights, eight rows take little more time than one, which drafting depends on.
The packed form replaces the weight, unless an embedding shares it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PACK_ROWS = 16  # number of rows that the packed layout is optimized for; other numbers give correct results
CHECK_ROWS = (1, 2, 7, 16, 33)


class PackedLinear(nn.Module):
    """Float32 linear layer with its weight in MKL's packed layout. No gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._packed: Tensor | None = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._plain: Tensor | None = None
        self.num_bytes = weight.numel() * weight.element_size()
        # the operator uses only the shape of the plain weight
        self._shape = weight.new_empty(1).expand(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply rows of shape (..., in_features) to (..., out_features)."""
        if self._plain is not None:
            return nn.functional.linear(x, self._plain, self.bias)
        rows = x.numel() // self.in_features
        return torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self.bias, rows)

    @property
    def weight(self) -> Tensor:
        """The plain weight. A layer whose weight its model reads directly keeps that form from then on."""
        if self._plain is None:
            self._plain, self._packed = self.unpacked(), None
        return self._plain

    def unpacked(self) -> Tensor:
        """Return the plain weight, shape (out_features, in_features), as a new tensor: products with unit vectors."""
        if self._plain is not None:
            return self._plain.clone()
        units = torch.eye(self.in_features)
        transposed: Tensor = torch.ops.mkl._mkl_linear(units, self._packed, self._shape, None, self.in_features)
        return transposed.T.contiguous()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packing works here, by a trial on a small layer with several numbers of rows."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkl.is_available():
        return False
    linear = nn.Linear(48, 40)
    try:
        packed = PackedLinear(linear)
        with torch.inference_mode():
            inputs = [torch.linspace(-1, 1, rows * 48).reshape(1, rows, 48) for rows in CHECK_ROWS]
            return all(torch.allclose(packed(x), linear(x), atol=1e-5) for x in inputs)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("weights are not packed: %s", error)
        return False


@torch.inference_mode()
def pack(model: Any) -> int:
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.float32
    ]
    for parent, name, child in linears:
        setattr(parent, name, PackedLinear(child))
    return len(linears)


def weight_bytes(model: Any) -> int:
    """Return the size of a model's weights in bytes: shared ones once, packed ones at their original size."""
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
