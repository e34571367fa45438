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
    "electra",
    "exaone4",
    "lfm3",
    "marian",
    "mbart",
    "modernbert-decoder",
    "nemotron",
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
    "deepseek_v4": "recurrent state",
    "inkling_text": "more than the keys and values",
    "moshi": "context holds 8",
    "rwkv": "recurrent state",
    "whisper": "leave custom_generate out",
    "xlm": "cannot continue from its stored keys and values",
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
