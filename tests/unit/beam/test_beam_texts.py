"""Texts of beam searches: as `generate` writes them, with and without asyncio."""

from __future__ import annotations

import asyncio

import pytest

from draftree import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from draftree.models.table import TableLM, hashed
from text_backends import byte_fallback, metaspace, words

PARAMS = BeamSearchParams(beam_width=1, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("backend", [metaspace, byte_fallback, words])
def test_texts_are_those_of_generate_with_and_without_asyncio(backend: object) -> None:
    tokenizer = backend()  # type: ignore[operator]
    spaces = 0
    for seed in range(8):
        model = TableLM(hashed(len(tokenizer), seed))
        llm, prompt = LLM(model, "none", tokenizer=tokenizer), [5, 7]
        greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        found = llm.beam_search([prompt], PARAMS)[0].best
        assert found.tokens == greedy.token_ids
        assert found.text == greedy.text

        async def search() -> str | None:
            async with AsyncLLM(TableLM(hashed(len(tokenizer), seed)), "none", tokenizer=tokenizer) as other:  # noqa: B023
                return (await other.beam_search(prompt, PARAMS)).best.text  # noqa: B023

        assert asyncio.run(search()) == greedy.text
        spaces += greedy.text.startswith(" ")
    assert spaces or backend is not byte_fallback


def test_lookahead_drafts_from_the_texts_of_the_beams() -> None:
    model = TableLM(hashed(5, 3), order=1)
    params = BeamSearchParams(beam_width=2, max_new_tokens=40)
    plain = LLM(model, "none").beam_search([[1, 2]], params)[0]
    drafted = LLM(model, "none").beam_search([[1, 2]], params, draft="lookahead")[0]
    assert drafted.hypotheses == plain.hypotheses
    assert drafted.num_used > 0
