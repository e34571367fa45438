"""Several models in one search: ensembles, shallow fusion, and soft prefixes."""

from __future__ import annotations

import math

import pytest

from beam_oracles import logprobs, search
from draftree.beam import forest
from draftree.core.errors import InvalidRequestError
from draftree.models.table import Table, TableLM, hashed, listed

PROMPT = [1, 3]
GIVEN = {"beam_width": 4, "num_return_sequences": 4, "max_new_tokens": 8}


def mixture(*tables: Table) -> Table:
    return lambda context: sum(table(context).softmax(dim=-1) for table in tables).log()  # type: ignore[union-attr]


def product(table: Table, other: Table, weight: float) -> Table:
    """Not normalised: a table model of it would divide by a constant of each row."""
    return lambda context: table(context).log_softmax(dim=-1) + weight * other(context).log_softmax(dim=-1)


def test_an_ensemble_is_the_mixture() -> None:
    one, two, three = (hashed(7, seed) for seed in range(3))
    models = [TableLM(two), TableLM(three, supports_trees=False)]
    found = search(TableLM(one), PROMPT, ends=[0], models=models, **GIVEN)
    expected = search(TableLM(mixture(one, two, three)), PROMPT, ends=[0], **GIVEN)
    assert [text.tokens for text in found.hypotheses] == [text.tokens for text in expected.hypotheses]
    assert [text.score for text in found.hypotheses] == pytest.approx([text.score for text in expected.hypotheses])
    assert [model.num_open for model in models] == [0, 0]


def test_an_ensemble_of_equal_models_is_the_model() -> None:
    model = TableLM(hashed(7, 1))
    alone = search(model, PROMPT, ends=[0], **GIVEN)
    for others in ([model], [model, TableLM(hashed(7, 1))]):
        found = search(model, PROMPT, ends=[0], models=others, **GIVEN)
        assert [text.tokens for text in found.hypotheses] == [text.tokens for text in alone.hypotheses]
        assert found.best.score == pytest.approx(alone.best.score)


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0, -0.3])
def test_fusion_adds_weighted_logprobs(weight: float) -> None:
    table, lm = hashed(7, 1), hashed(7, 2)
    found = search(TableLM(table), PROMPT, ends=[0], lm_model=TableLM(lm), lm_weight=weight, **GIVEN)
    for text in found.hypotheses:
        context, total = tuple(PROMPT), 0.0
        for token in text.tokens:
            total += logprobs(table, context)[token] + weight * logprobs(lm, context)[token]
            context = (*context, token)
        assert text.cumulative_logprob == pytest.approx(total)
    greedy = search(TableLM(table), PROMPT, beam_width=1, max_new_tokens=8, lm_model=TableLM(lm), lm_weight=weight)
    same = search(TableLM(product(table, lm, weight)), PROMPT, beam_width=1, max_new_tokens=8)
    assert greedy.best.tokens == same.best.tokens


def test_long_prompts_and_small_trees_with_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [token % 7 for token in range(30)]
    one, two = hashed(7, 4, scale=0.3), hashed(7, 5, scale=0.3)
    expected = search(TableLM(mixture(one, two)), prompt, ends=[0], **GIVEN)
    monkeypatch.setattr(forest, "CHUNK", 8)
    found = search(TableLM(one), prompt, ends=[0], models=[TableLM(two)], capacity=3, **GIVEN)
    assert [text.tokens for text in found.hypotheses] == [text.tokens for text in expected.hypotheses]


def test_other_vocabularies_are_refused() -> None:
    for name, value in (("models", [TableLM(hashed(6, 0))]), ("lm_model", TableLM(hashed(6, 0)))):
        with pytest.raises(InvalidRequestError, match="6 tokens") as caught:
            search(TableLM(hashed(7, 0)), PROMPT, **{name: value})
        assert caught.value.param == name
    for name, value in (("models", ["name"]), ("lm_model", "name"), ("models", "name")):
        with pytest.raises(InvalidRequestError):
            search(TableLM(hashed(7, 0)), PROMPT, **{name: value})
    with pytest.raises(InvalidRequestError, match="lm_model"):
        search(TableLM(hashed(7, 0)), PROMPT, lm_weight=0.5)


def test_a_soft_prefix_gets_its_share() -> None:
    table = listed({}, [0.1, 0.2, 0.7])
    found = search(
        TableLM(table),
        [1],
        beam_width=9,
        num_return_sequences=9,
        max_new_tokens=2,
        length_penalty=0.0,
        prefix_token_ids=[0, 1],
        prefix_bias_beta=0.4,
    )
    totals = {text.tokens: text.cumulative_logprob for text in found.hypotheses}
    first, second = 0.6 * 0.1 + 0.4, 0.6 * 0.2 + 0.4
    assert totals[0, 1] == pytest.approx(math.log(first * second))
    assert totals[2, 1] == pytest.approx(math.log(0.6 * 0.7 * 0.2))
    assert totals[0, 2] == pytest.approx(math.log(first * 0.6 * 0.7))
    assert math.fsum(map(math.exp, totals.values())) == pytest.approx(1.0)
