"""Sources that a model of transformers reads, and the reference of its self-check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.models.check import PREFIX_LENGTH, TREE_PARENTS, ReferenceLogits, branch_logits
from draftree.models.source import FeatureSource, HiddenSource, Source, TokenSource
from draftree.models.torch.inspection import UNBOUNDED

PROBE_TOKENS = 6  # length of the source of checks


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts about the sources of a model; attributes as in `EncoderDecoder`."""

    source_vocab_size: int
    max_source_length: int
    feature_shape: tuple[int, int] | None
    probe_source: Source


def source_facts(model: Any) -> SourceFacts:
    config, name = model.config, model.main_input_name
    if name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        positions = int(config.max_source_positions)
        shape = (int(config.num_mel_bins), 2 * positions)
        wave = np.sin(np.arange(shape[0] * shape[1], dtype=np.float32) * 0.37).reshape(shape)
        return SourceFacts(0, positions, shape, FeatureSource(wave))
    if name != "input_ids":
        raise UnsupportedModelError(
            f"{type(model).__name__} reads {name}: use a model that reads token ids, or features as Whisper does"
        )
    pad = getattr(config, "pad_token_id", None)
    ids = [token for token in range(PROBE_TOKENS + 8) if token != pad][3:]
    return SourceFacts(int(config.vocab_size), _positions(model), None, TokenSource(tuple(ids[:PROBE_TOKENS])))


def _positions(model: Any) -> int:
    table = getattr(model.get_encoder(), "embed_positions", None)
    if isinstance(table, nn.Embedding):
        return int(table.weight.shape[0]) - int(getattr(table, "offset", 0))
    return UNBOUNDED if table is None else int(model.config.max_position_embeddings)


def encoder_input(source: Source, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a source as the encoder takes it: ids of shape (1, length), or features of shape (1, channels, frames)."""
    assert not isinstance(source, HiddenSource), "the encoder has read it"
    if isinstance(source, FeatureSource):
        return torch.from_numpy(source.features)[None].to(device, dtype)
    return torch.tensor([source.tokens], device=device)


def require_source(source: Source, feature_shape: tuple[int, int] | None, *, kind: str) -> None:
    if isinstance(source, HiddenSource):
        return
    wanted = "token ids" if feature_shape is None else f"features of shape {feature_shape}"
    if isinstance(source, FeatureSource):
        if source.features.shape != feature_shape:
            raise InvalidRequestError(
                f"the source has shape {source.features.shape}: {kind} reads {wanted}", param="source"
            )
    elif feature_shape is not None or not source.tokens:
        wanted = "at least one token" if feature_shape is None else wanted
        raise InvalidRequestError(
            f"the source has {len(source.tokens)} token ids: {kind} reads {wanted}", param="source"
        )


@torch.inference_mode()
def encoded_probe(model: Any) -> Tensor:
    """Return the encoder's hidden states of the probe source, shape (1, length, hidden), in the model's dtype."""
    inputs = encoder_input(source_facts(model).probe_source, model.device, next(model.parameters()).dtype)
    return model.get_encoder()(inputs).last_hidden_state


@torch.inference_mode()
def reference_logits(model: Any, hidden: Tensor | None = None) -> ReferenceLogits:
    """Score every branch on the probe source, or on its hidden states, by the model's own forward pass."""
    if hidden is None:
        probe = source_facts(model).probe_source
        inputs: dict[str, Any] = {
            model.main_input_name: encoder_input(probe, model.device, next(model.parameters()).dtype)
        }
    else:
        from transformers.modeling_outputs import BaseModelOutput

        inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden)}
    pad, vocab = getattr(model.config, "pad_token_id", None), int(model.config.vocab_size)
    # not the padding token: without a cache some families number the tokens after it differently
    usable = [token for token in range(3, vocab) if token != pad] or [0]
    step = max(1, len(usable) // 17)
    ids = tuple(usable[(7 + step * place) % len(usable)] for place in range(PREFIX_LENGTH + len(TREE_PARENTS)))
    return branch_logits(
        ids, lambda tokens: model(**inputs, decoder_input_ids=tokens.to(model.device), use_cache=False).logits
    )
