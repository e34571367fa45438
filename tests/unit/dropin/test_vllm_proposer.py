"""Proposers of vLLM: rows are recognized by their tokens, and the best path of a tree is proposed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.dropin.vllm_proposer import MOST_UNSEEN, MergedProposer, Proposer, SuffixProposer, best_path

LONGEST = 80


def config(depth: int = 4) -> Any:
    model = SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: 50)
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=depth), model_config=model)


def proposed(proposer: Proposer, texts: list[list[int]], num_new: list[int]) -> list[list[int]]:
    """Call a proposer as the runner of vLLM does, with rows of arrays."""
    tokens = np.zeros((len(texts) + 2, LONGEST), dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    counts = np.array([len(text) for text in texts] + [0, 0], dtype=np.int32)
    sampled = [text[len(text) - new :] if new else [] for text, new in zip(texts, num_new, strict=True)]
    return proposer.propose(
        sampled_token_ids=sampled, num_tokens_no_spec=counts, token_ids_cpu=tokens, slot_mappings=None
    )


@pytest.mark.parametrize("kind", [SuffixProposer, MergedProposer, Proposer])
def test_repeated_text_is_continued(kind: type[Proposer]) -> None:
    assert proposed(kind(config()), [[1, 2, 3, 4, 5, 6, 1, 2, 3]], [1]) == [[4, 5, 6, 1]]


def test_rows_without_new_tokens_and_full_texts_get_nothing() -> None:
    text = [1, 2, 3, 4] * 5
    assert proposed(SuffixProposer(config()), [text, text, [1, 2] * (LONGEST // 2)], [0, 1, 1])[::2] == [[], []]
    almost = (text * 5)[: LONGEST - 2]
    assert len(proposed(SuffixProposer(config()), [almost], [1])[0]) == 1


def test_rows_that_move_keep_their_texts() -> None:
    """The same texts in random rows at every step are drafted as alone in their own proposers."""
    choose = random.Random(1)
    whole = [[choose.randrange(6) for _ in range(60)] for _ in range(4)]
    together = SuffixProposer(config())
    alone = [SuffixProposer(config()) for _ in whole]
    lengths = [8, 9, 10, 11]
    for _ in range(12):
        new = [choose.randint(1, 3) for _ in whole]
        lengths = [length + count for length, count in zip(lengths, new, strict=True)]
        order = choose.sample(range(4), choose.randint(1, 4))
        texts = [whole[index][: lengths[index]] for index in order]
        found = proposed(together, texts, [new[index] for index in order])
        for place, index in enumerate(order):
            assert found[place] == proposed(alone[index], [texts[place]], [new[index]])[0]


def test_finished_texts_are_learned() -> None:
    proposer = SuffixProposer(config())
    text = [9, 8, 7, 6, 5, 4, 3]
    for length in range(2, len(text) + 1):
        proposed(proposer, [text[:length]], [1])
    for step in range(MOST_UNSEEN + 2):
        proposed(proposer, [[20 + step % 9, 30, 31]], [1])
    assert proposed(proposer, [[40, 41, 9, 8, 7]], [1])[0][:1] == [6]


def test_the_best_children_are_followed() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, -1, 1, 1), scores=(-1.0, -0.5, -0.9, -0.6))
    assert best_path(tree, 5) == [2, 4]
    assert best_path(tree, 1) == [2]
    assert best_path(chain([5, 6, 7]), 2) == [5, 6]
    assert best_path(EMPTY, 3) == []


@pytest.mark.parametrize("draft", ["model:stories15m", "early-exit:2", "none", "lookahead,window=5", "quantized"])
def test_drafters_with_a_model_are_refused(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_VLLM_DRAFT", draft)
    with pytest.raises(ConfigurationError, match="cannot draft in vLLM"):
        Proposer(config())


def test_vllm_builds_the_class_by_its_path() -> None:
    module = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer")
    settings = config()
    settings.speculative_config.model = "draftree.dropin.vllm_proposer.SuffixProposer"
    proposer = module.create_custom_proposer(settings)
    assert proposed(proposer, [[1, 2, 3, 4, 5, 6, 1, 2, 3]], [1]) == [[4, 5, 6, 1]]
