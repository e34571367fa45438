"""A target and a drafter that are tables over one vocabulary, and the distributions of what follows. Not a test
itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.core.tree import ROOT, TokenTree
from draftree.models.table import Table, TableLM
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions, NodeDistributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Verifier

PROMPT = (0,)


@functools.cache
def rule(name: str, **options: object) -> Verifier:
    """A verifier by its name; found once, since finding reads the whole folder."""
    cls = VERIFIERS.find(name)
    return cls(cls.Config(**options))


@functools.cache
def controls(vocab_size: int, *, seed: int = 0, temperature: float = 1.0) -> Controls:
    return build_controls(SamplingParams(temperature=temperature), vocab_size=vocab_size, seed=seed)


@dataclass(frozen=True)
class Case:
    """A target and a drafter over one vocabulary."""

    target: TableLM
    drafter: TableLM
    prompt: tuple[int, ...] = PROMPT

    @classmethod
    def of(cls, target: Table, drafter: Table, *, order: int = 16) -> Case:
        return cls(TableLM(target, order=order), TableLM(drafter, order=order))

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def target_distribution(self, path: Sequence[int]) -> np.ndarray:
        return distribution_of(self.target, (*self.prompt, *path)).numpy()

    def draft_distribution(self, path: Sequence[int]) -> np.ndarray:
        return distribution_of(self.drafter, (*self.prompt, *path)).numpy()


def distribution_of(model: TableLM, context: Sequence[int]) -> Tensor:
    return torch.softmax(model.logits(context), dim=-1)


def node_distributions(case: Case, tree: TokenTree, chosen: Controls | None = None) -> NodeDistributions:
    """The target's distributions at the root and all nodes, through the code that serves real models."""
    chosen = chosen or controls(case.vocab_size)
    paths = [[tree.tokens[n] for n in tree.path(node)] for node in range(ROOT, len(tree))]
    logits = torch.stack([case.target.logits((*case.prompt, *path)) for path in paths])
    rows = DistributionRows(History(case.prompt), chosen, paths)
    return RememberedDistributions(Distributions(TensorLogits(logits), [rows]))


class RememberedDistributions(NodeDistributions):
    """Probabilities computed once, for the many replays of one tree."""

    __slots__ = ("_probs",)

    def __init__(self, distributions: Distributions) -> None:
        super().__init__(distributions, 0)
        self._probs: Tensor | None = None

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self._probs is None:
            self._probs = super().probs()
        return self._probs[rows]


def joint(case: Case, length: int, path: tuple[int, ...] = ()) -> np.ndarray:
    """The target's distribution of the next `length` tokens after a path, shape (vocab,) * length."""
    if length == 0:
        return np.ones(())
    distribution = case.target_distribution(path)
    rows = [distribution[token] * joint(case, length - 1, (*path, token)) for token in range(case.vocab_size)]
    return np.stack(rows)


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation distance of two distributions."""
    return float(np.abs(one - other).sum() / 2)
