"""Tokens that end a text: one rule for generation and benchmarks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftree.bench import benchmark
from draftree.loading import targets
from draftree.loading.targets import eos_ids_of


@pytest.mark.parametrize(
    ("models", "tokenizers", "expected"), [((3, 4), 5, (3, 4)), ((), 5, (5,)), ((), None, ()), ((3,), None, (3,))]
)
def test_those_of_the_model_come_before_the_tokenizers(models: Any, tokenizers: Any, expected: Any) -> None:
    loaded: Any = SimpleNamespace(eos_ids=models)
    tokenizer: Any = SimpleNamespace(eos_token_id=tokenizers)
    assert eos_ids_of(loaded, tokenizer) == expected
    assert eos_ids_of(loaded, None) == models


def test_benchmarks_use_the_same_function() -> None:
    assert vars(benchmark)["eos_ids_of"] is targets.eos_ids_of
