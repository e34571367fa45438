"""Construction of a fast tokenizer from the data in weight files: a list of pieces, with scores or with merges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class CuttingRule:
    """The pre-tokenization rule of a family of byte-level vocabularies."""

    pattern: str | None = None  # none: the pattern of GPT-2
    splits_digits: bool = False
    composes: bool = False  # whether letters and their accents are composed (NFC) first
    takes_whole_words: bool = False  # whether a word that is a piece is one token, even if no merges produce it


def later_pattern(digits: str, letter: str = r"\p{L}") -> str:
    """Return the pattern of the families after GPT-4's tokenizer; they differ in how many digits make a word."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?[{letter}]+"
    signs = rf" ?[^\s{letter}\p{{N}}]+[\r\n]*"
    return "|".join([contractions, letters, digits, signs, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


LLAMA_3 = CuttingRule(later_pattern(r"\p{N}{1,3}"), takes_whole_words=True)
CUTTING_RULES = {
    "gpt-2": CuttingRule(),
    "smollm": CuttingRule(splits_digits=True),
    "refact": CuttingRule(splits_digits=True),
    **dict.fromkeys(("llama-bpe", "lfm2", "falcon-h1", "pixtral"), LLAMA_3),
    "dbrx": CuttingRule(later_pattern(r"\p{N}{1,3}")),
    "qwen2": CuttingRule(later_pattern(r"\p{N}"), composes=True),
    "qwen35": CuttingRule(later_pattern(r"\p{N}", r"\p{L}\p{M}"), composes=True),
}
"""By their names in GGUF files (`tokenizer.ggml.pre`)."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The properties of a tokenizer besides its pieces; `special` and `whole` are ids of pieces that are never split.

    Special pieces are optionally left out of decoded text; `whole` ones are ordinary text.
    """

    special: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    """Ids by role: `bos_token`, `eos_token`, `unk_token`, `pad_token`."""
    adds_bos: bool = False
    context_length: int = 0
    chat_template: str | None = None


def sentencepiece_tokenizer(
    pieces: Sequence[str], ranks: Sequence[float], *, starts_with_space: bool, unknown: str | None
) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback; the merge with the smallest rank is applied first.

    With `starts_with_space`, every section of text between special tokens gets a leading space, as in the training of
    such models; decoding removes the first one.
    """
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = BPE(vocab, merges_from_ranks(vocab, ranks), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    respelling = normalizers.Replace(" ", WORD_START)
    decoding = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if starts_with_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), respelling])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = respelling
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def merges_from_ranks(vocab: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return every way to build a piece from two others, best piece first.

    SentencePiece scores the piece that a merge makes, the BPE of `tokenizers` ranks the pair: pairs that make the same
    piece are adjacent, in the order of their own ids.
    """
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, index in vocab.items():
        if BYTE_PIECE.fullmatch(piece):
            continue  # Represents a byte that no piece covers; the same letters in a text are ordinary text.
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((ranks[index], vocab[left], vocab[right], (left, right)))
    merges.sort()
    return [pair for *_, pair in merges]


def byte_level_tokenizer(pieces: Sequence[str], merges: Sequence[str], *, rule: str) -> Tokenizer:
    """Build a byte-level BPE tokenizer that splits text into words by one of the `CUTTING_RULES` first."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    cutting = CUTTING_RULES[rule]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=cutting.takes_whole_words))
    if cutting.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[PreTokenizer] = []
    if cutting.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cutting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cutting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, pieces: Sequence[str], settings: TokenizerSettings, *, folder: Path) -> None:
    """Add the special tokens to the tokenizer and write it as a transformers tokenizer."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = sorted({*settings.special, *settings.roles.values()})
    tokenizer.add_special_tokens([AddedToken(pieces[index], normalized=False, special=True) for index in special])
    tokenizer.add_tokens([AddedToken(pieces[index], normalized=False) for index in settings.whole])
    assert tokenizer.get_vocab_size() == len(pieces), "an added token must be one of the pieces"
    names = {role: pieces[index] for role, index in settings.roles.items()}
    if settings.adds_bos:
        bos = names["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, settings.roles["bos_token"])]
        )
    complete = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=settings.context_length,
        clean_up_tokenization_spaces=False,
        **names,
    )
    if settings.chat_template is not None:
        complete.chat_template = settings.chat_template
    complete.save_pretrained(folder)
