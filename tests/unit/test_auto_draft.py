"""`draft="auto"`: its spelling, the order of drafters, and what is left out with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_samples import save_tiny_model
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.build import decide
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.dropin.inputs import Drafting
from draftree.lab.bench.methods import our_methods
from draftree.loading.auto_draft import AutoCandidate
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("model"), chat=False)
    return load_model(folder, dtype="float32", kernels="torch")


@pytest.mark.parametrize("draft", ["auto+ngram", "ngram+auto", "auto,k=4", "auto:4"])
def test_auto_stands_alone(loaded: LoadedModel, draft: str) -> None:
    with pytest.raises(ConfigurationError, match="'auto' stands alone"):
        LLM(loaded, draft)


def test_it_is_one_of_several_drafters_and_can_be_chosen_by_a_request(loaded: LoadedModel) -> None:
    llm = LLM(loaded, ["ngram", "auto"])
    assert llm.drafts == ("ngram", "suffix")
    plain = LLM(loaded, "none").generate("ab", GREEDY)[0].token_ids
    for draft in ("auto", "suffix", "ngram", None):
        assert llm.generate("ab", GREEDY, draft=draft)[0].token_ids == plain
    assert llm.requests.named_draft("auto") == "suffix"
    with pytest.raises(InvalidRequestError, match="not loaded: give 'ngram' or 'none'"):
        LLM(loaded, "ngram").generate("ab", GREEDY, draft="auto")


def test_it_is_the_default_and_none_is_plain_decoding(loaded: LoadedModel) -> None:
    assert LLM(loaded).drafts == AsyncLLM(loaded).llm.drafts == ("suffix",)
    assert LLM(loaded, None).drafts == LLM(loaded, "none").drafts == ()


def test_the_same_drafter_twice_is_one(loaded: LoadedModel) -> None:
    assert LLM(loaded, ["auto", "suffix"]).drafts == ("suffix",)


def test_a_verifier_of_chains_gets_a_chain(loaded: LoadedModel) -> None:
    assert LLM(loaded, "auto", verify="token").drafts == ("suffix,width=1",)


def test_a_verifier_without_a_drafter_decodes_plainly_with_the_reason(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = [AutoCandidate("suffix", None, "needs no training")]
    monkeypatch.setattr("draftree.build.auto_candidates", lambda target: (only, []))
    llm = LLM(loaded, "auto", verify="token")
    assert llm.drafts == ()
    assert "draft auto: plain decoding (" in llm.draft_note
    assert "'suffix' cannot be used: " in llm.draft_note
    with pytest.raises(ConfigurationError, match="draft 'auto' finds no drafter for planner 'fixed'"):
        LLM(loaded, "auto", verify="token", plan="fixed")


@pytest.mark.parametrize(("verify", "plan"), [("tokn", None), ("coupled", "fixd"), ("token", "fixd")])
def test_wrong_names_are_refused_before_the_model_is_loaded(verify: str, plan: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r"tokn|fixd"):
        LLM("/nowhere", "auto", verify=verify, plan=plan)


def test_a_target_without_trees_gets_a_chain(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.model, "supports_trees", False)
    choice = decide(loaded, "coupled", None)
    assert choice.draft == "suffix,width=1"
    assert "'suffix' cannot be used: " in choice.note
    assert "scores chains only" in choice.note


def test_generate_of_transformers_takes_it(loaded: LoadedModel) -> None:
    assert Drafting("auto", None).decided(loaded) == Drafting("suffix", None)
    assert Drafting("ngram", "fixed").decided(loaded) == Drafting("ngram", "fixed")


def test_a_benchmark_names_what_it_measures() -> None:
    for spec in ("auto", "auto@fixed"):
        with pytest.raises(ConfigurationError, match="a benchmark names what it measures"):
            our_methods([spec])
