"""Conversion of an English Whisper model in CTranslate2's format, with its tokenizer after it, to a model folder."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from draftree.core.errors import ModelLoadError, UnsupportedModelError, panics_as_errors
from draftree.weights.cache import Progress
from draftree.weights.safetensors_file import write_safetensors

# Reading of a model file of CTranslate2, version 6.
#
# Layout, little-endian: version (uint32), name of the model's kind, its revision (uint32), number of variables
# (uint32); for each variable its name, rank (uint8), dimensions (uint32 each), type (uint8), number of bytes (uint32)
# and values; then the number of aliases (uint32) and for each two names. A name is a length (uint16) and so many bytes,
# the last one of which is 0.

VERSION = 6
TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


class Ctranslate2File:
    """A model file, and what follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.variables: dict[str, np.ndarray] = {}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._place = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise self.broken("it is truncated or no model of CTranslate2") from error

    def _read(self) -> None:
        version = self._number("I")
        if version != VERSION:
            raise UnsupportedModelError(
                f"'{self.path}' has version {version} of CTranslate2's format: {VERSION} is read"
            )
        self.kind, self.revision = self._name(), self._number("I")
        for _ in range(self._number("I")):
            name = self._name()
            shape = tuple(self._number("I") for _ in range(self._number("B")))
            code, size = self._number("B"), self._number("I")
            if code not in TYPES:
                raise UnsupportedModelError(f"'{self.path}': '{name}' has values of the unknown type {code}")
            if math.prod(shape) * np.dtype(TYPES[code]).itemsize != size:
                raise ValueError(name)
            start = self._place
            self._take(size)
            self.variables[name] = self._bytes[start : start + size].view(TYPES[code]).reshape(shape)
        self.aliases = {self._name(): self._name() for _ in range(self._number("I"))}
        self.rest = bytes(self._bytes[self._place :])  # the bytes after the model in the file

    def variable(self, name: str) -> np.ndarray:
        """Return the values of a variable as a view of the file."""
        if name not in self.variables:
            raise self.broken(f"'{name}' is missing")
        return self.variables[name]

    def values(self, name: str) -> np.ndarray:
        """Return a copy of the values of a variable, floating-point ones as float32."""
        values = self.variable(name)
        if values.dtype.kind != "f":
            return np.array(values)
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise self.broken(f"'{name}' has values that are not finite")
        return values

    def broken(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"'{self.path}' is damaged: {reason}")

    def _take(self, size: int) -> bytes:
        if self._place + size > len(self._bytes):
            raise ValueError(size)
        self._place += size
        return b"" if size > 1 << 16 else bytes(self._bytes[self._place - size : self._place])

    def _number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0])

    def _name(self) -> str:
        return self._take(self._number("H"))[:-1].decode("utf-8")


WHISPER_CONVERTER = "whisper-1"  # changes whenever the same file would convert to a different folder
NUM_TIMESTAMPS = 1501
SYMBOLS = (
    '"', "#", "(", ")", "*", "+", "/", ":", ";", "<", "=", ">", "@", "[", "\\", "]", "^", "_", "`", "{", "|", "}", "~",
    "「", "」", "『", "』", "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))",
    "[[", "]]", "{{", "}}", "♪♪", "♪♪♪", "♩", "♪", "♫", "♬", "♭", "♮", "♯",
)  # fmt: skip
"""Symbols of transcripts that are not spoken and never written (arXiv 2212.04356)."""


def convert_whisper(source: Path, folder: Path, *, progress: Progress) -> None:
    """Write configuration, weights (float32), tokenizer and feature extractor into the empty `folder`."""
    file = Ctranslate2File(source)
    if file.kind != "WhisperSpec":
        raise UnsupportedModelError(f"'{source}' holds a model of the kind '{file.kind}': WhisperSpec is read")
    config = _saved_configuration(file, folder, _saved_tokenizer(file, folder))
    parts = dict(_parts(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in parts.items():
        rows, *columns = file.variable(part.variable).shape
        shapes[name] = (rows // part.count, *columns)

    def read(name: str) -> np.ndarray:
        part = parts[name]
        return np.split(file.values(part.variable), part.count)[part.index]

    write_safetensors(folder / "model.safetensors", shapes, read, dtype="float32", progress=progress)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the equal parts of a variable's rows."""

    variable: str
    index: int = 0
    count: int = 1


def _parts(config: Any) -> Iterator[tuple[str, Part]]:
    """Yield each parameter of transformers' model, and where it is in the file."""

    def norm(name: str, source: str) -> Iterator[tuple[str, Part]]:
        yield f"{name}.weight", Part(f"{source}/gamma")
        yield f"{name}.bias", Part(f"{source}/beta")

    def rows(module: str, names: tuple[str, ...], source: str) -> Iterator[tuple[str, Part]]:
        """Yield the parameters of linear layers that are joined in the file; keys have no bias."""
        for index, name in enumerate(names):
            yield f"{module}.{name}.weight", Part(f"{source}/weight", index, len(names))
            if name != "k_proj":
                yield f"{module}.{name}.bias", Part(f"{source}/bias", index, len(names))

    yield "model.decoder.embed_tokens.weight", Part("decoder/embeddings/weight")
    for side, num_layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        model = f"model.{side}"
        yield f"{model}.embed_positions.weight", Part(f"{side}/position_encodings/encodings")
        yield from norm(f"{model}.layer_norm", f"{side}/layer_norm")
        for layer in range(num_layers):
            source = f"{side}/layer_{layer}"
            module = f"{model}.layers.{layer}"
            yield from norm(f"{module}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            yield from rows(f"{module}.self_attn", ("q_proj", "k_proj", "v_proj"), f"{source}/self_attention/linear_0")
            yield from rows(f"{module}.self_attn", ("out_proj",), f"{source}/self_attention/linear_1")
            if side == "decoder":
                yield from norm(f"{module}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
                yield from rows(f"{module}.encoder_attn", ("q_proj",), f"{source}/attention/linear_0")
                yield from rows(f"{module}.encoder_attn", ("k_proj", "v_proj"), f"{source}/attention/linear_1")
                yield from rows(f"{module}.encoder_attn", ("out_proj",), f"{source}/attention/linear_2")
            yield from norm(f"{module}.final_layer_norm", f"{source}/ffn/layer_norm")
            yield from rows(module, ("fc1",), f"{source}/ffn/linear_0")
            yield from rows(module, ("fc2",), f"{source}/ffn/linear_1")
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            yield f"model.encoder.{name}.{kind}", Part(f"encoder/{name}/{kind}")


def _saved_tokenizer(file: Ctranslate2File, folder: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        with panics_as_errors():
            backend = Tokenizer.from_str(file.rest.decode("utf-8"))
    except Exception as error:  # the library raises plain exceptions
        raise file.broken(f"the tokenizer after the model cannot be read ({error})") from error
    end = "<|endoftext|>"
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)
    made.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>", special=False) for step in range(NUM_TIMESTAMPS)])
    made.save_pretrained(folder)
    return made


def _saved_configuration(file: Ctranslate2File, folder: Path, tokenizer: Any) -> Any:
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(f"<|{name}|>"))

    vocab_size, width = file.variable("decoder/embeddings/weight").shape
    if vocab_size != len(tokenizer):
        raise UnsupportedModelError(
            f"'{file.path}' has {vocab_size} tokens and a tokenizer of {len(tokenizer)}: an English model is expected"
        )
    mels = file.variable("encoder/conv1/weight").shape[1]
    end = token("endoftext")
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    ids["decoder_start_token_id"] = token("startoftranscript")
    sizes: dict[str, Any] = {}
    for side, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        product = f"{side}/layer_{{}}/ffn/linear_0/weight"
        sizes |= {
            f"{side}_layers": next(layer for layer in count() if product.format(layer) not in file.variables),
            f"{side}_attention_heads": int(file.values(f"{side}/num_heads")),
            f"{side}_ffn_dim": file.variable(product.format(0)).shape[0],
            positions: file.variable(f"{side}/position_encodings/encodings").shape[0],
        }
    kind = "WhisperForConditionalGeneration"
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=width,
        num_mel_bins=mels,
        **sizes,
        **ids,
        architectures=[kind],
        dtype="float32",
    )
    config.save_pretrained(folder)
    GenerationConfig(
        **ids,
        max_length=sizes["max_target_positions"],
        begin_suppress_tokens=[tokenizer.encode(" ", add_special_tokens=False)[0], end],
        suppress_tokens=_suppressed(tokenizer, token),
        no_timestamps_token_id=token("notimestamps"),
        prev_sot_token_id=token("startofprev"),
        max_initial_timestamp_index=50,
        is_multilingual=False,
        return_timestamps=False,
    ).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=mels).save_pretrained(folder)
    return config


def _suppressed(tokenizer: Any, token: Any) -> list[int]:
    """Return the tokens that are never written: symbols that are not spoken, and control tokens."""
    tokens = {tokenizer.encode(" -", add_special_tokens=False)[0], tokenizer.encode(" '", add_special_tokens=False)[0]}
    for symbol in SYMBOLS:
        for text in (symbol, f" {symbol}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 or symbol in "♩♪♫♬♭♮♯":
                tokens.add(ids[0])
    control = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nocaptions")
    return sorted(tokens | {token(name) for name in control})
