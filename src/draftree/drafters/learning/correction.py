"""Correction of a head's logits, learned from verified tokens: a bias per token and a product of low rank.

With the state h of a row, scaled to a root mean square of 1, the corrected logits are z + b + R^T M h: b has a number
per token, R is (rank, tokens) and M is (rank, hidden). The frozen output rows stay. b and R begin at zero, so that an
untrained correction is none. All three descend the cross-entropy of the verified token with the step sizes of Adagrad
(Duchi et al., 2011), on rows that the walk through the tree visited. Tokens with a small probability are left out of an
update: their part of the gradient is as small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.learning.base import DamagedStateError
from draftree.models.native.learning import NativeCorrection

__all__ = ["Comparison", "Correction"]

FIRST_SQUARE = 0.01
"""Initial sum of squared gradients: bounds the first steps."""
LEAST_PROBABILITY = 1e-3
"""Tokens of lower probability are left out of an update."""
MEMORY = 1 - 1 / 256
"""Factor of older outcomes in a running share, for each new one."""
LEAST_OUTCOMES = 64
"""Outcomes before a correction can be used."""
SURE = 1.0
"""Standard errors by which a correction must be better before it is used."""
SEED = 20240601


@final
class Comparison:
    """Running shares of first draft tokens that the target picks, without and with a correction, on the same rows."""

    def __init__(self) -> None:
        self.count = self.base = self.learned = self.different = 0.0
        self.is_better = False
        """Whether drafts use the correction: from a gain of `SURE` standard errors on, until a loss."""

    def add(self, base: bool, learned: bool) -> None:
        """Add the outcomes of one row."""
        self.count = MEMORY * self.count + 1
        self.base = MEMORY * self.base + base
        self.learned = MEMORY * self.learned + learned
        self.different = MEMORY * self.different + (base != learned)
        self._decide()

    def _decide(self) -> None:
        gain = self.learned - self.base
        if self.count < LEAST_OUTCOMES or gain < 0:
            self.is_better = False
        elif gain > SURE * math.sqrt(self.different):
            self.is_better = True

    @property
    def state(self) -> np.ndarray:
        """Numbers for a file."""
        return np.array([self.count, self.base, self.learned, self.different])

    def restore(self, state: np.ndarray) -> None:
        """Continue from the numbers of a file."""
        self.count, self.base, self.learned, self.different = (float(value) for value in state)
        self._decide()

    @property
    def shares(self) -> tuple[float, float] | None:
        """Share without and share with the correction; None before the first outcome."""
        return (self.base / self.count, self.learned / self.count) if self.count else None


@final
class Correction:
    """Bias and product of low rank, with the sums of squares of their gradients. Mutated by `update`.

    Args:
        num_tokens: size of the draft vocabulary.
        hidden: width of a state.
        rank: rank of the product; 0 for the bias only.
        device: device of the logits.
        native: whether to compute in C, with states and logits in host memory and a step for each row, in order;
            otherwise rows of one update are one step.
    """

    def __init__(self, num_tokens: int, hidden: int, *, rank: int, device: torch.device, native: bool = False) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.bias = torch.zeros(num_tokens, device=device)
        self.rows = torch.zeros(rank, num_tokens, device=device)
        self.mix = (torch.randn(rank, hidden, generator=generator) / hidden**0.5).to(device)
        self._squares = {name: torch.full_like(own, FIRST_SQUARE) for name, own in self._parameters.items()}
        self.comparison = Comparison()
        squares = {f"{name}_squares": own for name, own in self._squares.items()}
        self._native = NativeCorrection(self._parameters | squares) if native else None

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {"bias": self.bias, "rows": self.rows, "mix": self.mix}

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return 2 * sum(4 * own.numel() for own in self._parameters.values())

    def apply(self, logits: Tensor, states: Tensor) -> None:
        """Correct logits in place.

        Args:
            logits: shape (rows, tokens).
            states: states of the rows, shape (rows, hidden).
        """
        if self._native is not None:
            self._native.apply(logits, states.float().contiguous())
            return
        logits.add_(self._change(_scaled(states) @ self.mix.T).to(logits.dtype))

    def _change(self, mixed: Tensor) -> Tensor:
        return torch.addmm(self.bias, mixed, self.rows) if len(self.rows) else self.bias

    def update(
        self, logits: Tensor, states: Tensor, *, columns: Sequence[int], temperatures: Sequence[float], rate: float
    ) -> None:
        """Descend.

        Args:
            logits: logits of the head without the correction, shape (rows, tokens); overwritten.
            states: shape (rows, hidden).
            columns: column of the verified token after each row.
            temperatures: temperature of each row's text; 1 for greedy texts.
            rate: learning rate.
        """
        if self._native is not None:
            self._native.update(logits, states.float().contiguous(), columns, temperatures, rate)
            return
        scaled = _scaled(states)
        mixed = scaled @ self.mix.T
        logits = logits.float() + self._change(mixed)
        if any(temperature != 1 for temperature in temperatures):
            logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])
        error = torch.softmax(logits, dim=-1)
        picked = torch.tensor(columns, device=logits.device)
        error[torch.arange(len(columns), device=logits.device), picked] -= 1
        chosen = _large_columns(error)
        error = error[:, chosen]
        step = self._step("bias", error.sum(dim=0), rate, chosen)
        self.bias.index_add_(0, chosen, step)
        if not len(self.rows):
            return
        along = (self.rows[:, chosen] @ error.T) @ scaled
        self.rows.index_add_(1, chosen, self._step("rows", mixed.T @ error, rate, chosen))
        self.mix.add_(self._step("mix", along, rate))

    def _step(self, name: str, gradient: Tensor, rate: float, chosen: Tensor | None = None) -> Tensor:
        squares = self._squares[name]
        if chosen is None:
            sums = squares.addcmul_(gradient, gradient)
        else:
            squares.index_add_(-1, chosen, gradient * gradient)
            sums = squares.index_select(-1, chosen)
        return gradient.mul_(-rate) / sums.sqrt()

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of everything that is learned."""
        arrays = {name: own.cpu().numpy().copy() for name, own in self._parameters.items()}
        arrays |= {f"{name}_squares": own.cpu().numpy().copy() for name, own in self._squares.items()}
        return arrays | {"outcomes": self.comparison.state}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace what is learned.

        Raises:
            DamagedStateError: an array is missing, has another shape, or is not finite.
        """
        expected = {name: value for name, value in self.state().items() if value.size}
        if {name for name, value in state.items() if value.size} != set(expected):
            raise DamagedStateError("it has other arrays")
        for name, own in expected.items():
            if state[name].shape != own.shape or state[name].dtype != own.dtype or not np.isfinite(state[name]).all():
                raise DamagedStateError(f"array {name} has another shape or is not finite")
        for name, target in self._parameters.items():
            if target.numel():
                target.copy_(torch.from_numpy(state[name].copy()))
                self._squares[name].copy_(torch.from_numpy(state[f"{name}_squares"].copy()))
        self.comparison.restore(state["outcomes"])


def _large_columns(error: Tensor) -> Tensor:
    """Return the columns with a large entry; numpy takes a third of torch's time on a host."""
    if error.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.abs(error.numpy()).max(axis=0) > LEAST_PROBABILITY))
    return (error.abs().amax(dim=0) > LEAST_PROBABILITY).nonzero()[:, 0]


def _scaled(states: Tensor) -> Tensor:
    """Return states in float32 with a root mean square of 1."""
    values = states.float()
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)
