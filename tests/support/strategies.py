"""Hypothesis strategies: trees that a rule accepts, with any distributions, and target tables to verify them
against."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.models.table import hashed, near
from draftree.verifiers.base import Verifier
from table_cases import Case

VOCAB = 5


@st.composite
def distributions(draw: st.DrawFn) -> Tensor:
    """A distribution with zeros and with near-certain tokens now and then; float32, as real drafters give."""
    weights = draw(
        st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 0.5, 1.0, 3.0]), min_size=VOCAB, max_size=VOCAB).filter(any)
    )
    row = torch.tensor(weights, dtype=torch.float64)
    return (row / row.sum()).to(torch.float32)


@st.composite
def trees_for(draw: st.DrawFn, verifier: Verifier, *, max_nodes: int = 8) -> TokenTree:
    """A tree of a draw that the rule accepts; siblings carry one distribution, and no twins where draws cannot
    repeat."""
    kind = draw(st.sampled_from(sorted(verifier.accepts, key=lambda kind: kind.value)))
    has_distributions = kind in (Draw.IID, Draw.WITHOUT_REPLACEMENT)
    size = draw(st.integers(0, max_nodes))
    parents, tokens, rows = [], [], {}
    for node in range(size):
        parent = node - 1 if verifier.chains_only or kind is Draw.POINT else draw(st.integers(ROOT, node - 1))
        taken = {tokens[n] for n in range(node) if parents[n] == parent}
        free = [token for token in range(VOCAB) if kind is Draw.IID or token not in taken]
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
        if has_distributions and parent not in rows:
            rows[parent] = draw(distributions())
    stacked = torch.stack([rows[parent] for parent in parents]) if rows else None
    return TokenTree(tuple(tokens), tuple(parents), draw=kind, distributions=stacked)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A target table, flat or sharp, and a drafter that the strategies do not use."""
    target = hashed(VOCAB, draw(st.integers(0, 20)), scale=draw(st.sampled_from([0.0, 1.0, 4.0, 60.0])))
    return Case.of(target, near(target, seed=1, distance=1.0))
