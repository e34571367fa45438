"""The number of positions of a model: from its settings, and less if stored keys would become invalid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.loading.transformers_model import wrap_model
from draftree.models.torch.inspection import UNBOUNDED, context_length
from families import fresh, peer, prompts, transformers_greedy

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
TURNING = {"rope_parameters": LONGROPE | FACTORS, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_seq_len": 48}, 48),
        ({"max_position_embeddings": None, "max_seq_len": 48}, 48),
        ({}, UNBOUNDED),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": LONGROPE}, 40),
        ({"max_position_embeddings": 32, "rope_parameters": LONGROPE}, 32),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": LONGROPE}}, 40),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, 64),
    ],
)
def test_context_by_settings(settings: dict[str, Any], length: int) -> None:
    assert context_length(SimpleNamespace(**settings)) == length


def test_a_model_whose_keys_turn_ends_before_they_do() -> None:
    llm = LLM(wrap_model(fresh("phi3", **TURNING)), draft="ngram,min=1")
    (prompt,) = prompts(10)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=None, temperature=0))
    assert len(done.token_ids) == 30
    assert list(done.token_ids) == transformers_greedy(fresh("phi3", **TURNING), prompt, 30)
    with pytest.raises(InvalidRequestError, match="context of 40"):
        llm.generate([prompt], SamplingParams(max_tokens=31))


def test_a_model_without_positions_is_held_by_max_tokens_alone() -> None:
    llm = LLM(wrap_model(fresh("bloom", max_position_embeddings=None)), "none")
    assert llm.model.max_length == UNBOUNDED
    (prompt,) = prompts(200)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0))
    assert list(done.token_ids) == transformers_greedy(peer("bloom"), prompt, 4)
