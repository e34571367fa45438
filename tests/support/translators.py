"""Tiny random translation models with the multilingual tokenizers of NLLB and mBART. Not a test itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from seq2seq_samples import SIZES

CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz.:"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
CODES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE")}


@cache
def tokenizer(kind: str) -> Any:
    """A tokenizer of single characters with the languages of its kind, "nllb" or "mbart"."""
    pieces = [*SPECIAL, *CHARACTERS]
    if kind == "nllb":
        return transformers.NllbTokenizer(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[])
    return transformers.MBartTokenizer(vocab=[(piece, -1.0) for piece in pieces])


@cache
def translator(kind: str) -> Any:
    """A model of the tokenizer's kind; that of mBART begins with the token of a language, as mbart-large-en-ro does."""
    own = tokenizer(kind)
    start = 2 if kind == "nllb" else own.convert_tokens_to_ids("ro_RO")
    sizes = {**SIZES, "vocab_size": len(own), "decoder_start_token_id": start, "forced_eos_token_id": None}
    name = "M2M100" if kind == "nllb" else "MBart"
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def translated(kind: str, text: str, *, source: str, target: str, length: int) -> list[int]:
    """Return the tokens that transformers generates after the token of the target language."""
    own, model = tokenizer(kind), translator(kind)
    before, own.src_lang = own.src_lang, source
    ids = own(text, return_tensors="pt").input_ids
    own.src_lang = before
    token = own.convert_tokens_to_ids(target)
    start = {"forced_bos_token_id": token} if kind == "nllb" else {"decoder_start_token_id": token}
    num_before = 2 if kind == "nllb" else 1
    found = model.generate(ids, **start, do_sample=False, num_beams=1, max_length=num_before + length)
    assert found[0, num_before - 1] == token
    return found[0, num_before:].tolist()


def saved(kind: str, folder: Path) -> Path:
    """Write model and tokenizer into a folder."""
    translator(kind).save_pretrained(folder)
    tokenizer(kind).save_pretrained(folder)
    return folder
