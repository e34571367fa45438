"""Corrections of one head: one for all requests, or one for each owner, with bounded memory and a share of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.drafters.learning.store import DamagedStateError, LearnedState, LearnedStats, LearningStore, OwnedLearner
from draftree.models.native.logits import NativeCorrection

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
        self.outcomes = np.zeros(4)
        """Sums over rows: their number, tokens right without and with the correction, and different outcomes."""
        self.is_better = False
        """Whether drafts use the correction: from a gain of `SURE` standard errors on, until a loss."""

    def add(self, base: bool, learned: bool) -> None:
        """Add the outcomes of one row."""
        self.restore(MEMORY * self.outcomes + (1, base, learned, base != learned))

    def restore(self, outcomes: np.ndarray) -> None:
        """Continue from these sums."""
        self.outcomes = outcomes
        count, base, learned, different = outcomes.tolist()
        if count < LEAST_OUTCOMES or learned < base:
            self.is_better = False
        elif learned - base > SURE * math.sqrt(different):
            self.is_better = True

    @property
    def shares(self) -> tuple[float, float] | None:
        """Share without and share with the correction; None before the first outcome."""
        count, base, learned, _ = self.outcomes.tolist()
        return (base / count, learned / count) if count else None


@final
class Correction:
    """Bias and product of low rank, with the sums of squares of their gradients. Mutated by `update`.

    Args:
        rank: rank of the product; 0 for the bias only.
        native: whether to compute in C, with states and logits in host memory and a step for each row, in order;
            otherwise rows of one update are one step.
    """

    def __init__(self, num_tokens: int, hidden: int, *, rank: int, device: torch.device, native: bool = False) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.bias = torch.zeros(num_tokens, device=device)
        self.rows = torch.zeros(rank, num_tokens, device=device)
        self.mix = (torch.randn(rank, hidden, generator=generator) / hidden**0.5).to(device)
        learned = {"bias": self.bias, "rows": self.rows, "mix": self.mix}
        squares = {f"{name}_squares": torch.full_like(tensor, FIRST_SQUARE) for name, tensor in learned.items()}
        self._arrays = learned | squares
        self.comparison = Comparison()
        self._native = NativeCorrection(self._arrays) if native else None

    @property
    def num_bytes(self) -> int:
        return sum(4 * tensor.numel() for tensor in self._arrays.values())

    def apply(self, logits: Tensor, states: Tensor) -> None:
        """Correct logits, shape (rows, tokens), in place, by the states of the rows, shape (rows, hidden)."""
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
            temperatures: temperature of each row's text; 1 for greedy texts.
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
        targets = torch.tensor(columns, device=logits.device)
        error[torch.arange(len(columns), device=logits.device), targets] -= 1
        if error.device.type == "cpu":  # numpy takes a third of torch's time
            chosen = torch.from_numpy(np.flatnonzero(np.abs(error.numpy()).max(axis=0) > LEAST_PROBABILITY))
        else:
            chosen = (error.abs().amax(dim=0) > LEAST_PROBABILITY).nonzero()[:, 0]
        error = error[:, chosen]
        step = self._step("bias", error.sum(dim=0), rate, chosen)
        self.bias.index_add_(0, chosen, step)
        if not len(self.rows):
            return
        along = (self.rows[:, chosen] @ error.T) @ scaled
        self.rows.index_add_(1, chosen, self._step("rows", mixed.T @ error, rate, chosen))
        self.mix.add_(self._step("mix", along, rate))

    def _step(self, name: str, gradient: Tensor, rate: float, chosen: Tensor | None = None) -> Tensor:
        squares = self._arrays[f"{name}_squares"]
        if chosen is None:
            sums = squares.addcmul_(gradient, gradient)
        else:
            squares.index_add_(-1, chosen, gradient * gradient)
            sums = squares.index_select(-1, chosen)
        return gradient.mul_(-rate) / sums.sqrt()

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of everything that is learned."""
        arrays = {name: tensor.cpu().numpy().copy() for name, tensor in self._arrays.items()}
        return arrays | {"outcomes": self.comparison.outcomes.copy()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace what is learned."""
        expected = {name: value for name, value in self.state().items() if value.size}
        if {name for name, value in state.items() if value.size} != set(expected):
            raise DamagedStateError("it has other arrays")
        for name, array in expected.items():
            if (
                state[name].shape != array.shape
                or state[name].dtype != array.dtype
                or not np.isfinite(state[name]).all()
            ):
                raise DamagedStateError(f"array {name} has another shape or is not finite")
        for name, target in self._arrays.items():
            if target.numel():
                target.copy_(torch.from_numpy(state[name].copy()))
        self.comparison.restore(state["outcomes"].copy())


def _scaled(states: Tensor) -> Tensor:
    """Return states in float32 with a root mean square of 1."""
    values = states.float()
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)


MAX_BYTES = 64 << 20
"""Memory of the corrections of all owners; the one that was not used for the longest time is dropped first."""
LONGEST_PAUSE = 1.0
"""Seconds between two drafts that count as time of generation; a longer pause is idle."""


@final
class Pace:
    """Limit of the time that is spent on learning."""

    def __init__(self, share: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._share, self.clock = share, clock
        self._last: float | None = None
        self._elapsed = 0.0
        self.spent = 0.0

    def allows(self) -> bool:
        """Return whether the next draft may be learned from; called once for every draft."""
        now = self.clock()
        if self._last is not None:
            self._elapsed += min(now - self._last, LONGEST_PAUSE)
        self._last = now
        return self.spent <= self._share * self._elapsed

    def spend(self, start: float) -> None:
        """Count the time since `start`."""
        self.spent += self.clock() - start


@final
class HeadCorrections(OwnedLearner[Correction]):
    """Corrections by owner."""

    name = "head"

    def __init__(
        self,
        store: LearningStore,
        num_tokens: int,
        hidden: int,
        *,
        identity: str,
        device: torch.device,
        native: bool = False,
    ) -> None:
        options = store.learning.options
        super().__init__(f"{identity} {num_tokens} {hidden} {options.rank}", store)
        self.pace = Pace(options.share)
        self._rate = options.rate
        self._build = partial(Correction, num_tokens, hidden, rank=options.rank, device=device, native=native)
        self._all = Comparison()
        self._num_rows = 0

    @classmethod
    def shared(
        cls,
        store: LearningStore,
        key: tuple[str, str],
        num_tokens: int,
        hidden: int,
        *,
        device: torch.device,
        native: bool,
    ) -> HeadCorrections:
        """Return the corrections of all drafters with this kind and identity, by the options of the store."""
        build = partial(cls, store, num_tokens, hidden, identity=key[1], device=device, native=native)
        return store.learner(key, build)

    def open(self, name: str) -> Correction:
        """Return a correction, a new one if there is none yet."""
        with self._lock:
            correction = self._used(name)
            while len(self._owned) > 1 and len(self._owned) * correction.num_bytes > MAX_BYTES:
                del self._owned[next(iter(self._owned))]
        return correction

    def _restored(self, arrays: Mapping[str, np.ndarray]) -> Correction:
        correction = self._build()
        correction.restore(arrays)
        return correction

    def learn(
        self, name: str, logits: Tensor, states: Tensor, *, columns: Sequence[int], temperatures: Sequence[float]
    ) -> None:
        """Update a correction; arguments as for `Correction.update`."""
        correction = self.open(name)
        with self._lock:
            correction.update(logits, states, columns=columns, temperatures=temperatures, rate=self._rate)
            self._num_rows += len(columns)
            self._changed()

    def compare(self, name: str, *, base: bool, learned: bool) -> None:
        """Note whether the target picked the first draft token, without and with the correction."""
        with self._lock:
            self.open(name).comparison.add(base, learned)
            self._all.add(base, learned)

    def state(self) -> LearnedState:
        return {name: correction.state() for name, correction in self._owned.items()}

    def forget(self) -> None:
        self._all = Comparison()
        super().forget()

    @property
    def stats(self) -> LearnedStats:
        corrections = tuple(self._owned.values())
        base, learned = self._all.shares or (None, None)
        return LearnedStats(
            self.name,
            tokens=self._num_rows,
            size=sum(correction.num_bytes // 8 for correction in corrections),
            num_bytes=sum(correction.num_bytes for correction in corrections),
            scopes=len(corrections),
            base_acceptance=base,
            learned_acceptance=learned,
            active=sum(correction.comparison.is_better for correction in corrections),
            seconds=self.pace.spent,
        )
