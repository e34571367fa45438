"""Fit of a drafter's confidence on unseen texts, and how well it is calibrated on others.

A sample is a candidate of a level that decoding would reach: all levels before matched. Every second text fits the map
and the others measure it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.heads.calibration import MOST_SURE, Calibration
from draftree.train.batches import Batch
from draftree.train.judging import JudgedStep

__all__ = ["ConfidenceFit"]

LEAST_SLOPE = 0.05
LEAST_SAMPLES = 50
"""Samples below which a level takes the map of the level before."""
BINS = 10
PRIOR = 10.0
"""Weight of the identity, in samples."""
STEPS = 50


@dataclass(slots=True)
class _Level:
    """Samples of one level: logits of shares, and whether they matched; those that fit and those that measure."""

    shares: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    matches: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def samples(self, side: int) -> tuple[Tensor, Tensor]:
        if not self.shares[side]:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return torch.cat(self.shares[side]).double(), torch.cat(self.matches[side]).double()


class ConfidenceFit:
    """Samples of judged drafts, and the fit. `add` is the `watch` of an evaluation.

    Args:
        depth: number of levels.
    """

    def __init__(self, depth: int) -> None:
        self._levels = [[_Level() for _ in range(depth)] for _ in range(2)]
        self._num_texts = 0

    def add(self, batch: Batch, judged: list[JudgedStep]) -> None:
        """Add the candidates of a batch."""
        layout = batch.chain_rows
        text = (layout.places // layout.longest).cpu() + self._num_texts
        sampled = torch.tensor([one.temperature > 0 for one in batch.texts])[text - self._num_texts]
        self._num_texts += layout.num_texts
        is_reached = torch.ones(batch.num_chains, dtype=torch.bool)
        for level, step in enumerate(judged):
            is_reached &= step.has_room.cpu()
            share = step.log_shares.cpu().double().exp().clamp(MOST_SURE, 1 - MOST_SURE)
            matches = step.match.cpu()[:, None] == torch.arange(share.shape[1])
            for kind in range(2):
                for side in range(2):
                    chosen = is_reached & (sampled == bool(kind)) & (text % 2 == side)
                    self._levels[kind][level].shares[side].append(share[chosen].logit().flatten())
                    self._levels[kind][level].matches[side].append(matches[chosen].flatten())
            is_reached &= step.match.cpu() == 0

    def fit(self) -> Calibration:
        """Return the map."""
        greedy, sampled = (self._pairs(levels) for levels in self._levels)
        return Calibration(greedy, sampled)

    @staticmethod
    def _pairs(levels: list[_Level]) -> tuple[tuple[float, float], ...]:
        pairs: list[tuple[float, float]] = []
        for level in levels:
            shares, matches = level.samples(0)
            if len(shares) < LEAST_SAMPLES:
                pairs.append(pairs[-1] if pairs else (1.0, 0.0))
            else:
                pairs.append(_logistic(shares, matches))
        return tuple(pairs)

    def report(self, calibration: Calibration) -> dict[str, Any]:
        """Return the expected calibration error of raw and mapped scores on the other texts, as JSON values."""
        found: dict[str, Any] = {}
        for name, levels, pairs in (
            ("greedy", self._levels[0], calibration.greedy),
            ("sampled", self._levels[1], calibration.sampled),
        ):
            found[name] = []
            for level, (slope, offset) in zip(levels, pairs, strict=True):
                shares, matches = level.samples(1)
                if len(shares):
                    raw, mapped = shares.sigmoid(), (slope * shares + offset).sigmoid()
                    errors = {"raw": calibration_error(raw, matches), "mapped": calibration_error(mapped, matches)}
                    found[name].append({"samples": len(shares)} | errors)
        return found


def _logistic(shares: Tensor, matches: Tensor) -> tuple[float, float]:
    """Return slope and offset of the logistic regression, by Newton's method with a weak pull to the identity."""
    inputs = torch.stack((shares, torch.ones_like(shares)), dim=-1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = prior.clone()
    for _ in range(STEPS):
        found = (inputs @ weights).sigmoid()
        slope = inputs.T @ (found - matches) + PRIOR * (weights - prior)
        curve = (inputs * (found * (1 - found))[:, None]).T @ inputs + PRIOR * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(curve, slope)
        weights = weights - step * min(1.0, 2.0 / float(step.norm().clamp_min(1e-12)))
    return max(LEAST_SLOPE, float(weights[0])), float(weights[1])


def calibration_error(probabilities: Tensor, matches: Tensor) -> float:
    """Return the expected calibration error: mean distance of probability and rate over bins of equal counts.

    Args:
        probabilities: estimates from 0 to 1, shape (samples,).
        matches: 1 for a match and 0 otherwise, shape (samples,).
    """
    order = probabilities.argsort()
    total = 0.0
    for part in order.tensor_split(BINS):
        if len(part):
            total += abs(float(probabilities[part].mean() - matches[part].mean())) * len(part)
    return total / max(1, len(order))
