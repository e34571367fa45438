"""Sums of partial products in the order of the ranks.

An all-reduce adds the ranks' parts in an order that depends on the size of the message, so with more than two ranks the
sum of a row depends on how many rows a pass has. Here every rank gathers the parts, in the dtype of the weights, and
adds them in float32 from rank 0 up. The cost is tp times the bytes of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError

__all__ = ["ordered_sum", "ordered_sums", "require_ordered"]

ORDERED = ("rowwise", "rowwise_rep", "rowwise_split_input")
"""Styles of transformers whose sums are replaced."""
WITHOUT_SUMS = (
    "colwise",
    "colwise_rep",
    "colwise_gather_output",
    "packed_colwise",
    "replicated_with_grad_allreduce",
    "replicate",
    "local_params",
    "embedding_rowwise",
    "embedding_colwise",
)
"""Styles that add nothing, or one number and zeros."""


def ordered_sum(part: Tensor, group: Any) -> Tensor:
    """Return the sum of all ranks' parts, added in float32 in the order of the ranks, in the dtype of the parts.

    Args:
        part: of this rank; the same shape on all ranks.
        group: process group of the ranks.
    """
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for other in parts[1:]:
        total = total + other.to(wide)
    return total.to(part.dtype)


def require_ordered(styles: Iterator[str] | list[str], kind: str) -> None:
    """Check that all sums of a plan can be ordered.

    Raises:
        UnsupportedModelError: the plan has other sums, such as those of experts.
    """
    strange = sorted(set(styles) - set(ORDERED) - set(WITHOUT_SUMS))
    if strange:
        raise UnsupportedModelError(
            f"strict_sums cannot order the sums of '{kind}' (style {strange[0]}): leave strict_sums out"
        )


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Let models that are loaded inside add their partial products in the order of the ranks."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import RowwiseParallel

    class Ordered(RowwiseParallel):
        def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
            found = ordered_sum(output, mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"))
            bias = module._parameters.get("bias")
            return found if bias is None else found + (bias.to_local() if hasattr(bias, "to_local") else bias)

    before = {name: ALL_PARALLEL_STYLES[name] for name in ORDERED}
    for name, style in before.items():
        ALL_PARALLEL_STYLES[name] = Ordered(input_layouts=style.input_layouts)
    try:
        yield
    finally:
        for name in before:
            del ALL_PARALLEL_STYLES[name]
