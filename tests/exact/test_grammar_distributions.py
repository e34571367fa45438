"""Under a grammar lossless rules write the target's distribution without the forbidden tokens, for every draft.

The grammar is a list of texts, and the allowed tokens are counted from that list, not taken from the grammar.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.node_map import prune
from draftree.core.noise import Noise
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.engine.forced_tokens import ForcedTokens
from draftree.models.table import Table, TableLM, hashed
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.grammar.compiler import Grammars
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from draftree.verifiers.base import NoiseSource
from oracle import ChancePicks, trees, written
from table_cases import PROMPT, Case, joint, node_distributions, rule, variation

END, A, B, AB = range(4)
SPELLED = {A: "a", B: "b", AB: "ab"}
TEXTS = ("a", "ab", "abba", "bb", "bbab", "babb")
LENGTH = 3
CHANCE = NoiseSource(Noise(0))
GRAMMARS = Grammars([None, b"a", b"b", b"ab"], vocab_size=4)
EBNF = "root ::= " + " | ".join(f'"{text}"' for text in TEXTS)


def masked(inner: Table) -> Table:
    """The same distribution over the allowed tokens; after the end and off the grammar unchanged."""

    def logits(context: tuple[int, ...]) -> Tensor:
        tokens = context[len(PROMPT) :]
        row = inner(context).clone()
        if END in tokens:
            return row
        text = "".join(SPELLED[token] for token in tokens)
        if not any(whole.startswith(text) for whole in TEXTS):
            return row
        for token, spelled in SPELLED.items():
            if not any(whole.startswith(text + spelled) for whole in TEXTS):
                row[token] = -math.inf
        if text not in TEXTS:
            row[END] = -math.inf
        return row

    return logits


def chosen(seed: int = 0, temperature: float = 1.0) -> Controls:
    params = SamplingParams(grammar=EBNF, temperature=temperature)
    return build_controls(params, vocab_size=4, eos_ids=[END], grammars=lambda: GRAMMARS, seed=seed)


def fitted(tree: TokenTree, draw: Draw, *, may_branch: bool = True) -> TokenTree:
    guide = chosen().guide
    assert guide is not None
    forced = ForcedTokens(guide, History(PROMPT))
    forced.begin(9)
    return forced.fit(tree, 9, name="given", draw=draw, may_branch=may_branch, vocab_size=4)


TABLE = hashed(4, seed=3)
CASE = Case.of(masked(TABLE), hashed(4, seed=8))
"""The drafter ignores the grammar: it draws forbidden tokens."""
UNMASKED = TableLM(TABLE, order=16)


def test_the_distributions_of_a_tree_are_the_counted_ones() -> None:
    for tree, _ in trees(Case(UNMASKED, CASE.drafter), (1, 1, 1), Draw.IID):
        ruled = node_distributions(Case(UNMASKED, CASE.drafter), tree, chosen())
        assert torch.allclose(ruled.probs(), node_distributions(CASE, tree).probs(), rtol=0, atol=1e-12)


RULES = [
    ("token", (1, 1, 1), Draw.IID),
    ("block", (1, 1, 1), Draw.IID),
    ("multistep", (2, 1), Draw.IID),
    ("recursive", (2, 2), Draw.WITHOUT_REPLACEMENT),
    ("traversal", (2, 2), Draw.WITHOUT_REPLACEMENT),
    ("traversal", (2, 1), Draw.IID),
]


@pytest.mark.parametrize(("name", "shape", "draw"), RULES)
def test_rules_with_draft_distributions_write_the_masked_distribution(
    name: str, shape: tuple[int, ...], draw: Draw
) -> None:
    single = rule(name).chains_only
    drafts = [(fitted(tree, draw, may_branch=not single), weight) for tree, weight in trees(CASE, shape, draw)]
    found = written(CASE, drafts, rule(name).verify, length=LENGTH)
    assert variation(found.distribution, joint(CASE, LENGTH)) < 1e-12
    assert any(len(tree) > sum(math.prod(shape[: n + 1]) for n in range(len(shape))) for tree, _ in drafts)


def test_a_draw_that_is_taken_out_would_bias_the_distribution() -> None:
    """The variant that must fail: forbidden draws of a distribution are pruned as free children are."""
    drafts = []
    for tree, weight in trees(CASE, (1, 1, 1), Draw.IID):
        kept = len(fitted(TokenTree(tree.tokens, tree.parents, draw=Draw.POINT), Draw.POINT, may_branch=False).tokens)
        good = next((n for n in range(3) if tree.tokens[: n + 1] != _walkable(tree.tokens[: n + 1])), 3)
        assert kept >= good
        drafts.append((prune(tree, range(good)), weight))
    found = written(CASE, drafts, rule("token").verify, length=LENGTH)
    assert variation(found.distribution, joint(CASE, LENGTH)) > 0.01


def _walkable(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens up to the first that the texts do not allow."""
    for place, token in enumerate(tokens):
        if CASE.target_distribution(tokens[:place])[token] == 0 or END in tokens[:place]:
            return tokens[:place]
    return tokens


@pytest.mark.parametrize("name", ["token", "block", "coupled", "match", "multistep", "recursive", "traversal"])
def test_point_draws_that_are_forbidden_may_be_taken_out(name: str) -> None:
    """All chains of two tokens, each chosen with certainty, and the empty one."""
    chains = [TokenTree((x, y), (-1, 0), draw=Draw.POINT) for x in range(4) for y in range(4)]
    for tree in [*chains, EMPTY]:
        drafts = [(fitted(tree, Draw.POINT, may_branch=False), 1.0)]
        verify = rule(name).verify
        if name in ("coupled", "match"):

            def verify(tree: TokenTree, distributions: Any, chance: Any) -> Verdict:
                return rule(name).verify(tree, ChancePicks(CASE, tree, chance), chance)

        found = written(CASE, drafts, verify, length=LENGTH)
        assert variation(found.distribution, joint(CASE, LENGTH)) < 1e-12
        assert all(tree.draw is Draw.POINT for tree, _ in drafts)


def plain_text(seed: int, temperature: float) -> list[int]:
    history, ruled = History(PROMPT), chosen(seed, temperature)
    while END not in history.output:
        logits = UNMASKED.logits(tuple(history.tokens.tolist()))[None]
        history.append(Distributions(TensorLogits(logits), [DistributionRows(history, ruled, [()])]).picks())
    found: list[int] = history.output.tolist()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_free_tree_gives_plain_text_for_the_same_seed(temperature: float) -> None:
    case = Case(UNMASKED, CASE.drafter)
    drafted = [TokenTree(tree.tokens, tree.parents) for tree, _ in trees(case, (2, 1), Draw.IID)]
    accepted = 0
    for seed in range(20):
        plain = plain_text(seed, temperature)
        assert "".join(SPELLED[token] for token in plain[:-1]) in TEXTS
        for tree in drafted[seed::20]:
            tree = fitted(tree, Draw.FREE)
            verdict = rule("coupled").verify(tree, node_distributions(case, tree, chosen(seed, temperature)), CHANCE)
            text = [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
            until = text.index(END) + 1 if END in text else len(text)
            assert text[:until] == plain[:until]
            accepted += len(verdict.path)
    assert accepted > 40
