"""Alignments and the coverage penalty of beam search: equal to the cross-attentions that transformers returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftree import LLM, BeamSearchParams
from draftree.core.errors import InvalidRequestError
from draftree.models.table import TableLM, hashed
from seq2seq_samples import sample, sources

GIVEN: dict[str, Any] = {"beam_width": 4, "num_return_sequences": 4, "max_new_tokens": 12}


def prompt_of(name: str) -> Any:
    if name == "whisper":
        return np.random.default_rng(4).normal(size=(4, 100)).astype(np.float32)
    return sources(3)[2]


def expected(name: str, prompt: Any, tokens: tuple[int, ...]) -> np.ndarray:
    """Weights of the last cross-attention, mean over heads, shape (tokens, source length), by transformers."""
    model = sample(name)
    model.set_attn_implementation("eager")
    key = "input_features" if name == "whisper" else "input_ids"
    given = {key: torch.as_tensor(prompt)[None], "output_attentions": True, "use_cache": False}
    start = model.generation_config.decoder_start_token_id
    with torch.inference_mode():
        output = model(**given, decoder_input_ids=torch.tensor([[start, *tokens[:-1]]]))
    found: np.ndarray = output.cross_attentions[-1][0].mean(dim=0).numpy()
    return found


@pytest.mark.parametrize("draft", [None, "suffix,min=1+runners-up"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
def test_weights_equal_those_of_transformers(name: str, draft: str | None) -> None:
    llm, prompt = LLM(sample(name)), prompt_of(name)
    (result,) = llm.beam_search([prompt], BeamSearchParams(return_attention=True, **GIVEN), draft=draft)
    for found in result.hypotheses:
        wanted = expected(name, prompt, found.tokens)
        assert np.array(found.attention) == pytest.approx(wanted, abs=1e-4)
        assert found.alignment is not None
        for row, place in zip(wanted, found.alignment, strict=True):
            assert row[place] == pytest.approx(row.max(), abs=1e-4)
    (plain,) = llm.beam_search([prompt], BeamSearchParams(**GIVEN))
    assert [one.tokens for one in plain.hypotheses] == [one.tokens for one in result.hypotheses]
    assert plain.best.attention is None
    assert plain.best.alignment is None


@pytest.mark.parametrize("draft", [None, "suffix,min=1"])
def test_the_coverage_penalty_lowers_scores_of_texts_that_leave_source_tokens_out(draft: str | None) -> None:
    llm, prompts, beta = LLM(sample("bart")), sources(4)[1:], 0.7
    params = BeamSearchParams(coverage_penalty=beta, length_penalty=0.6, **GIVEN)
    differ = 0
    for prompt, result in zip(prompts, llm.beam_search(prompts, params, draft=draft), strict=True):
        (plain,) = llm.beam_search([prompt], BeamSearchParams(length_penalty=0.6, **GIVEN))
        scores = []
        for found in result.hypotheses:
            total = expected("bart", prompt, found.tokens).sum(axis=0)
            penalty = beta * np.log(np.minimum(total, 1.0)).sum()
            assert penalty < 0
            assert found.score == pytest.approx(found.cumulative_logprob / len(found.tokens) ** 0.6 + penalty, abs=1e-3)
            scores.append(found.score)
        assert scores == sorted(scores, reverse=True)
        differ += [one.tokens for one in plain.hypotheses] != [one.tokens for one in result.hypotheses]
    assert differ, "the penalty changes an order"


def test_batches_of_different_sources_have_their_own_weights() -> None:
    llm, prompts = LLM(sample("marian")), sources(4)
    params = BeamSearchParams(return_attention=True, beam_width=3, max_new_tokens=8)
    for prompt, result in zip(prompts, llm.beam_search(prompts, params), strict=True):
        wanted = expected("marian", prompt, result.best.tokens)
        assert np.array(result.best.attention) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("given", [{"coverage_penalty": 0.5}, {"return_attention": True}])
def test_causal_models_have_no_cross_attention(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cross-attention") as caught:
        LLM(TableLM(hashed(5, 0))).beam_search([1], BeamSearchParams(**given))
    assert caught.value.param in given
    with pytest.raises(InvalidRequestError, match="coverage_penalty"):
        BeamSearchParams(coverage_penalty=-1.0)
