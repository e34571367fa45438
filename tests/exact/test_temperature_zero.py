"""At temperature 0 every rule, the lossy ones included, accepts exactly the greedy text of the draft."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.noise import Noise
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import NoiseSource
from sampled_trees import plain_text
from strategies import cases, trees_for
from table_cases import Case, controls, node_distributions, rule


@pytest.mark.parametrize("name", VERIFIERS.names())
@given(case=cases(), seed=st.integers(0, 10), data=st.data())
def test_text_is_greedy(name: str, case: Case, seed: int, data: st.DataObject) -> None:
    verifier = rule(name)
    tree = data.draw(trees_for(verifier))
    chosen = controls(case.vocab_size, temperature=0.0)
    verdict = verifier.verify(tree, node_distributions(case, tree, chosen), NoiseSource(Noise(seed)))
    greedy = plain_text(case, chosen, len(tree) + 1)
    tokens = (*(tree.tokens[node] for node in verdict.path), verdict.bonus)
    assert tokens == greedy[: len(tokens)]
    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    assert len(verdict.path) == max((len(path) for path in paths if path == greedy[: len(path)]), default=0)
