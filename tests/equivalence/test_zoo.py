"""Families that no other test names: the drop-in writes the text of `generate`, or refuses in a sentence.

A sample of all of them; `python tests/support/zoo.py` sweeps over every family that transformers can make.
"""

from __future__ import annotations

import re

import pytest

import draftree
from draftree.core.errors import UnsupportedModelError
from dropin_samples import padded, plain
from zoo import REFUSED, SAME, compare, tiny_model

SAME_TEXT = [
    "arcee",
    "bailing_hybrid",
    "bert",
    "bigbird_pegasus",
    "biogpt",
    "blenderbot",
    "camembert",
    "cohere_compass_text",
    "data2vec-text",
    "dots3_note_text",
    "electra",
    "exaone4",
    "falcon_h1",
    "falcon_mamba",
    "inkling_text",
    "kimi_linear",
    "lfm3",
    "mamba2",
    "marian",
    "mbart",
    "minimax",
    "modernbert-decoder",
    "moshi",
    "nemotron",
    "nemotron_h",
    "olmo3",
    "persimmon",
    "plbart",
    "qwen4_exp_text",
    "recurrent_gemma",
    "reformer",
    "roformer",
    "seed_oss",
    "trocr",
    "whisper",
    "xglm",
    "xlm-roberta",
    "xlstm",
    "zamba2",
    "zaya",
]
REFUSED_TEXT = {
    "deepseek_v4": "batch of 3: DeepseekV4ForCausalLM takes tokens in blocks that padding shifts",
    "minimax_m3_vl_text": "batch of 3: MiniMaxM3VLForCausalLM takes tokens in blocks that padding shifts",
    "cpmant": "other logits token by token than in one pass",
    "prophetnet": "other logits token by token than in one pass",
    "xlm": "in place of a mask that it appends",
    "xlnet": "in place of a mask that it appends",
}
OWN_CACHE = ["blt", "git", "rwkv"]
"""Families whose cache mixes up the rows of a batch, or shows padding, under `generate` itself."""
INTERNALS = re.compile(r"size of tensor|out of range|Traceback|NoneType|KeyError|AttributeError|object has no")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", SAME_TEXT)
def test_the_text_is_that_of_generate(family: str) -> None:
    result = compare(family)
    assert (result.outcome, result.words) == (SAME, "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", OWN_CACHE)
def test_the_text_is_that_of_generate_without_a_faulty_cache(family: str) -> None:
    result = compare(family)
    assert result.outcome == SAME, result
    assert result.words.startswith("batch of 3: as generate writes it without its cache")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED_TEXT)
def test_a_refusal_is_one_sentence_without_internals(family: str) -> None:
    result = compare(family)
    assert result.outcome == REFUSED, result
    assert REFUSED_TEXT[family] in result.words
    assert not INTERNALS.search(result.words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["deepseek_v4", "minimax_m3_vl_text"])
def test_padding_that_shifts_blocks_is_refused_and_prompts_of_one_length_are_read(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=r"that padding shifts.*give prompts of one length"):
        plain(model, padded(14, 3), custom_generate=draftree.generate, draft="ngram,min=1")
    inputs = padded(9, 9)
    assert plain(model, inputs, custom_generate=draftree.generate, draft="ngram,min=1").equal(plain(model, inputs))
