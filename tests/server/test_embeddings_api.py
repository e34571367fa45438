"""Embeddings: hidden states of the model, against transformers, and beside running texts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
import torch

from draftree import AsyncLLM, SamplingParams
from draftree.models.table import TableLM, hashed
from serving import NAME, Running, plain_llm, tiny_async_llm, tiny_model, tiny_tokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 12, "Hello"]


def expected(ids: list[int], pooling: str) -> np.ndarray:
    """The embedding by transformers."""
    with torch.no_grad():
        states = tiny_model().model(torch.tensor([ids])).last_hidden_state[0]
    pooled = states.mean(dim=0) if pooling == "mean" else states[-1]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_last_hidden_states(client: openai.OpenAI, pooling: str) -> None:
    ids = [tiny_tokenizer().encode(text) for text in TEXTS]
    assert len(ids[0]) > 128  # more than one step
    for given in (TEXTS, ids):
        answer = client.embeddings.create(model=NAME, input=given, extra_body={"pooling": pooling})
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        for row, one in zip(answer.data, ids, strict=True):
            assert np.allclose(row.embedding, expected(one, pooling), atol=2e-5)
            assert np.linalg.norm(row.embedding) == pytest.approx(1)
    (single,) = client.embeddings.create(
        model=NAME, input=TEXTS[1], encoding_format="float", extra_body={"pooling": pooling}
    ).data
    assert np.allclose(single.embedding, answer.data[1].embedding, atol=1e-7)


def test_texts_beside_embeddings_stay_the_same() -> None:
    params = SamplingParams(seed=1, max_tokens=40)
    (wanted,) = plain_llm().generate("Once", params)

    async def write() -> None:
        async with tiny_async_llm() as llm:
            embedded = [llm.embed(TEXTS[0]) for _ in range(4)]
            texts = [llm.generate("Once", params) for _ in range(4)]
            found: list[Any] = await asyncio.gather(*embedded, *texts)
            assert all(one == found[0] for one in found[:4])
            assert {done.text for (done,) in found[4:]} == {wanted.text}
            task = asyncio.ensure_future(llm.embed(TEXTS[0]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await llm.forget()
            await llm.ping()
            assert llm.llm.model.num_open == 0

    asyncio.run(write())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_refusals(server: Running, http: Any, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/embeddings", json={"model": NAME, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_text_beyond_the_context_and_a_model_without_states(http: Any) -> None:
    answer = http.post("/v1/embeddings", json={"model": NAME, "input": [5] * 600})
    assert answer.status_code == 400

    async def refuse() -> None:
        async with AsyncLLM(TableLM(hashed(8, 1))) as llm:
            with pytest.raises(Exception, match="computes no embeddings"):
                await llm.embed([1, 2])

    asyncio.run(refuse())
