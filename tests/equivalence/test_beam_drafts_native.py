"""Drafted beam search on passes in C, whose rows are exact: hypotheses and scores are bit-equal to plain search."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import LLM, BeamSearchParams
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import FAMILIES, SIZES, lower, text

PROMPTS = [text(50), [7, 9, 7, 9, 7], text(9) * 3]


@pytest.mark.parametrize("draft", ["same", "ngram,min=1", "suffix+runners-up"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scores_are_bit_equal(family: str, draft: str) -> None:
    sizes: dict[str, Any] = SIZES | FAMILIES[family]
    llm = LLM(lower(HFModel(fresh(family, **sizes))))
    drafter: Any = lower(HFModel(fresh(family, **sizes))) if draft == "same" else draft
    used = 0
    for width in (1, 4, 9):
        params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=30, length_penalty=0.8)
        plain = llm.beam_search(PROMPTS, params)
        found = llm.beam_search(PROMPTS, params, draft=drafter)
        assert [one.hypotheses for one in found] == [one.hypotheses for one in plain]
        assert [one.num_steps for one in found] == [one.num_steps for one in plain]
        used += sum(one.num_used for one in found)
    assert used > 0 or draft != "same"
    assert llm.model.num_open == 0
    llm.model.check_integrity()
