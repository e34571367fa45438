"""Tiny random encoder-decoder models of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "init_std": 1.0,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "initializer_factor": 1.0,
    "dropout_rate": 0.0,
    "tie_word_embeddings": False,
}
WHISPER_SIZES: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "max_position_embeddings"},
    "num_mel_bins": 4,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}


def _made(name: str, sizes: dict[str, Any], **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def _marian() -> Any:
    return transformers.MarianMTModel(transformers.MarianConfig(**SIZES, forced_eos_token_id=None))


FAMILIES: dict[str, Callable[[], Any]] = {
    "t5": _made("T5", T5_SIZES),
    "t5-gated": _made("T5", T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=True),
    "mt5": _made("MT5", T5_SIZES),
    "umt5": _made("UMT5", T5_SIZES),
    "longt5": _made("LongT5", T5_SIZES, local_radius=3),
    "bart": _made("Bart", SIZES, forced_eos_token_id=None),
    "mbart": _made("MBart", SIZES, forced_eos_token_id=None),
    "plbart": _made("PLBart", SIZES, forced_eos_token_id=None),
    "marian": _marian,
    "pegasus": _made("Pegasus", SIZES, forced_eos_token_id=None),
    "blenderbot": _made("Blenderbot", SIZES, forced_eos_token_id=None),
    "blenderbot-small": _made("BlenderbotSmall", SIZES, forced_eos_token_id=None),
    "m2m100": _made("M2M100", SIZES),
    "whisper": _made("Whisper", WHISPER_SIZES),
}
TEXT_FAMILIES = tuple(name for name in FAMILIES if name != "whisper")


def sample(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of a family, whose greedy texts do not end after a few tokens."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval().to(dtype)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def sources(count: int, *, seed: int = 3) -> list[list[int]]:
    """Return token ids of sources of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (3 + 4 * place,), generator=generator).tolist() for place in range(count)]


def written_model(tokenizer: Any) -> Any:
    """Return a random T5 whose vocabulary is that of a tokenizer."""
    torch.manual_seed(5)
    sizes = {**T5_SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
