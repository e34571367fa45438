"""Medusa: residual perceptrons on the target's last hidden state, one for each level.

Head k reads the state after the final norm of the token before the anchor and predicts the token k + 1 places after the
anchor. There is no attention, and no level knows the one before.

Source: Medusa, arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.tensors import rows_of
from draftree.heads.base import BlockAttend, BlockHead, BlockRows, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.vocabulary import DraftVocabulary


class ResidualProduct(nn.Module):
    """A product, its activation, and the input added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, shape of the input."""
        return x + F.silu(self.linear(x))


@final
class MedusaHead(BlockHead):
    """Head of kind `medusa`."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.medusa_head = nn.ModuleList(
            nn.Sequential(
                *(ResidualProduct(config.hidden) for _ in range(config.head_layers)),
                nn.Linear(config.hidden, config.draft_vocab_size, bias=False),
            )
            for _ in range(config.block_size)
        )
        self._finish: Callable[[Tensor], Tensor] | None = None

    @property
    def num_levels(self) -> int:
        return self.config.block_size

    def bind(self, parts: TargetParts) -> None:
        """Set the final norm of the target."""
        self.require_target(parts)
        self._finish = parts.finish

    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        assert self._finish is not None, "a head is bound to a target before it runs"
        last = self._finish(rows_of(rows.features, rows.anchors)[:, 0])
        last = last.to(self.medusa_head[0][-1].weight.dtype)  # type: ignore[index]
        return torch.stack([head[:-1](last) for head in self.medusa_head], dim=1)  # type: ignore[index]

    def logits(self, states: Tensor) -> Tensor:
        levels = [head[-1](states[:, level]) for level, head in enumerate(self.medusa_head)]  # type: ignore[index]
        return torch.stack(levels, dim=1).float()
