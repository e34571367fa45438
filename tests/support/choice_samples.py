"""Several drafters in one engine, on a table. Not a test itself."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.engine.sequence import WritingSequence
from draftree.loading.load import LoadedModel
from draftree.models.table import TableLM, hashed
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level

TOKENIZER = Tokenizer(byte_level())
VOCAB = len(TOKENIZER.vocabulary())
DRAFTS = (
    "ngram,min=1",
    "model:small,k=3",
    "lookahead",
    "model:small,tree=1-2-2",
    "ngram,min=1+suffix",
    "prediction+model:small,k=2",
)
CHOICES = (None, "none", *DRAFTS)
PROMPTS = [[20, 30, 40, 20, 30], [7, 8, 9], [50] * 12, [20, 30, 40] * 12]


def model() -> TableLM:
    """A text that repeats itself, so that there is something to copy."""
    return TableLM(hashed(VOCAB, seed=1, scale=2.0), order=1)


def replace_loading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every draft model a table; the names of those that are loaded, in a list that grows."""
    names: list[str] = []

    def load(name: str, **_: Any) -> LoadedModel:
        names.append(name)
        return LoadedModel(TableLM(hashed(VOCAB, seed=1, scale=1.8), order=1), None, (), name)

    monkeypatch.setattr("draftree.drafters.growing.model_files.load_model", load)
    return names


def opened(drafts: Any = DRAFTS, plan: str | None = "fixed", **options: Any) -> LLM:
    return LLM(model(), drafts, plan=plan, tokenizer=TOKENIZER, **options)


def given(choice: str | None, seed: int, **more: Any) -> SamplingParams:
    params: dict[str, Any] = {"max_tokens": 30, "seed": seed, "temperature": (0.0, 0.8, 1.3)[seed % 3]} | more
    if choice is not None and "prediction" in choice:
        params["prediction"] = [20, 30, 40, 20]
    return SamplingParams(**params)


def plain(ids: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    llm = LLM(model(), tokenizer=TOKENIZER)
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    without = SamplingParams(**{**values, "prediction": None})
    return [done.token_ids for done in llm.generate([ids], without)]


def add(llm: LLM, ids: list[int], params: SamplingParams, choice: str | None) -> list[WritingSequence]:
    sequences = llm.requests.sequences(ids, params, draft=choice)
    llm.engine.add(*sequences)
    return sequences
