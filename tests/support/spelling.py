"""A byte-level tokenizer of 96 tokens, as many as the tiny models have: letters, words, and bytes of longer characters.

Not a test itself. Random text over it is full of what is hard to show: words that tokens divide anywhere, and
characters that need three tokens and may be cut by the end.
"""

from __future__ import annotations

import functools

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftree.text.tokenizer import Tokenizer
from families import VOCAB_SIZE

SPECIAL = ("<pad>", "<s>", "</s>")
EOS = 2
LETTERS = " abcdefghijklmnopqrstuvwxyz\n.,!"
BYTES = "日本é😀".encode()
WORDS = (
    "ab",
    "abc",
    "bc",
    "bca",
    "ca",
    "cab",
    " a",
    " ab",
    "he",
    "the",
    "er",
    "ere",
    ". ",
    ", ",
    "in",
    "ing",
    "an",
    "and",
)


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in the vocabulary of a byte-level tokenizer."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


@functools.cache
def backend() -> PreTrainedTokenizerFast:
    characters = _byte_characters()

    def written(text: bytes) -> str:
        return "".join(characters[byte] for byte in text)

    singles = [written(bytes([byte])) for byte in (*LETTERS.encode(), *BYTES)]
    words = [written(word.encode()) for word in WORDS]
    names = list(dict.fromkeys([*SPECIAL, *singles, *words]))
    names += [characters[byte] for byte in range(256) if characters[byte] not in names][: VOCAB_SIZE - len(names)]
    assert len(names) == VOCAB_SIZE
    vocabulary = {name: place for place, name in enumerate(names)}
    merges = [(word[:n], word[n:]) for word in words for n in range(1, len(word)) if {word[:n], word[n:]} <= set(names)]
    tokenizer = Backend(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(backend())
