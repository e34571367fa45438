"""DFlash2: DFlash with short causal convolutions in its layers, and a second choice among the best tokens of a level.

The inputs and outputs of attention and perceptron pass a convolution over the rows of the block. Its kernel is a base
per channel plus a part that a product of the input gives for each group of channels. The selector adds to the logits of
the best tokens of a level a product of three codes: of the token before, of the state and of the token itself.

Source: github.com/z-lab/dflash, speculators 0.9.0 (`dflash2`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.heads.base import BlockNodes
from draftree.heads.config import HeadConfig


class BlockConvolution(nn.Module):
    """Convolutions before and after one part of a layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._taps = config.conv_taps
        self._group = config.conv_group
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, config.hidden))
        self.kernel_projection = nn.Linear(config.hidden, 2 * self._taps * (config.hidden // self._group), bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved inputs of the part, shape (sequences, rows, hidden), and the kernel of its outputs."""
        first, second = self.kernel_projection(x).unflatten(-1, (2, self._taps, -1)).unbind(-3)
        return self._convolved(x, self.base_kernel[0] + self._wide(first)), self.base_kernel[1] + self._wide(second)

    def after(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the convolved outputs of the part."""
        return self._convolved(x, kernel)

    def _wide(self, kernel: Tensor) -> Tensor:
        return kernel.repeat_interleave(self._group, dim=-1)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the sum of earlier rows, each times its tap of the kernel (sequences, rows, taps, hidden)."""
        taps = [F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :] * kernel[..., tap, :] for tap in range(self._taps)]
        return torch.stack(taps).sum(0)


class CandidateSelector(nn.Module):
    """Second choice among the best tokens."""

    width = 0

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._count = config.num_candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.markov_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.draft_vocab_size, config.markov_rank))
        self.hidden_projection = nn.Linear(config.hidden, config.markov_rank, bias=False)

    def forward(self, nodes: BlockNodes) -> tuple[Tensor, Tensor | None]:
        """Return logits in which tokens that are no candidates are minus infinity."""
        best = nodes.logits.topk(self._count, dim=-1)
        code = self.predecessor_codebook[nodes.tokens] * self.hidden_projection(nodes.states)
        scores = torch.einsum("nr,nkr->nk", code, self.successor_codebook[best.indices])
        rest = torch.full_like(nodes.logits, -torch.inf)
        return rest.scatter(-1, best.indices, best.values + scores.to(best.values.dtype)), None
