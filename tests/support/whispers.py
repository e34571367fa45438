"""Tiny random Whisper models with the tokens and the generation configuration of the real ones. Not a test itself."""

from __future__ import annotations

import io
import math
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from seq2seq_samples import WHISPER_SIZES
from text_backends import byte_level

NAMES = ("endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startofprev", "nospeech")
STEPS = 50
"""Number of steps of timestamps, each 0.02 seconds."""
SHAPE = (4, 2 * STEPS)
RATE = 16000


@cache
def tokenizer() -> Any:
    """A tokenizer of bytes with Whisper's tokens after those of text."""
    made = byte_level(chat_template=None)
    special = [f"<|{name}|>" for name in (*NAMES, "notimestamps")]
    made.add_tokens([AddedToken(token, special=True) for token in special], special_tokens=True)
    made.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>", special=False) for step in range(STEPS + 1)])
    return made


def token(name: str) -> int:
    """Return the id of one of Whisper's tokens."""
    return int(tokenizer().convert_tokens_to_ids(f"<|{name}|>"))


def whisper(*, seed: int = 0, encoder_layers: int = 2, decoder_layers: int = 2, sharpness: float = 1.0) -> Any:
    """Return a random model; a larger sharpness makes likely tokens more likely."""
    torch.manual_seed(seed)
    end = token("endoftext")
    sizes = {
        **WHISPER_SIZES,
        "vocab_size": len(tokenizer()),
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": token("startoftranscript"),
        "max_source_positions": STEPS,
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.proj_out.weight.mul_(sharpness)
    configure(model)
    return model


def configure(model: Any) -> None:
    """Set the generation configuration as checkpoints have it."""
    config, end = model.generation_config, token("endoftext")
    values = {
        "decoder_start_token_id": token("startoftranscript"),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "lang_to_id": {f"<|{code}|>": token(code) for code in ("en", "de", "fr")},
        "task_to_id": {name: token(name) for name in ("translate", "transcribe")},
        "is_multilingual": True,
        "no_timestamps_token_id": token("notimestamps"),
        "prev_sot_token_id": token("startofprev"),
        "max_initial_timestamp_index": 10,
        "max_length": 60,
        "begin_suppress_tokens": [tokenizer().encode(" ")[0], end],
        "suppress_tokens": [7, 9, 11, *(token(name) for name in NAMES[1:])],
        "return_timestamps": False,
    }
    for name, value in values.items():
        setattr(config, name, value)
    config._from_model_config = False  # otherwise it is not saved


def features(count: int, *, seed: int = 4) -> list[np.ndarray]:
    """Return random features."""
    return list(np.random.default_rng(seed).normal(size=(count, *SHAPE)).astype(np.float32))


def saved(folder: Path, **given: Any) -> Path:
    """Write model, tokenizer and feature extractor into a folder."""
    whisper(**given).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=4, sampling_rate=RATE, hop_length=160, chunk_length=1)
    extractor.save_pretrained(folder)
    return folder


def samples(seconds: float, *, rate: int = RATE) -> np.ndarray:
    """Return a sound of several tones, float32."""
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * math.pi * frequency * times) for frequency in (220.0, 330.0, 1200.0))
    return (0.2 * tones).astype(np.float32)


def wav(values: np.ndarray, *, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """Return samples as a WAV file with samples of this many bytes, the same on all channels."""
    scaled = np.clip(values, -1, 1) * (2 ** (8 * width - 1) - 1)
    whole = np.repeat(scaled.astype(np.int32)[:, None], channels, axis=1)
    if width == 1:
        raw = (whole + 128).astype(np.uint8).tobytes()
    elif width == 3:
        raw = whole.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        raw = whole.astype(f"<i{width}").tobytes()
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setnchannels(channels)
            writer.setsampwidth(width)
            writer.setframerate(rate)
            writer.writeframes(raw)
        return file.getvalue()
