"""A lookahead window in the pass changes no text: only the lanes after its guesses attend to them."""

from __future__ import annotations

import pytest

from draftree import LLM, SamplingParams
from families import SLOTTED, prompts, target
from paced import steady
from real_weights import loaded_float32

RAGGED = prompts(3, 17, 9)
SPECS = ("lookahead,window=0", "lookahead,window=6,n=4", "ngram,min=1+lookahead,window=3,n=3")


def ids(family: str, draft: str | None, temperature: float) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, repetition_penalty=1.1)
    return [done.token_ids for done in LLM(target(family), draft, plan=steady(draft)).generate(RAGGED, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", sorted(SLOTTED))
def test_lookahead_leaves_the_text(family: str, temperature: float) -> None:
    plain = ids(family, None, temperature)
    for spec in SPECS if family in ("llama", "gemma3") else SPECS[1:2]:
        assert ids(family, spec, temperature) == plain, spec


@pytest.mark.weights
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_model_writes_what_it_writes_without(temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    texts = [
        LLM(loaded_float32("stories15m"), draft, plan=steady(draft)).generate("Tom had a red ball. Tom had a", params)[
            0
        ]
        for draft in (None, "lookahead,window=0", "lookahead,window=6,n=4")
    ]
    assert len({text.token_ids for text in texts}) == 1
    assert all(text.stats.accepted_by_source["pool"] for text in texts[1:])
