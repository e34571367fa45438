"""XPress: DFlash with a refiner whose bias depends on all tokens of the path.

The code of a slot is a product of its state, of the mean state of the block and of the token before it. The codes of a
slot and of those before are mixed, by a weight for each pair of slots and each channel. A perceptron and a product make
the bias. The authors' Jacobi passes reach what is computed here token by token.

Source: speculators 0.9.0 (`xpress`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.heads.base import BlockNodes
from draftree.heads.config import HeadConfig


class Refiner(nn.Module):
    """Bias by the tokens of a path. Its memory is the product of the mean state, and the codes of the slots so far."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, wide = config.markov_rank, config.hidden
        self._rank = rank
        self._slots = config.block_size
        self._first = 0 if config.anchor_predicts else 1
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(wide, rank, bias=False)
        self.down_g = nn.Linear(wide, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, self._slots, self._slots))
        self.mlp_gate = nn.Linear(rank, config.refiner_width, bias=False)
        self.mlp_up = nn.Linear(rank, config.refiner_width, bias=False)
        self.mlp_down = nn.Linear(config.refiner_width, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab_size, bias=False)

    @property
    def width(self) -> int:
        return self._rank * (1 + self._slots)

    def start(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the memory before level 0; arguments as in `BlockHead.start`."""
        memory = states.new_zeros(len(states), 1 + self._slots, self._rank)
        memory[:, 0] = self.down_g(states.mean(dim=1))
        if self._first:
            memory[:, 1] = self._codes(memory, previous, states[:, 0])
        return memory.flatten(1)

    def forward(self, nodes: BlockNodes) -> tuple[Tensor, Tensor | None]:
        """Return logits and the memory."""
        assert nodes.memory is not None, "a refiner has a memory"
        memory = nodes.memory.unflatten(1, (1 + self._slots, self._rank)).clone()
        slots = nodes.levels + self._first
        rows = torch.arange(len(slots), device=slots.device)
        codes = self._codes(memory, nodes.tokens, nodes.states)
        memory[rows, 1 + slots] = codes.to(memory.dtype)
        # later slots of the memory are zero
        x = codes + torch.einsum("rnj,njr->nr", self.mix_l[:, slots], memory[:, 1:])
        x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
        return nodes.logits + self.readout(x).to(nodes.logits.dtype), memory.flatten(1)

    def _codes(self, memory: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        return self.in_proj(torch.cat((self.down_h(states), memory[:, 0], self.token_embed(tokens)), dim=-1))
