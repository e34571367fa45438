"""Several drafters in one engine: which can be loaded and chosen, and what is reported of the chosen one."""

from __future__ import annotations

from typing import Any

import pytest

from choice_samples import CHOICES, DRAFTS, PROMPTS, TOKENIZER, given, model, opened, replace_loading
from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.verifiers.base import Promise


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the draft models that were loaded."""
    return replace_loading(monkeypatch)


def test_a_draft_model_of_several_choices_is_loaded_once(loads: list[str]) -> None:
    opened()
    assert loads == ["small"]


def test_statistics_are_those_of_the_chosen_drafter() -> None:
    llm = opened()
    for choice in CHOICES:
        (done,) = llm.generate([PROMPTS[0]], given(choice, 0), draft=choice)
        sources = {"ngram,min=1+suffix": {"ngram,min=1", "suffix"}, DRAFTS[5]: {"prediction", "model:small,k=2"}}
        assert set(done.stats.drafted_by_source) <= sources.get(choice or "", set(done.stats.drafted_by_source))
        assert bool(done.stats.drafted_by_source) >= (choice in sources)
        assert done.stats.draft_tokens == sum(done.stats.drafted_by_depth)
        assert (done.stats.rounds < len(done.token_ids)) is (choice != "none")


def test_reasons_are_those_of_the_chosen_drafters_planner() -> None:
    llm = LLM(model(), ("ngram,min=1", "model:small,k=3"), tokenizer=TOKENIZER)
    first, second, none = (
        llm.generate([PROMPTS[0]], given(None, 1), draft=choice)[0].stats.explain
        for choice in (None, "model:small,k=3", "none")
    )
    assert first
    assert second
    assert first != second
    assert none == ""
    reason = llm.engine.parts.planner.explain()
    assert "ngram,min=1: " in reason
    assert "; model:small,k=3: " in reason


@pytest.mark.parametrize(
    ("drafts", "choice", "message"),
    [
        (DRAFTS[:2], "sufix", "'ngram,min=1' or 'model:small,k=3' or 'none'"),
        (DRAFTS[:2], 3, "draft is 3"),
        (None, "ngram", "give 'none'"),
        ("ngram", "suffix", "give 'ngram' or 'none'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_loaded_ones(drafts: Any, choice: Any, message: str) -> None:
    llm = opened(drafts, plan=None)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        llm.generate([[1]], draft=choice)
    assert refused.value.param == "draft"


def test_plain_decoding_can_be_chosen_beside_one_drafter_and_is_the_default_where_it_comes_first() -> None:
    for llm, choice in ((opened("ngram,min=1"), "none"), (opened(("none", "ngram,min=1")), None)):
        (done,) = llm.generate([PROMPTS[0]], given(None, 1), draft=choice)
        assert not done.stats.draft_tokens
        (drafted,) = llm.generate([PROMPTS[0]], given(None, 1), draft="ngram,min=1")
        assert drafted.stats.draft_tokens
        assert done.token_ids == drafted.token_ids
    assert llm.drafts == ("none", "ngram,min=1")
    assert opened(DRAFTS[:2]).drafts == DRAFTS[:2]
    assert opened(None, plan=None).drafts == opened("none", plan=None).drafts == ()
    assert opened(None, plan=None).generate([[1]], draft="none")


def test_a_prediction_needs_a_choice_that_reads_it() -> None:
    llm = opened(("ngram,min=1", "prediction"))
    params = SamplingParams(prediction=[1, 2], max_tokens=4)
    assert llm.generate([[1]], params, draft="prediction")
    for choice in (None, "none"):
        with pytest.raises(InvalidRequestError, match="a prediction was given") as refused:
            llm.generate([[1]], params, draft=choice)
        assert refused.value.param == "prediction"


@pytest.mark.parametrize(
    ("drafts", "options", "message"),
    [
        ((), {}, "at least one name"),
        (("ngram", 3), {}, "at least one name"),
        (("ngram", "ngram"), {}, "'ngram' twice"),
        (("ngram", "model:small,tree=1-2-2"), {"verify": "token"}, "free draws"),
        (("ngram", "nonesuch"), {}, "unknown drafter"),
    ],
)
def test_drafters_that_cannot_be_loaded_side_by_side_are_refused_first(
    drafts: Any, options: dict[str, Any], message: str, loads: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(drafts, **options)
    assert not loads


def test_a_lossy_rule_is_lossy_for_choices_that_draft() -> None:
    llm = opened(("ngram,min=1", "model:small,k=3"), verify="typical")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4)
    promises = [llm.generate([[1]], params, draft=choice)[0].stats.promise for choice in (None, "none")]
    assert promises == [Promise.LOSSY, Promise.SAME_TEXT]
