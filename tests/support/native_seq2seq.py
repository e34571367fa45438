"""Tiny encoder-decoder models of the sizes that native kernels support. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from draftree.loading.lowering import lower_encoder_decoder
from draftree.models.native.seq2seq.model import NativeEncoderDecoder
from seq2seq_samples import SIZES, T5_SIZES, WHISPER_SIZES

CONTEXT = 300
WIDE: dict[str, Any] = {
    "d_model": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
}
BART: dict[str, Any] = {**SIZES, **WIDE, "max_position_embeddings": CONTEXT, "forced_eos_token_id": None}
T5: dict[str, Any] = {**T5_SIZES, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
WHISPER: dict[str, Any] = {**WHISPER_SIZES, **WIDE, "max_target_positions": CONTEXT}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}


def _made(name: str, sizes: dict[str, Any], **more: Any) -> Callable[[], Any]:
    kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    return lambda: getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**{**sizes, **more}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "t5": _made("T5", T5),
    "t5-gated": _made("T5", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=True),
    "mt5": _made("MT5", T5, feed_forward_proj="gated-gelu"),
    "umt5": _made("UMT5", T5),
    "longt5": _made("LongT5", T5, local_radius=3),
    "bart": _made("Bart", BART),
    "bart-tied": _made("Bart", BART, tie_word_embeddings=True, scale_embedding=True),
    "mbart": _made("MBart", BART, scale_embedding=True),
    "plbart": _made("PLBart", BART, activation_function="relu"),
    "marian": _made("Marian", BART, activation_function="swish", scale_embedding=True),
    "pegasus": _made("Pegasus", BART, activation_function="relu"),
    "blenderbot": _made("Blenderbot", BART),
    "blenderbot-small": _made("BlenderbotSmall", BART),
    "m2m100": _made("M2M100", BART, activation_function="relu", scale_embedding=True),
    "whisper": _made("Whisper", WHISPER),
}


def model_of(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of a family; biases and norms count, and so does the bias of the logits."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.1))
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.normal_()
    return model.to(dtype)


def lowered(name: str, kind: str = "float32", *, seed: int = 0) -> NativeEncoderDecoder:
    model = model_of(name, seed=seed, dtype=DTYPES[kind])
    return lower_encoder_decoder(model, name, quantization=kind if kind in ("int8", "int4") else None)


@functools.cache
def native(name: str, kind: str = "float32") -> NativeEncoderDecoder:
    return lowered(name, kind)


def folder_of(name: str, where: Path, *, seed: int = 0) -> Path:
    """Write a model into a folder."""
    model_of(name, seed=seed).save_pretrained(where / name)
    return where / name
