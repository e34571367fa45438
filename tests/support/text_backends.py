"""Small real tokenizers of every kind, trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps on, and the fox is gone.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n",
    "東京は日本の首都です。日本語の文章を書きます。今日は良い天気ですね。",
    "Smile 😀 and celebrate 🎉🎉, a family 👨‍👩‍👧 and a flag 🇯🇵!",
    "Naïve café, Übergröße, ½ cup; “quotes” and — dashes …",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'wizard' %}{{ raise_exception('Wizards may not speak') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _wrapped(tokenizer: TokenizersTokenizer, **settings: str) -> PreTrainedTokenizerFast:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **names,
        **settings,
    )


def byte_level(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """As GPT-2, Qwen or SmolLM: every byte has a token; also an added token that is written as it is."""
    tokenizer = TokenizersTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("\t\t  ", normalized=False), AddedToken("日本", normalized=False)])
    return _wrapped(tokenizer, **({"chat_template": chat_template} if chat_template else {}))


def _pieces_with_byte_tokens(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    trained = TokenizersTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    words = [line.replace(" ", "▁") for line in CORPUS if line.isascii()]
    trained.train_from_iterator(words, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "日", "本", "▁日本", "▁▁"]
    tokenizer = TokenizersTokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(dict.fromkeys(names))},
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return _wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: pieces with a mark for the space, bytes for what has no piece, the first space not written."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _pieces_with_byte_tokens(decoders.Sequence(steps))


def byte_fallback_unstripped() -> PreTrainedTokenizerFast:
    """As Gemma: the first space is written."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces_with_byte_tokens(decoders.Sequence(steps))


def metaspace_then_bytes() -> PreTrainedTokenizerFast:
    """Byte tokens with a decoder that no table can represent."""
    steps = [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces_with_byte_tokens(decoders.Sequence(steps))


def metaspace() -> PreTrainedTokenizerFast:
    """As XGLM: a unigram model."""
    tokenizer = TokenizersTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT: the form of a token depends on whether it is the first."""
    tokenizer = TokenizersTokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer)


def word_ends() -> PreTrainedTokenizerFast:
    """As the first GPT: the last token is written without its space."""
    tokenizer = TokenizersTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer)


def words() -> PreTrainedTokenizerFast:
    """Whole words, and no decoder at all."""
    tokenizer = TokenizersTokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return _wrapped(tokenizer)


TABLE_BACKENDS: tuple[Callable[[], PreTrainedTokenizerFast], ...] = (
    byte_level,
    byte_fallback,
    byte_fallback_unstripped,
)
OTHER_BACKENDS: tuple[Callable[[], PreTrainedTokenizerFast], ...] = (
    metaspace_then_bytes,
    metaspace,
    word_piece,
    word_ends,
    words,
)


@cache
def saved(folder: Path) -> Path:
    """A folder with a byte-level tokenizer in it."""
    byte_level().save_pretrained(folder)
    return folder
