"""Students of a distillation before training: new ones, given models, and given models with another vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftree.core.errors import ConfigurationError
from draftree.loading.resolve import resolve_model
from draftree.text.retokenize import compare_vocabularies, lexicon_of
from draftree.text.tokenizer import Tokenizer
from draftree.train.preparing import Prepared
from draftree.train.settings import TrainSettings
from draftree.train.transplant import spell_vocabulary, transplant

__all__ = ["StudentOptions", "new_student"]


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """Options of a student.

    Attributes:
        start: name of a model that training starts from; None for a new one of the sizes below.
        hidden: width.
        layers: number of layers.
        heads: number of attention heads.
        intermediate: inner width of perceptrons; None for 8/3 of the width, rounded up to 32.
        kept_layers: number of layers of the given model that stay; None for all.
    """

    start: str | None = None
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    intermediate: int | None = None
    kept_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "intermediate", "kept_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}: it must be at least 1")
        if self.kept_layers is not None and self.start is None:
            raise ConfigurationError(
                f"kept_layers is {self.kept_layers}, but no model is given to keep layers of: give --from, or --layers "
                "for a new model"
            )
        if self.hidden % (2 * self.heads):
            raise ConfigurationError(
                f"hidden is {self.hidden} and heads is {self.heads}: each head must have an even width, so hidden must "
                "be a multiple of twice the heads"
            )


def new_student(
    prepared: Prepared,
    settings: TrainSettings,
    options: StudentOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
) -> Any:
    """Return the student before training, in the dtype of computation.

    Its context is the longest text that it is trained on, or that of the given model if it is longer: distances of
    rotary positions that were never trained on are not reliable. In longer texts, drafter `model` reads the last part.

    Args:
        prepared: the inputs of the run.
        settings: its settings.
        options: the student.
        note: called with lines about decisions.

    Raises:
        ConfigurationError: a given model cannot get the target's vocabulary, or has fewer layers than are to be kept.
    """
    context = longest_text(prepared, settings.max_length)
    if options.start is None:
        student = fresh_student(prepared, settings.seed, options, context)
    else:
        student = started_student(prepared, options.start, note)
        if options.kept_layers is not None:
            keep_layers(student, options.kept_layers)
        context = extend_context(student, options.start, context)
    note(f"the student reads up to {context:,} tokens at a time, and the last part of longer texts")
    return student.to(device=prepared.processes.device, dtype=prepared.dtype)


def extend_context(student: Any, name: str, wanted: int) -> int:
    """Let a given model read at least so many tokens; return how many it reads.

    Raises:
        ConfigurationError: it reads fewer, and its positions are not rotary.
    """
    own = int(getattr(student.config, "max_position_embeddings", wanted))
    if own >= wanted:
        return own
    if not getattr(student.config, "rope_parameters", None):
        raise ConfigurationError(
            f"'{name}' reads {own} tokens, and the longest text of the data has {wanted}: cut the texts with "
            f"--max-length {own}, or choose a model with rotary positions"
        )
    student.config.max_position_embeddings = wanted
    return wanted


def longest_text(prepared: Prepared, max_length: int | None) -> int:
    """Return the number of tokens of the longest text of the data, after the cut to `max_length`."""
    longest = max(len(prepared.data[number].tokens) for number in (*prepared.seen, *prepared.unseen))
    return longest if max_length is None else min(longest, max_length)


def fresh_student(prepared: Prepared, seed: int, options: StudentOptions, context: int) -> Any:
    """Return a llama of the given sizes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = prepared.config
    torch.manual_seed(seed)
    rope = getattr(config, "rope_parameters", None) or {}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=prepared.parts.vocab_size,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.heads,
            intermediate_size=options.intermediate or 32 * -(-8 * options.hidden // 96),
            max_position_embeddings=context,
            rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
            tie_word_embeddings=True,
            **special_ids(config),
        )
    )


def special_ids(config: Any) -> dict[str, Any]:
    """Return the special tokens of a configuration."""
    return {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def started_student(prepared: Prepared, start: str, note: Callable[[str], None]) -> Any:
    """Return a given model with the target's vocabulary, in float32.

    Raises:
        ConfigurationError: the vocabularies differ and cannot be compared.
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_model(start)
    student: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    adopt_vocabulary(student, start, folder, prepared, note)
    return student


def adopt_vocabulary(student: Any, name: str, folder: Path, prepared: Prepared, note: Callable[[str], None]) -> None:
    """Give a model the target's vocabulary if it has another one.

    Raises:
        ConfigurationError: it has another one, and a tokenizer is missing.
    """
    width, wanted = student.get_output_embeddings().weight.shape[0], prepared.parts.vocab_size
    assert prepared.loaded.folder is not None, "checked when its configuration was read"
    own, target = Tokenizer.load(folder), Tokenizer.load(prepared.loaded.folder)
    if own is None or target is None:
        if width != wanted:
            raise ConfigurationError(
                f"'{name}' has {width} tokens and the target {wanted}, and there are no two tokenizers to compare: "
                "choose a model with the target's tokens, or leave out --from for a new one"
            )
        return
    if width == wanted and compare_vocabularies(target.vocabulary(), own.vocabulary()).same:
        return
    spelling = spell_vocabulary(lexicon_of(target), lexicon_of(own), size=wanted)
    transplant(student, spelling)
    for key, value in special_ids(prepared.config).items():
        setattr(student.config, key, value)
    note(
        f"'{name}' has other tokens: {spelling.shared:,} of the target's {wanted:,} keep its weights, the others start "
        "as means of the tokens that spell them"
    )


def keep_layers(student: Any, count: int) -> None:
    """Keep some layers of a model, evenly spaced and with the first and the last, in place.

    Raises:
        ConfigurationError: the model has fewer layers, or its layers cannot be removed.
    """
    decoder = student.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(f"the layers of a '{student.config.model_type}' model cannot be removed: keep all")
    if count > len(layers):
        raise ConfigurationError(f"kept_layers is {count}, but the given model has {len(layers)} layers")
    last = len(layers) - 1
    chosen = [round(place * last / max(1, count - 1)) for place in range(count)]
    decoder.layers = nn.ModuleList(layers[place] for place in chosen)
    for place, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = place
    student.config.num_hidden_layers = count
    kinds = getattr(student.config, "layer_types", None)
    if kinds is not None:
        student.config.layer_types = [kinds[place] for place in chosen]
