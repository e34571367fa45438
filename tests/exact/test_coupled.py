"""`coupled` and `match` write plain decoding's text for the same seed, for every drafted tree.

That is an equality, not a distribution; the distribution is plain decoding's, and is tested for it alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.noise import Noise
from draftree.core.tree import Draw, TokenTree
from draftree.models.table import hashed, near
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.verifiers.base import NoiseSource
from sampled_trees import chi_square, plain_text, shared_noise_tree
from strategies import cases, trees_for
from table_cases import Case, controls, joint, node_distributions, rule

CHANCE = NoiseSource(Noise(0))


def text_of(name: str, case: Case, tree: TokenTree, *, seed: int, temperature: float = 1.0) -> tuple[int, ...]:
    distributions = node_distributions(case, tree, controls(case.vocab_size, seed=seed, temperature=temperature))
    verdict = rule(name).verify(tree, distributions, CHANCE)
    return (*(tree.tokens[node] for node in verdict.path), verdict.bonus)


@pytest.mark.parametrize("name", ["coupled", "match"])
@given(case=cases(), seed=st.integers(0, 50), temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]), data=st.data())
def test_any_tree_gives_plain_text(name: str, case: Case, seed: int, temperature: float, data: st.DataObject) -> None:
    tree = data.draw(trees_for(rule(name)))
    written = text_of(name, case, tree, seed=seed, temperature=temperature)
    plain = plain_text(case, controls(case.vocab_size, seed=seed, temperature=temperature), len(written))
    assert written == plain


@pytest.mark.parametrize("name", ["coupled", "match"])
@given(case=cases(), seed=st.integers(0, 50), data=st.data())
def test_the_longest_matching_path_is_kept(name: str, case: Case, seed: int, data: st.DataObject) -> None:
    tree = data.draw(trees_for(rule(name)))
    written = text_of(name, case, tree, seed=seed)
    plain = plain_text(case, controls(case.vocab_size, seed=seed), len(tree) + 1)
    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    assert len(written) - 1 == max((len(path) for path in paths if path == plain[: len(path)]), default=0)


@pytest.mark.parametrize("draw", [Draw.IID, Draw.WITHOUT_REPLACEMENT])
def test_trees_ranked_by_the_requests_own_noise_give_plain_text(draw: Draw) -> None:
    case = CASE
    accepted = 0
    for seed in range(150):
        chosen = controls(3, seed=seed)
        tree = shared_noise_tree(case, chosen, (2, 2), draw)
        verdict = rule("coupled").verify(tree, node_distributions(case, tree, chosen), CHANCE)
        written = (*(tree.tokens[node] for node in verdict.path), verdict.bonus)
        assert written == plain_text(case, chosen, len(written))
        accepted += len(verdict.path)
    assert accepted > 150


ROUNDS = 20_000
LEVEL = 1e-4
TARGET = hashed(3, seed=1)
CASE = Case.of(TARGET, near(TARGET, seed=101, distance=1.0))


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    """How often each plain text of three tokens is written, a seed each."""
    chosen = [controls(3, seed=seed) for seed in range(ROUNDS)]
    texts: list[tuple[int, ...]] = [()] * ROUNDS
    for _ in range(3):
        logits = torch.stack([CASE.target.logits((*CASE.prompt, *text)) for text in texts])
        histories = [History((*CASE.prompt, *text)) for text in texts]
        rows = [DistributionRows(history, one, [()]) for history, one in zip(histories, chosen, strict=True)]
        picks = Distributions(TensorLogits(logits), rows).picks()
        texts = [(*text, pick) for text, pick in zip(texts, picks, strict=True)]
    counted = np.zeros((3, 3, 3))
    np.add.at(counted, tuple(np.array(texts).T), 1)
    return counted


def test_distribution_of_the_text_is_the_targets(counts: np.ndarray) -> None:
    """Pearson's test at level 1e-4 over 27 texts; finds a chi-square distance of 0.004 with probability 0.99."""
    assert chi_square(counts.reshape(1, -1), joint(CASE, 3).reshape(1, -1))[1] > LEVEL


def test_distribution_of_a_slightly_colder_text_is_rejected(counts: np.ndarray) -> None:
    """The biased variant: the same counts against the distribution at temperature 0.9."""
    colder = np.power(joint(CASE, 3), 1 / 0.9)
    assert chi_square(counts.reshape(1, -1), (colder / colder.sum()).reshape(1, -1))[1] < LEVEL
