"""Parameters of a beam search: presets, checks and conflicts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from beam_oracles import search
from draftree.beam.params import PRESETS, BeamSearchParams
from draftree.beam.trie import TokenTrie
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.models.table import TableLM, hashed, listed


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("beam_width", {"beam_width": 0}),
        ("num_return_sequences", {"beam_width": 2, "num_return_sequences": 3}),
        ("early_stopping", {"early_stopping": "always"}),
        ("early_stopping", {"early_stopping": 1}),
        ("patience", {"patience": 2.0}),
        ("eos_rule", {"eos_rule": "first"}),
        ("unk_penalty", {"unk_penalty": 1.0}),
        ("min_new_tokens", {"min_new_tokens": 5, "max_new_tokens": 4}),
        ("num_beam_groups", {"beam_width": 4, "num_beam_groups": 3}),
        ("diversity_penalty", {"diversity_penalty": 1.0}),
        ("diversity_discount", {"num_beam_groups": 2, "diversity_discount": 0.5}),
        ("top_k", {"top_k": 5}),
        ("top_p", {"top_p": 0.5}),
        ("num_beam_groups", {"num_beam_groups": 2, "sampling": "beam"}),
        ("sibling_penalty", {"sibling_penalty": 1.0, "force_words_ids": [[1]]}),
        ("sampling", {"sampling": "beam", "force_words_ids": [[1]]}),
        ("allowed_trie", {"allowed_trie": TokenTrie([[1]]), "prefix_allowed_tokens_fn": lambda *_: [1]}),
        ("ordered", {"ordered": True}),
        ("strict", {"strict": True}),
        ("count_prefix", {"count_prefix": False}),
        ("length_bounds", {"match_source_len": True, "length_bounds": (0, 0, 1, 0)}),
        ("length_bounds", {"length_bounds": (0, 1, 2)}),
        ("force_words_ids", {"force_words_ids": [[]]}),
        ("force_words_ids", {"force_words_ids": "word"}),
        ("suppress_tokens", {"suppress_tokens": [-1]}),
        ("num_beams", {"num_beams": 4}),
    ],
)
def test_refusals_name_the_parameter(param: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("force_eos", {"force_eos": "model_score"}),
        ("stop", {"stop": "x"}),
        ("prefix_token_ids", {"prefix_token_ids": [1, 2, 3], "max_new_tokens": 2}),
        ("prefix_token_ids", {"prefix_token_ids": [9]}),
        ("prefix_token_ids", {"prefix_token_ids": [2, 1], "stop_token_ids": [2]}),
        ("unk_token_id", {"unk_token_id": 9, "unk_penalty": 1.0}),
        ("min_new_tokens", {"length_bounds": (0, 9, 0, 3)}),
        ("force_words_ids", {"force_words_ids": [[1, 2]], "stop_token_ids": [2]}),
        ("force_words_ids", {"force_words_ids": [[9]]}),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(param: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        search(TableLM(hashed(5, 0)), [1], **given)
    assert caught.value.param == param


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_changed(name: str) -> None:
    assert BeamSearchParams.preset(name, beam_width=7).beam_width == 7


def test_unknown_preset() -> None:
    with pytest.raises(InvalidRequestError, match="fairseq"):
        BeamSearchParams.preset("marian")


def test_empty_trie() -> None:
    for sequences in ([], [[]], [[-1]]):
        with pytest.raises(ConfigurationError):
            TokenTrie(sequences)


# Two texts end at step 2; longer ones have a better score only if the penalty is large.
EARLY = listed(
    {(3,): [0.0, 0.5, 0.5, 0.0], (3, 1): [0.9, 0.05, 0.05, 0.0], (3, 2): [0.8, 0.1, 0.1, 0.0]}, [0.97, 0.01, 0.01, 0.01]
)


@pytest.mark.parametrize(("penalty", "longest"), [(0.0, 2), (1.0, 2), (8.0, 4)])
def test_penalty_favours_long_texts_if_the_search_goes_on(penalty: float, longest: int) -> None:
    given = {"beam_width": 2, "num_return_sequences": 2, "max_new_tokens": 4, "length_penalty": penalty}
    patient = search(TableLM(EARLY), [3], ends=[0], early_stopping="never", **given)
    assert len(patient.best.tokens) == longest
    first = search(TableLM(EARLY), [3], ends=[0], early_stopping="fcfs", **given)
    assert [found.tokens for found in first.hypotheses] == [(1, 0), (2, 0)]


def test_patience_collects_more() -> None:
    given = {"beam_width": 2, "num_return_sequences": 2, "max_new_tokens": 6, "length_penalty": 8.0}
    found = search(TableLM(EARLY), [3], ends=[0], early_stopping="fcfs", patience=2.0, **given)
    assert len(found.best.tokens) == 3


def test_forced_end() -> None:
    table = hashed(6, 1)
    for rule, added in (("model_score", None), ("zero_score", 0.0)):
        result = search(TableLM(table), [1], ends=[0], beam_width=2, max_new_tokens=3, min_new_tokens=2, force_eos=rule)
        assert result.best.tokens[-1] == 0
        assert result.best.finish_reason == "stop"
        last = result.best.token_logprobs[-1]
        assert last == added if added is not None else last < 0


def test_forced_prefix_counts_or_not() -> None:
    table = hashed(6, 1)
    counted = search(TableLM(table), [1], beam_width=2, max_new_tokens=5, prefix_token_ids=[4, 4])
    free = search(TableLM(table), [1], beam_width=2, max_new_tokens=5, prefix_token_ids=[4, 4], count_prefix=False)
    assert counted.best.tokens == free.best.tokens
    assert counted.best.tokens[:2] == (4, 4)
    assert free.best.token_logprobs[:2] == (0.0, 0.0)
    assert counted.best.token_logprobs[0] < 0


def test_prefix_that_ends_with_the_end_is_the_whole_text() -> None:
    result = search(TableLM(hashed(6, 1)), [1], ends=[0], beam_width=3, prefix_token_ids=[4, 0])
    assert [found.tokens for found in result.hypotheses] == [(4, 0)]


def test_unknown_token_is_penalised() -> None:
    table = listed({}, [0.1, 0.5, 0.4])
    plain = search(TableLM(table), [1], beam_width=1, max_new_tokens=3)
    penalised = search(TableLM(table), [1], beam_width=1, max_new_tokens=3, unk_token_id=1, unk_penalty=1.0)
    assert plain.best.tokens == (1, 1, 1)
    assert penalised.best.tokens == (2, 2, 2)


def test_limits_by_the_length_of_the_prompt() -> None:
    model = TableLM(hashed(6, 1, scale=0.2))
    longer = search(model, [1] * 4, beam_width=2, max_new_tokens=2, max_len_ratio=1.5)
    assert len(longer.best.tokens) == 8
    matched = search(model, [1] * 4, ends=[0], beam_width=2, match_source_len=True, min_new_tokens=4)
    assert len(matched.best.tokens) == 5
    bounded = search(model, [1] * 4, ends=[0], beam_width=4, num_return_sequences=4, length_bounds=(0.5, 1, 1, 1))
    assert all(4 <= len(found.tokens) <= 6 for found in bounded.hypotheses)


def test_no_repeated_runs_by_scope() -> None:
    model = TableLM(hashed(5, 1, scale=0.2))
    prompt = [1, 2, 3, 4, 1]
    for scope in ("all", "generated"):
        result = search(
            model,
            prompt,
            beam_width=3,
            num_return_sequences=3,
            max_new_tokens=12,
            no_repeat_ngram_size=2,
            ngram_scope=scope,
        )
        for found in result.hypotheses:
            tokens = [*(prompt if scope == "all" else ()), *found.tokens]
            pairs = list(itertools.pairwise(tokens))
            assert len(set(pairs)) == len(pairs)


def test_vllm_counts_the_prompt_and_finishes_every_end() -> None:
    table = hashed(7, 3)
    params = {"beam_width": 2, "max_new_tokens": 5, "length_penalty": 2.0}
    result = search(TableLM(table), [1, 2, 3], ends=[0], **{**PRESETS["vllm"], "num_return_sequences": 2, **params})
    for found in result.hypotheses:
        length = 3 + len(found.tokens) - (found.tokens[-1] == 0)
        assert found.score == pytest.approx(found.cumulative_logprob / length**2)
