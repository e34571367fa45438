"""Beam search of encoder-decoder models equals `generate(num_beams=…)`: tokens, scores and alignments in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

from draftree import LLM, BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import DecoderInput
from draftree.models.source import TokenSource
from draftree.models.table import TableLM, hashed
from seq2seq_samples import VOCAB, sample, sources
from translators import tokenizer, translator

PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
TEXTS = ("t5", "bart", "marian")
ALL = (*TEXTS, "whisper")
ENDS = (2, 3, 11, 12, 17, *range(30, 34), 45, 55)


def shared(name: str, **settings: Any) -> Any:
    """A model with several end tokens, and with texts that do not repeat a few tokens only."""
    model = sample(name)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.15)
    model.generation_config.update(eos_token_id=list(ENDS), pad_token_id=1, **settings)
    return model


def prompts_of(name: str, count: int) -> list[Any]:
    if name == "whisper":
        return list(np.random.default_rng(4).normal(size=(count, 4, 100)).astype(np.float32))
    return sources(count)


def theirs(model: Any, prompts: Sequence[Any], *, skip: int = 1, **given: Any) -> list[Any]:
    """Tokens after the decoder's prompt up to the first end token, and the score, of every returned text."""
    if isinstance(prompts[0], np.ndarray):
        inputs: dict[str, Any] = {"inputs": torch.from_numpy(np.stack(prompts))}
    else:
        width = max(map(len, prompts))
        inputs = {
            "inputs": torch.tensor([[*ids, *[1] * (width - len(ids))] for ids in prompts]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in prompts]),
        }
    given = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, **given}
    output = GenerationMixin.generate(model, **inputs, **given)  # Whisper's own does more than one search
    found = []
    for row, score in zip(output.sequences[:, skip:].tolist(), output.sequences_scores.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in ENDS), len(row))
        found.append((tuple(row[:end]), pytest.approx(score, abs=1e-4)))
    return found


def ours(llm: LLM, prompts: Sequence[Any], **given: Any) -> list[tuple[tuple[int, ...], float]]:
    start = given.pop("decoder_prompt", None)
    results = llm.beam_search(list(prompts), BeamSearchParams(**given), decoder_prompt=start)
    assert llm.model.num_open == 0 == llm.model.num_sources
    return [(found.tokens, found.score) for result in results for found in result.hypotheses]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_equal_for_every_stop_rule_and_width(name: str, early_stopping: bool | str) -> None:
    llm, peer, prompts = LLM(shared(name), "none"), shared(name), prompts_of(name, 3)
    ended = 0
    for width, penalty in zip((2, 3, 4, 8, 16), PENALTIES, strict=True):
        given = {"max_new_tokens": 14, "length_penalty": penalty, "early_stopping": early_stopping}
        for prompt in prompts:
            found = ours(llm, [prompt], beam_width=width, num_return_sequences=width, **given)
            assert found == theirs(peer, [prompt], num_beams=width, num_return_sequences=width, **given)
            ended += sum(tokens[-1] in ENDS for tokens, _ in found)
    assert ended, "some texts end before the limit"


@pytest.mark.parametrize("name", ALL)
def test_width_one_is_greedy(name: str) -> None:
    llm, peer = LLM(shared(name), "none"), shared(name)
    for prompt in prompts_of(name, 3):
        given = torch.from_numpy(prompt[None]) if name == "whisper" else torch.tensor([prompt])
        row = GenerationMixin.generate(peer, given, max_new_tokens=14, do_sample=False, num_beams=1)[0, 1:]
        ((tokens, _),) = ours(llm, [prompt], beam_width=1, max_new_tokens=14)
        assert tokens == tuple(row.tolist())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_equal_for_batches_of_sources(name: str, early_stopping: bool | str) -> None:
    llm, peer, prompts = LLM(shared(name), "none"), shared(name), prompts_of(name, 4)
    for width, returned in ((2, 2), (5, 1)):
        given = {"max_new_tokens": 20, "early_stopping": early_stopping, "num_return_sequences": returned}
        assert ours(llm, prompts, beam_width=width, **given) == theirs(peer, prompts, num_beams=width, **given)


COPIED = (10, 51, 10, 14, 10, 17, 27, 27, 13, 27, 39, 27)
SETTINGS: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": 2},
    "both": {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [4, 7, 9, 10, 12, 20, 27, 31, 33, 40, 51]},
    "begin_suppressed": {"begin_suppress_tokens": list(range(3, 30)), "forced_bos_token_id": 9},
    "begin_suppressed_alone": {"begin_suppress_tokens": list(range(3, 30))},
    "bad_words": {"bad_words_ids": [*([token] for token in range(3, 60, 2)), [8, 10], [2, 20], [2]]},
    "ngrams": {"no_repeat_ngram_size": 2},
    "source_ngrams": {"encoder_no_repeat_ngram_size": 1},
    "source_bigrams": {"encoder_no_repeat_ngram_size": 2},
    "repetition": {"repetition_penalty": 1.7},
    "min_length": {"min_length": 9},
    "min_new_tokens": {"min_new_tokens": 7},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_settings_of_the_generation_configuration_are_honoured(name: str, setting: str) -> None:
    prompts = [[*own, *range(3, 60, 2), *COPIED] for own in sources(3)]
    given = {"max_new_tokens": 3 if setting == "forced_eos" else 12, "num_return_sequences": 4}
    # one by one: transformers counts padding of a source as its tokens
    model = shared(name, **SETTINGS[setting])
    expected = [one for ids in prompts for one in theirs(model, [ids], num_beams=4, **given)]
    assert ours(LLM(shared(name), "none"), prompts, beam_width=4, **given) != expected, "the setting has an effect"
    assert ours(LLM(model, "none"), prompts, beam_width=4, **given) == expected


def test_parameters_of_a_search_take_precedence() -> None:
    model = shared("bart", forced_bos_token_id=9, forced_eos_token_id=2, no_repeat_ngram_size=1)
    (found,) = LLM(model, "none").beam_search(
        sources(1), BeamSearchParams(prefix_token_ids=[7, 7, 8], no_repeat_ngram_size=4, max_new_tokens=9)
    )
    assert found.best.tokens[:3] == (7, 7, 8)
    assert len(set(found.best.tokens)) < len(found.best.tokens)


@pytest.mark.parametrize("name", ["marian", "whisper"])
def test_equal_after_a_decoder_prompt(name: str) -> None:
    llm, peer, prompts = LLM(shared(name), "none"), shared(name), prompts_of(name, 1)
    start = [2, 20, 21]
    given = {"max_new_tokens": 12, "num_return_sequences": 3}
    expected = theirs(peer, prompts, num_beams=3, decoder_input_ids=torch.tensor([start]), skip=3, **given)
    assert ours(llm, prompts, beam_width=3, decoder_prompt=start[1:], **given) == expected
    assert ours(llm, prompts, beam_width=3, decoder_prompt=start, **given) == expected


@pytest.mark.parametrize("capacity", [None, 3])
def test_a_source_is_encoded_once_for_all_beams_and_forks(
    monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    model = LLM(shared("bart"), "none").model
    count, run = [], model._encode
    monkeypatch.setattr(model, "_encode", lambda source: count.append(source) or run(source))
    tokens = tuple(sources(3)[2])
    prompt = DecoderInput(model.rules.start_ids, TokenSource(tokens), len(tokens))
    search = BeamSearch(model, end_ids=ENDS, capacity=capacity)
    params = BeamSearchParams(beam_width=6, num_return_sequences=6, max_new_tokens=24)
    (found,) = search.run([prompt], [params])
    assert len(count) == 1
    assert search.stats.most_slots > (1 if capacity else 0)
    assert found.prompt_token_ids == tokens
    expected = theirs(shared("bart"), [list(tokens)], num_beams=6, num_return_sequences=6, max_new_tokens=24)
    assert [(one.tokens, one.score) for one in found.hypotheses] == expected


def test_models_with_chains_only_search_in_rows() -> None:
    model = LLM(shared("t5"), "none").model
    model.supports_trees = False
    tokens = tuple(sources(2)[1])
    prompt = DecoderInput(model.rules.start_ids, TokenSource(tokens), len(tokens))
    params = BeamSearchParams(beam_width=4, num_return_sequences=4, max_new_tokens=14)
    (found,) = BeamSearch(model, end_ids=ENDS).run([prompt], [params])
    expected = theirs(shared("t5"), [list(tokens)], num_beams=4, num_return_sequences=4, max_new_tokens=14)
    assert [(one.tokens, one.score) for one in found.hypotheses] == expected
    assert model.num_open == 0 == model.num_sources


def test_ensembles_and_fusion_with_a_source() -> None:
    """A model beside itself changes nothing; a causal language model reads the decoder's tokens."""
    llm, prompts = LLM(shared("bart"), "none"), sources(2)
    given = {"beam_width": 3, "num_return_sequences": 3, "max_new_tokens": 9}
    alone = ours(llm, prompts, **given)
    both = ours(llm, prompts, models=[LLM(shared("bart"), "none")], **given)
    assert [tokens for tokens, _ in both] == [tokens for tokens, _ in alone]
    assert [score for _, score in both] == pytest.approx([score for _, score in alone], abs=1e-5)
    lm = TableLM(hashed(VOCAB, 3))
    (fused,) = llm.beam_search(prompts[1], BeamSearchParams(lm_model=lm, lm_weight=0.5, beam_width=3, max_new_tokens=9))
    (plain,) = llm.beam_search(prompts[1], BeamSearchParams(prefix_token_ids=fused.best.tokens, max_new_tokens=9))
    added = sum(
        float(lm.logits([2, *fused.best.tokens[:place]]).log_softmax(dim=-1)[token])
        for place, token in enumerate(fused.best.tokens)
    )
    assert fused.best.cumulative_logprob == pytest.approx(plain.best.cumulative_logprob + 0.5 * added, abs=1e-4)
    assert lm.num_open == 0


def test_lengths_relate_to_the_source() -> None:
    llm, ids = LLM(shared("bart"), "none"), sources(3)[2]
    params = BeamSearchParams(max_new_tokens=2, max_len_ratio=1.0, ignore_eos=True)
    assert len(llm.beam_search(ids, params)[0].best.tokens) == len(ids) + 2
    bounded = BeamSearchParams(match_source_len=True)
    assert len(llm.beam_search(ids, bounded)[0].best.tokens) <= len(ids) + 1


def test_models_of_another_kind_are_refused() -> None:
    llm = LLM(shared("bart"), "none")
    causal = TableLM(hashed(VOCAB, 0))
    for name, value in (("models", [causal]), ("lm_model", llm)):
        with pytest.raises(InvalidRequestError, match="source") as caught:
            llm.beam_search(sources(1), BeamSearchParams(**{name: value}))
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="source"):
        LLM(causal, "none").beam_search([1, 2], BeamSearchParams(models=[llm]))
    with pytest.raises(InvalidRequestError, match="features"):
        LLM(shared("whisper"), "none").beam_search([1, 2])
    with pytest.raises(InvalidRequestError, match="wrong kind"):
        llm.beam_search(prompts_of("whisper", 1))
    with pytest.raises(InvalidRequestError, match="decoder_prompt"):
        LLM(causal, "none").beam_search([1, 2], decoder_prompt=[1])
    with pytest.raises(InvalidRequestError, match="source_lang"):
        LLM(shared("whisper"), "none").beam_search(prompts_of("whisper", 1), source_lang="en")
    with pytest.raises(InvalidRequestError, match="decode_prompt"):
        llm.beam_search(sources(1), decode_prompt=[3])
    with pytest.raises(InvalidRequestError, match="unknown option 'temperature' of a beam search"):
        llm.beam_search(sources(1), temperature=0.5)


def test_languages_are_given_as_to_generate() -> None:
    """NLLB: the token of the target language follows the decoder's start token."""
    llm, own = LLM(translator("nllb"), "none", tokenizer=tokenizer("nllb")), tokenizer("nllb")
    params = BeamSearchParams(beam_width=3, num_return_sequences=3, max_new_tokens=10)
    (found,) = llm.beam_search("ab cd", params, source_lang="eng_Latn", target_lang="deu_Latn")
    own.src_lang = "eng_Latn"
    given = own("ab cd", return_tensors="pt")
    start = [translator("nllb").generation_config.decoder_start_token_id, own.convert_tokens_to_ids("deu_Latn")]
    rows = translator("nllb").generate(
        **given, decoder_input_ids=torch.tensor([start]), num_beams=3, num_return_sequences=3, max_new_tokens=10
    )
    for one, row in zip(found.hypotheses, rows[:, 2:].tolist(), strict=True):
        assert list(one.tokens) == row[: len(one.tokens)]


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
    llm, prompt = LLM(sample(name), "none"), prompt_of(name)
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
    llm, prompts, beta = LLM(sample("bart"), "none"), sources(4)[1:], 0.7
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
    llm, prompts = LLM(sample("marian"), "none"), sources(4)
    params = BeamSearchParams(return_attention=True, beam_width=3, max_new_tokens=8)
    for prompt, result in zip(prompts, llm.beam_search(prompts, params), strict=True):
        wanted = expected("marian", prompt, result.best.tokens)
        assert np.array(result.best.attention) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("given", [{"coverage_penalty": 0.5}, {"return_attention": True}])
def test_causal_models_have_no_cross_attention(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cross-attention") as caught:
        LLM(TableLM(hashed(5, 0)), "none").beam_search([1], BeamSearchParams(**given))
    assert caught.value.param in given
    with pytest.raises(InvalidRequestError, match="coverage_penalty"):
        BeamSearchParams(coverage_penalty=-1.0)
