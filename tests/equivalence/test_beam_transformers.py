"""Beam search equals `generate(num_beams=…)` of transformers: tokens and scores in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from beam_oracles import VOCAB_SIZE, peer, target
from draftree import LLM
from draftree.beam.params import BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.models.torch.hf import HFModel
from families import fresh
from families import peer as family_peer
from families import target as loaded
from native_samples import FAMILIES, SIZES, lower, text

PROMPTS = [[5, 9, 33, 9, 60, 4, 4], [7, 3], [90, 91, 5, 5]]
PAD = 0


def theirs(family: str, prompts: Sequence[Sequence[int]], ends: Sequence[int] | None, **given: Any) -> list[Any]:
    """Tokens up to the first end token, and the score, of every returned text of every prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = peer(family).generate(
        ids,
        attention_mask=mask,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=PAD,
        eos_token_id=None if ends is None else list(ends),
        **{"do_sample": False} | given,
    )
    found = []
    for row, score in zip(output.sequences[:, width:].tolist(), output.sequences_scores.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in (ends or ())), len(row))
        found.append((tuple(row[:end]), pytest.approx(score, abs=1e-4)))
    return found


def ours(
    family: str, prompts: Sequence[Sequence[int]], ends: Sequence[int] | None, **given: Any
) -> list[tuple[tuple[int, ...], float]]:
    params = BeamSearchParams(**given)
    model = target(family)
    results = BeamSearch(model, end_ids=ends or ()).run(prompts, [params] * len(prompts))
    assert model.num_open == 0
    return [(found.tokens, found.score) for result in results for found in result.hypotheses]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("width", [2, 3, 8, 16])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_equal_for_every_stop_rule(family: str, width: int, early_stopping: bool | str) -> None:
    for penalty, ends in zip(
        (-1.0, 0.0, 0.6, 1.0, 2.0), ([2], [2, 11, 40], [2, 5], None, list(range(2, 20))), strict=True
    ):
        theirs_given = {"num_beams": width, "max_new_tokens": 14, "length_penalty": penalty}
        given = {"early_stopping": early_stopping, "num_return_sequences": width}
        expected = theirs(family, PROMPTS[:1], ends, **theirs_given, **given)
        found = ours(family, PROMPTS[:1], ends, beam_width=width, max_new_tokens=14, length_penalty=penalty, **given)
        assert found == expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equal_with_processors(family: str) -> None:
    for given, same in (
        ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
        ({"suppress_tokens": [7, 8, 60]}, {"suppress_tokens": [7, 8, 60]}),
        ({"forced_eos_token_id": 2}, {"force_eos": "zero_score"}),
        (
            {"prefix_allowed_tokens_fn": lambda _, ids: [2, *range(int(ids[-1]) % 5, VOCAB_SIZE, 3)]},
            {"prefix_allowed_tokens_fn": lambda _, ids: [2, *range(ids[-1] % 5, VOCAB_SIZE, 3)]},
        ),
    ):
        common = {"max_new_tokens": 12, "num_return_sequences": 4}
        # one by one: transformers counts padding as history
        expected = [
            found for prompt in PROMPTS for found in theirs(family, [prompt], [2], num_beams=4, **common, **given)
        ]
        assert ours(family, PROMPTS, [2], beam_width=4, **common, **same) == expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seed", range(4))
def test_beam_sampling_makes_the_same_draws(family: str, seed: int) -> None:
    for filters in ({"top_k": 0}, {"top_k": 12}, {"top_k": 0, "top_p": 0.8}):
        common = {"max_new_tokens": 12, "num_return_sequences": 3, **filters}
        torch.manual_seed(seed)
        expected = theirs(family, PROMPTS[:1], [2], num_beams=3, do_sample=True, **common)
        assert ours(family, PROMPTS[:1], [2], beam_width=3, sampling="beam", seed=seed, **common) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "mistral"])
def test_passes_in_c_find_the_same_texts(family: str) -> None:
    """With sliding windows shorter than the text as well."""
    model = HFModel(fresh(family, **(SIZES | FAMILIES[family])))
    prompt, params = text(50), BeamSearchParams(beam_width=6, num_return_sequences=6, max_new_tokens=30)
    (expected,) = BeamSearch(model, end_ids=[2]).run([prompt], [params])
    kernels = lower(model)
    for capacity in (None, 12):
        (found,) = BeamSearch(kernels, end_ids=[2], capacity=capacity).run([prompt], [params])
        assert [one.tokens for one in found.hypotheses] == [one.tokens for one in expected.hypotheses]
        assert [one.score for one in found.hypotheses] == pytest.approx(
            [one.score for one in expected.hypotheses], abs=1e-4
        )
        assert kernels.num_open == 0
        kernels.check_integrity()


@pytest.mark.parametrize("family", ["bloom", "falcon-alibi", "gemma2", "gpt_oss"])
def test_other_families_in_rows_and_trees(family: str) -> None:
    """Models with chains only have a slot per beam."""
    ids, width = torch.tensor([PROMPTS[0]]), 4
    given = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 20, "eos_token_id": 2}
    model = loaded(family)
    before = model.num_open
    output = family_peer(family).generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD, do_sample=False, **given
    )
    params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=20)
    (found,) = BeamSearch(model, end_ids=[2]).run(PROMPTS[:1], [params])
    for row, one in zip(output[:, ids.shape[1] :].tolist(), found.hypotheses, strict=True):
        assert tuple(row[: len(one.tokens)]) == one.tokens
    assert model.num_open == before


@pytest.mark.parametrize("draft", ["same", "ngram,min=1", "suffix+runners-up"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_drafts_change_no_bit_of_a_score_in_c(family: str, draft: str) -> None:
    sizes: dict[str, Any] = SIZES | FAMILIES[family]
    llm = LLM(lower(HFModel(fresh(family, **sizes))), "none")
    drafter: Any = lower(HFModel(fresh(family, **sizes))) if draft == "same" else draft
    prompts, used = [text(50), [7, 9, 7, 9, 7], text(9) * 3], 0
    for width in (1, 4, 9):
        params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=30, length_penalty=0.8)
        plain = llm.beam_search(prompts, params)
        found = llm.beam_search(prompts, params, draft=drafter)
        assert [one.hypotheses for one in found] == [one.hypotheses for one in plain]
        assert [one.num_steps for one in found] == [one.num_steps for one in plain]
        used += sum(one.num_used for one in found)
    assert used > 0 or draft != "same"
    assert llm.model.num_open == 0
    llm.model.check_integrity()
