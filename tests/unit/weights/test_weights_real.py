"""The real weights: downloads match the catalogue, and the models write sensible text.

They are fetched into the user's own cache, where they stay for the next run.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from draftree.loading.resolve import resolve_model
from draftree.weights import install
from draftree.weights.catalogue import CATALOGUE, CatalogueEntry
from real_weights import folder_of

TEXTS = [
    "Plain words, and  two spaces.",
    " starts with a space\n\n\tand has tabs\t",
    "日本語の文章です。",
    "🙂 👩‍👩‍👧 é ﬁ ½ — “quoted”",
    "def f(x):\n    return x ** 2  # 1234567890\n",
    "\x00\x7f\u00a0\u3000",
]


SMALL = ("smollm2-135m-instruct", "stories15m")
"""Models whose weights are read whole; the others are large."""


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder_of(name))


def greedy(name: str, ids: list[int], num_tokens: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder_of(name))
    written = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)
    return tokenizer_of(name).decode(written[0][len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_catalogue_entries_are_complete(entry: CatalogueEntry) -> None:
    assert CATALOGUE[entry.name] is entry
    assert len(entry.sha256) == len(hashlib.sha256().hexdigest())
    assert entry.working_bytes > entry.folder_bytes + entry.source_bytes
    # The folder holds every parameter once, plus settings and tokenizer.
    item_bytes = {"bfloat16": 2, "float32": 4}[entry.dtype]
    assert 0 < entry.folder_bytes - item_bytes * entry.num_parameters < 50_000_000


def bytes_read() -> int:
    """By this process so far; 0 where the system does not count them."""
    counts = Path("/proc/self/io")
    return int(counts.read_text("ascii").split()[1]) if counts.exists() else 0


@pytest.mark.weights
@pytest.mark.parametrize("name", SMALL)
def test_a_model_matches_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CATALOGUE[name]
    folder, tokenizer = folder_of(name), tokenizer_of(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, entry.dtype)
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.num_parameters
    assert len(tokenizer) == model.config.vocab_size == entry.vocab_size
    assert model.config.max_position_embeddings == tokenizer.model_max_length == entry.context_length
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert num_bytes == pytest.approx(entry.folder_bytes, rel=0.001)
    for work in ("fetch_source", "convert_gguf", "convert_llama2c", "fingerprint"):
        monkeypatch.setattr(install, work, lambda *_, **__: pytest.fail("the model is here, and was made again"))
    before = bytes_read()
    assert resolve_model(name) == folder
    assert bytes_read() - before < num_bytes / 2, "its weights were read to find it"


@pytest.mark.weights
@pytest.mark.parametrize("name", CATALOGUE)
def test_texts_come_back_exactly(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.weights
def test_smollm2_answers_in_its_chat_format() -> None:
    tokenizer = tokenizer_of("smollm2-135m-instruct")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert greedy("smollm2-135m-instruct", ids, 20) == "The capital of France is Paris."


@pytest.mark.weights
def test_stories15m_tells_a_story() -> None:
    told = greedy("stories15m", tokenizer_of("stories15m")("Once upon a time").input_ids, 27)
    assert told == ", there was a little girl named Lily. She loved to play outside in the sunshine. One day, she saw a"


@pytest.mark.weights
def test_tinyllama_and_stories15m_share_one_vocabulary() -> None:
    large, small = tokenizer_of("tinyllama-1.1b-chat"), tokenizer_of("stories15m")
    assert large.convert_ids_to_tokens(range(32_000)) == small.convert_ids_to_tokens(range(32_000))
    for text in [*TEXTS, "<|user|>\nHello</s>\n<|assistant|>\n"]:
        assert large(text).input_ids == small(text).input_ids


@pytest.mark.weights
def test_tinyllama_has_its_chat_format() -> None:
    tokenizer = tokenizer_of("tinyllama-1.1b-chat")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.weights
def test_gemma3_has_its_windows() -> None:
    config = AutoModelForCausalLM.from_pretrained(folder_of("gemma3-270m")).config
    assert config.sliding_window == 512
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
