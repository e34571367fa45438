"""Sampled trees and texts, and bounds on the distance of counts from a distribution. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.sampling.controls import Controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from table_cases import Case


def shared_noise_tree(case: Case, chosen: Controls, shape: Sequence[int], draw: Draw) -> TokenTree:
    """A tree ranked by the request's own noise: without replacement its k best at a node, iid its best k times."""
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[Tensor] = []
    frontier: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for count in shape:
        level = []
        for node, path in frontier:
            logits = case.drafter.logits((*case.prompt, *path))
            scores = logits + chosen.noise.gumbel(len(case.prompt) + len(path), torch.arange(case.vocab_size))
            if draw is Draw.WITHOUT_REPLACEMENT:
                children = scores.topk(count).indices.tolist()
            else:
                children = [int(scores.argmax())] * count
            for child in children:
                level.append((len(tokens), (*path, child)))
                tokens.append(child)
                parents.append(node)
                rows.append(torch.softmax(logits, dim=-1))
        frontier = level
    return TokenTree(tuple(tokens), tuple(parents), draw=draw, distributions=torch.stack(rows))


def plain_text(case: Case, chosen: Controls, length: int, start: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The text of plain decoding after the prompt and `start`, up to `length` tokens with `start`."""
    tokens = start
    while len(tokens) < length:
        logits = case.target.logits((*case.prompt, *tokens))[None]
        rows = DistributionRows(History((*case.prompt, *tokens)), chosen, [()])
        tokens = (*tokens, Distributions(TensorLogits(logits), [rows]).picks()[0])
    return tokens


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic and its p-value, over rows of counts that each have their own total.

    Args:
        counts: shape (rows, classes).
        expected: distributions, shape (rows, classes); classes of distribution 0 must not occur.
    """
    aims = expected * counts.sum(axis=1, keepdims=True)
    used = aims > 0
    assert counts[~used].sum() == 0
    statistic = float((((counts - aims) ** 2)[used] / aims[used]).sum())
    degrees = int(used.sum() - (counts.sum(axis=1) > 0).sum())
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1]))
