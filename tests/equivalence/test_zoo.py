"""Families that no other test names: the drop-in writes the text of `generate`, or refuses in a sentence.

A sample of all of them; `python tests/support/zoo.py` sweeps over every family that transformers can make.
"""

from __future__ import annotations

import re

import pytest

from zoo import REFUSED, SAME, compare

SAME_TEXT = [
    "arcee",
    "bert",
    "bigbird_pegasus",
    "biogpt",
    "blenderbot",
    "camembert",
    "data2vec-text",
    "deepseek_v4",
    "electra",
    "exaone4",
    "falcon_h1",
    "falcon_mamba",
    "inkling_text",
    "lfm3",
    "marian",
    "mbart",
    "minimax",
    "modernbert-decoder",
    "nemotron",
    "nemotron_h",
    "olmo3",
    "persimmon",
    "plbart",
    "roformer",
    "seed_oss",
    "trocr",
    "xglm",
    "xlm-roberta",
]
REFUSED_TEXT = {
    "cpmant": "other logits token by token than in one pass",
    "moshi": "context holds 8",
    "whisper": "leave custom_generate out",
    "xlm": "in place of a mask that it appends",
}
INTERNALS = re.compile(r"size of tensor|out of range|Traceback|NoneType|KeyError|AttributeError|object has no")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", SAME_TEXT)
def test_the_text_is_that_of_generate(family: str) -> None:
    result = compare(family)
    assert (result.outcome, result.words) == (SAME, "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED_TEXT)
def test_a_refusal_is_one_sentence_without_internals(family: str) -> None:
    result = compare(family)
    assert result.outcome == REFUSED, result
    assert REFUSED_TEXT[family] in result.words
    assert not INTERNALS.search(result.words)
