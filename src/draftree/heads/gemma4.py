"""Assistants of Gemma 4: layers that attend to the target's own keys and values, and have none themselves.

A row is the target's embedding of a token beside its last hidden state before the token, after the final norm. Layers
with a window attend to the target's last layer with a window, the others to its last layer without one. All rows of a
tree have the position of the text's last token and see the text before it; no row sees another. The projected state of
a row is what its children read in place of the target's. Small assistants score the tokens of the best clusters only.

Source: transformers 5 (`gemma4_assistant`, `gemma4_unified_assistant`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.heads.base import Head, TargetParts
from draftree.heads.config import FULL, SLIDING, HeadConfig
from draftree.heads.layers import Norm, Perceptron, Rotary, Rotation, Shared
from draftree.heads.vocabulary import DraftVocabulary

AttendTarget = Callable[[int, Tensor], Tensor]
"""Attention to the target, by the window of a layer (0 for none) and rotated queries; scores are not scaled. Queries
and result have shape (rows, heads, head_dim)."""


@final
class QueryAttention(nn.Module):
    """Attention without keys and values of its own."""

    def __init__(self, config: HeadConfig, head_dim: int) -> None:
        super().__init__()
        width = config.num_heads * head_dim
        self.q_proj = nn.Linear(config.hidden, width, bias=config.attention_bias)
        self.q_norm = Norm(head_dim, config.epsilon)
        self.o_proj = nn.Linear(width, config.hidden, bias=config.attention_bias)
        self._heads = config.num_heads

    def forward(self, states: Tensor, rotated: Rotation, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output, shape (rows, hidden), from normed inputs of that shape."""
        query = self.q_norm(self.q_proj(states).unflatten(-1, (self._heads, -1)))
        return self.o_proj(attend(rotated(query)).flatten(-2))


@final
class AssistantLayer(nn.Module):
    """Decoder layer with norms before and after attention and perceptron."""

    layer_scalar: Tensor

    def __init__(self, config: HeadConfig, window: int) -> None:
        super().__init__()
        self.window = window
        self.self_attn = QueryAttention(config, config.head_dim if window else config.layer["global_head_dim"])
        self.mlp = Perceptron(config)
        self.input_layernorm = Norm(config.hidden, config.epsilon)
        self.post_attention_layernorm = Norm(config.hidden, config.epsilon)
        self.pre_feedforward_layernorm = Norm(config.hidden, config.epsilon)
        self.post_feedforward_layernorm = Norm(config.hidden, config.epsilon)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, rotated: Rotation, attend: AttendTarget) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), rotated, lambda query: attend(self.window, query))
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


@final
class Clusters(nn.Module):
    """Output over the tokens of the best clusters; all clusters have one size."""

    token_ordering: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._best = config.layer["centroid_intermediate_top_k"]
        self.centroids = nn.Linear(config.hidden, config.layer["num_centroids"], bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.int64))

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """Return logits, shape (rows, vocabulary); tokens of other clusters are below all others."""
        best = self.centroids(states).topk(self._best, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(1)
        scores = torch.einsum("rh,rth->rt", states, F.embedding(tokens, output))
        rest = scores.min(dim=-1, keepdim=True).values - 1
        return rest.expand(-1, len(output)).scatter(-1, tokens, scores)


@final
class AssistantHead(Head):
    """Head of kind `gemma4-assistant`."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)  # the output head
        self.pre_projection = nn.Linear(2 * config.target_hidden, config.hidden, bias=False)
        self.post_projection = nn.Linear(config.hidden, config.target_hidden, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(config, window) for window in config.windows)
        self.norm = Norm(config.hidden, config.epsilon)
        self.masked_embedding = Clusters(config) if config.layer["num_centroids"] else None
        dims = {SLIDING: config.head_dim, FULL: config.layer["global_head_dim"]}
        self._rotary = {kind: Rotary(config.rope[kind], dim, config.max_length) for kind, dim in dims.items()}
        self._shared: Shared | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.pre_projection.weight.dtype

    def bind(self, parts: TargetParts) -> None:
        """Set embedding and final norm of the target."""
        self.require_target(parts)
        self._shared = Shared(parts, self.vocabulary, None, self.embed_tokens.weight)
        self._finish = parts.finish

    def project(self, features: Tensor) -> Tensor:
        """Return states before the tokens that follow, shape (rows, target hidden), as `FeatureHead.project`."""
        assert self._finish is not None, "a head is bound to a target before it runs"
        return self._finish(features[..., 0, :]).to(self.dtype)

    def run(self, tokens: Tensor, before: Tensor, positions: Tensor, attend: AttendTarget) -> Tensor:
        """Return the states of rows, shape (rows, hidden).

        Args:
            tokens: token ids, shape (rows,).
            before: states before the tokens, from `project` or `recycle`, shape (rows, target hidden).
            positions: position of the last token of each row's text, shape (rows,).
            attend: attention to the target.
        """
        assert self._shared is not None, "a head is bound to a target before it runs"
        embedded = self._shared.embed(tokens).to(self.dtype)
        x = self.pre_projection(torch.cat((embedded, before), dim=-1))
        angles = {kind: _rotation(rotary, positions, x) for kind, rotary in self._rotary.items()}
        for layer in self.layers:
            assert isinstance(layer, AssistantLayer)
            x = layer(x, angles[SLIDING if layer.window else FULL], attend)
        return self.norm(x)

    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, shape (rows, target hidden)."""
        return self.post_projection(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the next tokens, shape (rows, vocabulary), float32."""
        if self.masked_embedding is not None:
            return self.masked_embedding(states, self.embed_tokens.weight).float()
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared.logits(states)


def _rotation(rotary: Rotary, positions: Tensor, like: Tensor) -> Rotation:
    """Return the rotation at some positions; tables up to the last one would be large."""
    frequencies = torch.tensor(rotary.frequencies, device=like.device)
    angles = (positions[:, None].float() * frequencies)[:, None]
    cosines, sines = angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
    return Rotation(torch.cat((cosines, cosines), -1).to(like.dtype), torch.cat((-sines, sines), -1).to(like.dtype))
