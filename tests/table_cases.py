"""A target and a drafter that are tables over one vocabulary, and the laws of what follows. Not a test itself."""

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
from draftree.sampling.history import History
from draftree.sampling.laws import LawRows, Laws, NodeLaws
from draftree.sampling.params import SamplingParams
from draftree.verifiers.base import VERIFIERS, Verifier

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

    def target_law(self, path: Sequence[int]) -> np.ndarray:
        return law_of(self.target, (*self.prompt, *path)).numpy()

    def draft_law(self, path: Sequence[int]) -> np.ndarray:
        return law_of(self.drafter, (*self.prompt, *path)).numpy()


def law_of(model: TableLM, context: Sequence[int]) -> Tensor:
    return torch.softmax(model.logits(context), dim=-1)


def node_laws(case: Case, tree: TokenTree, chosen: Controls | None = None) -> NodeLaws:
    """The target's laws at the root and all nodes, through the code that serves real models."""
    chosen = chosen or controls(case.vocab_size)
    paths = [[tree.tokens[n] for n in tree.path(node)] for node in range(ROOT, len(tree))]
    logits = torch.stack([case.target.logits((*case.prompt, *path)) for path in paths])
    return RememberedLaws(Laws(logits, [LawRows(History(case.prompt), chosen, paths)]))


class RememberedLaws(NodeLaws):
    """Probabilities computed once, for the many replays of one tree."""

    __slots__ = ("_probs",)

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws, 0)
        self._probs: Tensor | None = None

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self._probs is None:
            self._probs = super().probs()
        return self._probs[rows]


def joint(case: Case, length: int, path: tuple[int, ...] = ()) -> np.ndarray:
    """The target's law of the next `length` tokens behind a path, shape (vocab,) * length."""
    if length == 0:
        return np.ones(())
    law = case.target_law(path)
    rows = [law[token] * joint(case, length - 1, (*path, token)) for token in range(case.vocab_size)]
    return np.stack(rows)


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation distance of two laws."""
    return float(np.abs(one - other).sum() / 2)
