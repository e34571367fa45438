"""Contract tests of every file in the verifiers' folder; a new verifier is tested automatically."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, chain
from draftree.core.types import Verdict
from draftree.models.table import hashed
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import NoiseSource, Verifier
from oracle import ScriptedChance
from strategies import VOCAB, cases, trees_for
from table_cases import Case, controls, node_distributions, rule

NAMES = VERIFIERS.names()
CASE = Case.of(hashed(VOCAB, 1), hashed(VOCAB, 2))


def verify(verifier: Verifier, case: Case, tree: TokenTree, *, seed: int = 0, temperature: float = 1.0) -> Verdict:
    distributions = node_distributions(case, tree, controls(case.vocab_size, seed=seed, temperature=temperature))
    return verifier.verify(tree, distributions, NoiseSource(Noise(seed).stream("verify")))


@pytest.mark.parametrize("name", NAMES)
def test_rule_declares_what_it_needs(name: str) -> None:
    cls = VERIFIERS.find(name)
    assert cls.accepts
    assert not (cls.shares_noise and cls.needs_distributions)
    assert not (cls.needs_distributions and Draw.FREE in cls.accepts)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), seed=st.integers(0, 50), temperature=st.sampled_from([0.0, 0.5, 1.0]), data=st.data())
def test_verdict_is_a_root_path_and_a_token(
    name: str, case: Case, seed: int, temperature: float, data: st.DataObject
) -> None:
    verifier = rule(name)
    tree = data.draw(trees_for(verifier))
    verdict = verify(verifier, case, tree, seed=seed, temperature=temperature)
    parent = ROOT
    for node in verdict.path:
        assert type(node) is int
        assert tree.parents[node] == parent
        parent = node
    assert type(verdict.bonus) is int
    assert 0 <= verdict.bonus < case.vocab_size
    assert verdict == verify(verifier, case, tree, seed=seed, temperature=temperature)


@pytest.mark.parametrize("name", NAMES)
def test_empty_tree_gives_an_empty_path(name: str) -> None:
    verifier = rule(name)
    for draw in verifier.accepts:
        for tree in (
            EMPTY,
            TokenTree((), (), draw=draw),
            TokenTree((), (), draw=draw, distributions=torch.empty(0, VOCAB)),
        ):
            assert verify(verifier, CASE, tree).path == ()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_draw_ends_the_verification_and_does_not_move_the_path(name: str, data: st.DataObject) -> None:
    """What the enumeration of the exact tests builds on."""
    verifier = rule(name)
    tree = data.draw(trees_for(verifier))
    distributions = node_distributions(CASE, tree)

    class LastToken(ScriptedChance):
        def draw(self, weights: torch.Tensor) -> int:
            super().draw(weights)
            return self.last_draw[-1][0]

    script = data.draw(st.lists(st.integers(0, 1), max_size=8))
    first, last = ScriptedChance(script), LastToken(script)
    one, other = verifier.verify(tree, distributions, first), verifier.verify(tree, distributions, last)
    assert one.path == other.path
    if first.last_draw:
        assert (one.bonus, other.bonus) == (first.last_draw[0][0], first.last_draw[-1][0])


@pytest.mark.parametrize("name", [name for name in NAMES if VERIFIERS.find(name).chains_only])
def test_branches_are_refused_by_rules_for_chains(name: str) -> None:
    distribution = torch.full((2, VOCAB), 1 / VOCAB)
    with pytest.raises(ConfigurationError, match=f"'{name}' accepts chains only"):
        verify(rule(name), CASE, TokenTree((1, 2), (ROOT, ROOT), draw=Draw.IID, distributions=distribution))


@pytest.mark.parametrize("name", [name for name in NAMES if VERIFIERS.find(name).needs_distributions])
def test_missing_distributions_are_refused_where_they_are_needed(name: str) -> None:
    with pytest.raises(ConfigurationError, match="has no draft distributions"):
        verify(rule(name), CASE, chain([1], draw=Draw.IID))


@pytest.mark.parametrize("name", [name for name in NAMES if not VERIFIERS.find(name).needs_distributions])
def test_trees_without_distributions_are_accepted_if_none_are_needed(name: str) -> None:
    assert verify(rule(name), CASE, TokenTree((1, 2, 3, 4, 0), (ROOT,) * 5, draw=Draw.FREE)).bonus >= 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distributions_of_the_tree_are_not_written_to(name: str, dtype: torch.dtype) -> None:
    distributions = torch.softmax(torch.arange(10.0, dtype=dtype).reshape(2, 5), dim=-1)
    before = distributions.clone()
    for seed in range(10):
        verify(rule(name), CASE, chain([1, 4], draw=Draw.IID, distributions=distributions), seed=seed)
    assert torch.equal(distributions, before)


@pytest.mark.parametrize("name", NAMES)
def test_float32_and_bfloat16_distributions_are_taken(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        distributions = torch.softmax(torch.arange(10.0).reshape(2, 5), dim=-1).to(dtype)
        assert len(verify(rule(name), CASE, chain([4, 4], draw=Draw.IID, distributions=distributions)).path) <= 2
