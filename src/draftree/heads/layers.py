"""Decoder layers of heads, as in Llama and Qwen3, for training and decoding.

The names of modules are those of tensors in the layout of speculators. Norms compute in float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.heads.base import Attend
from draftree.heads.config import HeadConfig
from draftree.heads.rotary import Rotation

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda inner: F.gelu(inner, approximate="tanh"),
    "relu": F.relu,
}


@final
class Norm(nn.Module):
    """Root mean square norm with a gain.

    Args:
        width: width of its input.
        epsilon: added to the mean square.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Return normed states, same shape and dtype."""
        return F.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@final
class Attention(nn.Module):
    """Attention with grouped heads; which rows attend to which is decided by `Attend`.

    Args:
        config: of the head.
        width: width of its input; the output has the head's width.
        layer: index of the layer.
    """

    def __init__(self, config: HeadConfig, width: int, layer: int) -> None:
        super().__init__()
        self._dim, self._layer = config.head_dim, layer
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None

    def forward(
        self,
        states: Tensor,
        rotated: Rotation,
        attend: Attend,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Return the output of attention.

        Args:
            states: normed inputs, shape (..., rows, width).
            rotated: rotation of queries and keys by the positions of the rows, or of the given ones.
            attend: attention of the rows.
            chosen: rows with queries; None for all.

        Returns:
            Shape (..., rows, hidden).
        """
        shape = (*states.shape[:-1], -1, self._dim)
        asking = states if chosen is None else states.index_select(-2, chosen)
        query, key = self.q_proj(asking).view(*asking.shape[:-1], -1, self._dim), self.k_proj(states).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attend(self._layer, rotated(query, chosen), rotated(key), self.v_proj(states).view(shape))
        found: Tensor = self.o_proj(mixed.flatten(-2))
        return found


@final
class Perceptron(nn.Module):
    """Gated multilayer perceptron.

    Args:
        config: of the head.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)
        self._function = FUNCTIONS[config.activation]

    def forward(self, states: Tensor) -> Tensor:
        """Return its output, same shape."""
        found: Tensor = self.down_proj(self._function(self.gate_proj(states)) * self.up_proj(states))
        return found


@final
class Layer(nn.Module):
    """Decoder layer.

    Args:
        config: of the head.
        index: index of the layer.
        joins: whether the attention reads the norm of the embedding and the norm of the state before, concatenated, as
            in the first layer of EAGLE-3.
        has_input_norm: whether there is a norm before the attention; the first layer of EAGLE-1 has none.
    """

    def __init__(self, config: HeadConfig, index: int, *, joins: bool = False, has_input_norm: bool = True) -> None:
        super().__init__()
        width, epsilon = config.hidden, config.epsilon
        self._norm_first = config.norm_before_residual
        self.input_layernorm = Norm(width, epsilon) if has_input_norm else None
        self.hidden_norm = Norm(width, epsilon) if joins else None
        self.self_attn = Attention(config, 2 * width if joins else width, index)
        self.post_attention_layernorm = Norm(width, epsilon)
        self.mlp = Perceptron(config)

    def forward(
        self,
        states: Tensor,
        embedded: Tensor,
        rotated: Rotation,
        attend: Attend,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            states: residual stream before it, shape (..., rows, hidden).
            embedded: embeddings of the tokens, same shape; read only if the layer joins both.
            rotated: rotation of queries and keys by the positions of the rows, or of the given ones.
            attend: attention of the rows.
            chosen: rows whose residual stream is returned; None for all.
        """
        normed = states if self.input_layernorm is None else self.input_layernorm(states)
        if self.hidden_norm is not None and self.input_layernorm is not None:
            own = self.hidden_norm(states)
            states = own if self._norm_first else states
            normed = torch.cat((self.input_layernorm(embedded), own), dim=-1)
        kept = states if chosen is None else states.index_select(-2, chosen)
        states = kept + self.self_attn(normed, rotated, attend, chosen)
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found
