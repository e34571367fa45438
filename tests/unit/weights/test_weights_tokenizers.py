"""Tokenizers built from pieces encode as SentencePiece does, and decode to the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftree.weights.tokenizers_from_pieces import (
    TokenizerSettings,
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)
from weights_samples import LETTERS, PIECES, SCORES

ROLES = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    built = sentencepiece_tokenizer(PIECES, [-score for score in SCORES], starts_with_space=True, unknown="<unk>")
    settings = TokenizerSettings(roles=ROLES, adds_bos=True, context_length=32, chat_template="{{ messages }}")
    save_tokenizer(built, PIECES, settings, folder=folder)
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece_reference(text: str) -> list[int]:
    """SentencePiece's BPE in its plainest form: join the neighbours whose joint piece scores best, leftmost first."""
    ids = {piece: index for index, piece in enumerate(PIECES)}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joints = [
            (-SCORES[ids[parts[i] + parts[i + 1]]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in ids and ids[parts[i] + parts[i + 1]] > 258
        ]
        if not joints:
            break
        _, best = min(joints)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    encoded: list[int] = []
    for part in parts:
        encoded += [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]
    return encoded


@given(text=st.text(alphabet=LETTERS[:8] + "nrt  é🙂"))
def test_texts_are_cut_as_sentencepiece_cuts_them(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer(text, add_special_tokens=False).input_ids == sentencepiece_reference(text)


@given(text=st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
@example(text="  two   spaces ")
@example(text="\n\ttabs\n")
@example(text="日本語 🙂👩‍👩‍👧")
@example(text="<0x0A>\x00é\u00a0")
def test_any_text_comes_back_exactly(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_special_tokens_are_one_id_each_and_roles_are_known(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("the</s>the").input_ids == [1, PIECES.index("▁the"), 2, PIECES.index("▁the")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == len(PIECES)
    assert tokenizer.model_max_length == 32
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_vocabulary_without_a_leading_space_takes_texts_as_they_are() -> None:
    tokenizer = sentencepiece_tokenizer(PIECES, [-s for s in SCORES], starts_with_space=False, unknown="<unk>")
    encoded = tokenizer.encode("the and")
    assert encoded.tokens == ["t", "he", "▁and"]
    assert tokenizer.decode(encoded.ids) == "the and"


def test_llama_3_takes_whole_words_and_qwen_2_composes_accents() -> None:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "abc"]
    llama = byte_level_tokenizer(alphabet, [], rule="llama-bpe")
    assert llama.encode("abc abc").tokens == ["abc", "Ġ", "a", "b", "c"]
    assert llama.encode("12345").tokens == list("12345")
    qwen = byte_level_tokenizer(alphabet, [], rule="qwen2")
    assert qwen.encode("e\u0301").ids == qwen.encode("é").ids
    assert qwen.encode("abc").tokens == list("abc")


def test_qwen_3_5_keeps_a_mark_in_its_word() -> None:
    text = "\u0915\u093e"  # DEVANAGARI LETTER KA with the vowel sign AA, a mark
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "à¤", "à¤ķ", "à¤¾", "à¤ķà¤¾"]
    merges = ["à ¤", "à¤ ķ", "à¤ ¾", "à¤ķ à¤¾"]
    assert byte_level_tokenizer(pieces, merges, rule="qwen35").encode(text).tokens == ["à¤ķà¤¾"]
    assert byte_level_tokenizer(pieces, merges, rule="qwen2").encode(text).tokens == ["à¤ķ", "à¤¾"]


def test_whole_tokens_are_never_cut_but_stay_text(tmp_path: Path) -> None:
    pieces = ["a", "b", "<", ">", "<b>", "<end>"]
    built = byte_level_tokenizer(pieces, [], rule="gpt-2")
    save_tokenizer(built, pieces, TokenizerSettings(special=(5,), whole=(4,), context_length=8), folder=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a<b><end>").input_ids == [0, 4, 5]
    assert tokenizer.decode([0, 4, 5], skip_special_tokens=True) == "a<b>"
