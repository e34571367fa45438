"""Ratio rules through the whole engine, under penalties and min-p, write texts with the distribution of plain decoding.

A drafter's model drafts, the engine scores, verifies and commits round after round, in batches of 32. 1000 texts of
three tokens over three, a seed each, are counted for every rule and temperature; the distribution that they are held
against is computed by hand, token by token, in numpy: repetition penalty, presence and frequency penalty, temperature,
min-p. Pearson's test at level 1e-4 over the texts that min-p leaves, 26 degrees of freedom at most: a chi-square
distance of 0.085 (a total variation of about 0.14) is found with probability 0.99, which a test computes. The smaller
errors are those of the rules, which `exact` detects; this detects errors between the rules and a request.
Twins of a rule, of the drafter and of the engine that each forget one thing must be found, among 500 or 600 texts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from biased_rules import bonus_from_the_target
from draftree.build import build_parts, choose_methods
from draftree.core.tree import TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import LoadedDraftModel
from draftree.engine import round
from draftree.engine.engine import Engine
from draftree.engine.parts import EngineParts
from draftree.engine.requests import SequenceFactory
from draftree.loading.loaded import LoadedModel
from draftree.models.table import TableLM, hashed, near
from draftree.sampling.distributions import DistributionRows
from draftree.sampling.params import SamplingParams
from draftree.verifiers import token as token_rule
from sampled_trees import chi_square

VOCAB, LENGTH, TEXTS = 3, 3, 1000
PROMPT = (0, 1, 1)
LEVEL, POWER, DISTANCE = 1e-4, 0.99, 0.085
TARGET = TableLM(hashed(VOCAB, seed=31), order=LENGTH + len(PROMPT))
DRAFTER = TableLM(near(hashed(VOCAB, seed=31), seed=32, distance=1.0), order=LENGTH + len(PROMPT))
TEMPERATURES = [0.5, 1.0, 1.7]
CONTROLS: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "min_p": 0.08,
}
RULES = {
    "token": "model:drafter,k=2",
    "block": "model:drafter,k=2",
    "multistep": "model:drafter,tree=iid-2-2",
    "recursive": "model:drafter,tree=wor-2-2",
    "traversal": "model:drafter,tree=wor-2-2",
    "traversal iid": "model:drafter,tree=iid-2-2",
}


def next_distribution(text: tuple[int, ...], temperature: float) -> np.ndarray:
    """The distribution of the next token, by the definitions of the controls."""
    logits = TARGET.logits(text).numpy().copy()
    output = list(text[len(PROMPT) :])
    for token in range(VOCAB):
        if token in text:
            penalty = CONTROLS["repetition_penalty"]
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
        count = output.count(token)
        logits[token] -= CONTROLS["frequency_penalty"] * count + CONTROLS["presence_penalty"] * (count > 0)
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < CONTROLS["min_p"]] = 0.0
    distribution: np.ndarray = weights / weights.sum()
    return distribution


@functools.cache
def text_distribution(temperature: float) -> np.ndarray:
    """The distribution of texts, shape (vocab,) * length."""
    distribution = np.zeros((VOCAB,) * LENGTH)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        steps = [next_distribution(PROMPT + text[:place], temperature)[token] for place, token in enumerate(text)]
        distribution[text] = math.prod(steps)
    return distribution


def parts_of(rule: str) -> EngineParts:
    """A target, a drafter that steps a model, and a rule, as an `LLM` puts them together."""
    methods = choose_methods(RULES[rule], rule.split()[0], None)
    drafter = LoadedDraftModel(DRAFTER, None, "drafter")
    return build_parts(
        methods, LoadedModel(TARGET, None, (), "target"), None,
        load_draft=lambda name: drafter,
    )  # fmt: skip


def p_value(parts: EngineParts, temperature: float, *, texts: int = TEXTS) -> float:
    engine = Engine(parts)
    params = SamplingParams(n=texts, max_tokens=LENGTH, temperature=temperature, seed=77, **CONTROLS)
    sequences = SequenceFactory(parts, None, eos_ids=(), slot_room=lambda: 100).sequences(PROMPT, params)
    engine.add(*sequences)
    while not engine.is_idle:
        engine.step()
    counts = np.zeros((VOCAB,) * LENGTH)
    for sequence in sequences:
        assert sequence.error is None
        counts[tuple(sequence.history.output.tolist())] += 1
    drafted = sum(sequence.counts.draft_tokens for sequence in sequences)
    assert drafted > texts
    assert 0 < sum(sequence.counts.accepted_tokens for sequence in sequences) < drafted
    distribution = text_distribution(temperature)
    if counts[distribution == 0].sum():
        return 0.0  # a text that min-p forbids
    return chi_square(counts.reshape(1, -1), distribution.reshape(1, -1))[1]


def test_the_power_is_as_stated_and_the_controls_act() -> None:
    freedom = VOCAB**LENGTH - 1
    found = stats.ncx2.sf(stats.chi2.isf(LEVEL, freedom), freedom, TEXTS * DISTANCE)
    assert found > POWER
    for temperature in TEMPERATURES:
        assert text_distribution(temperature).sum() == pytest.approx(1)
    assert (text_distribution(TEMPERATURES[0]) == 0).sum() >= 5


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_distribution_of_plain_decoding(rule: str, temperature: float) -> None:
    assert p_value(parts_of(rule), temperature) > LEVEL


def test_a_variant_of_token_that_draws_the_bonus_from_the_target_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: Any, *given: Any) -> Any:
        return bonus_from_the_target(*given)

    monkeypatch.setattr(token_rule.Token, "verify", verify)
    assert p_value(parts_of("token"), 1.0, texts=500) < LEVEL


@pytest.mark.parametrize("rule", RULES)
def test_a_variant_of_the_engine_without_ancestors_of_nodes_is_detected(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes are penalised for what is written, none for what is drafted before it."""

    def rows(turn: round.SequenceRound) -> DistributionRows:
        return DistributionRows(turn.sequence.history, turn.sequence.controls, [()] * (1 + len(turn.tree)))

    monkeypatch.setattr(round, "_rows", rows)
    assert p_value(parts_of(rule), 1.0, texts=500) < LEVEL


@pytest.mark.parametrize("rule", RULES)
def test_a_variant_of_the_drafter_with_uncontrolled_distributions_is_detected(rule: str) -> None:
    parts = parts_of(rule)
    drafter = parts.drafters[0].drafter
    draft = drafter.draft

    def claiming(states: Any, budgets: list[Budget]) -> list[TokenTree]:
        found = []
        for state, tree in zip(states, draft(states, budgets), strict=True):
            text = state.view.history.tokens.tolist()
            before = [text + [tree.tokens[n] for n in tree.path(parent)] for parent in tree.parents]
            distributions = [torch.softmax(DRAFTER.logits(context), dim=-1) for context in before]
            found.append(
                dataclasses.replace(
                    tree, distributions=torch.stack(distributions) if distributions else tree.distributions
                )
            )
        return found

    drafter.draft = claiming  # type: ignore[method-assign, assignment]
    assert p_value(parts, TEMPERATURES[-1], texts=600) < LEVEL
