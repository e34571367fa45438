"""Layers of heads: norms, attention, perceptrons, rotary positions, and what a head shares with its target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import ModelLoadError
from draftree.heads.base import Attend, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.vocabulary import DraftVocabulary

FIRST_LENGTH = 1024


@final
class Rotary:
    """Rotary positions with the parameters of a configuration of transformers."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_length: int) -> None:
        kind = rope.get("rope_type", "default")
        if kind not in _FORMULAS:
            known = ", ".join(_FORMULAS)
            raise ModelLoadError(f"head: rotary positions of type '{kind}' are not supported: {known} are")
        self._frequencies, self._scaling = _frequencies(rope, head_dim, max_length)
        self._max_length = max_length
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per position for each pair of numbers."""
        return tuple(self._frequencies.tolist())

    @property
    def scaling(self) -> float:
        """Factor of cosines and sines."""
        return self._scaling

    def tables_at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return tables that have the positions; on a device up to the maximum, since to read the last one waits."""
        length = self._max_length
        if positions.device.type == "cpu":
            length = int(positions.max()) + 1 if positions.numel() else 1
        return self.tables(length, like)

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least the positions below `length`, both of shape (positions, head_dim).

        Device and dtype are those of `like`. The first half of the sines is negative, as `rotate` needs it.
        """
        key = (like.device, like.dtype)
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < length:
            tables = self._tables[key] = self._made(max(FIRST_LENGTH, 2 * length), like)
        return tables

    def _made(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # tensors of inference mode could not be used in training later
        with torch.inference_mode(False), torch.no_grad():
            angles = torch.arange(length, dtype=torch.float64)[:, None] * self._frequencies.double()[None]
            cosines, sines = angles.cos() * self._scaling, angles.sin() * self._scaling
            both = torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)
            first, second = (table.to(like.device, like.dtype) for table in both)
            return first, second


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return rotated queries or keys (..., rows, heads, head_dim), by cosines and sines (..., rows, 1, head_dim)."""
    half = states.shape[-1] // 2
    return states * cosines + states.roll(half, dims=-1) * sines


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotation of the queries and keys of some rows; both tables have shape (..., rows, 1, head_dim)."""

    cosines: Tensor
    sines: Tensor

    def __call__(self, states: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return rotated queries or keys of all rows, or of some, given by their indices."""
        if rows is None:
            return rotate(states, self.cosines, self.sines)
        return rotate(states, self.cosines.index_select(-3, rows), self.sines.index_select(-3, rows))


def _frequencies(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Return radians per position for each pair of numbers, float32, and the factor of cosines and sines."""
    try:
        # a head may be built on the meta device, and is filled later
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            frequencies, scaling = _FORMULAS[rope.get("rope_type", "default")](rope, head_dim, max_length)
            if not (frequencies.isfinite().all() and math.isfinite(scaling)):
                raise ValueError("a frequency is infinite or undefined")
            return frequencies, scaling
    except (KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as reason:
        raise ModelLoadError(f"head: its rotary positions {dict(rope)} cannot be used: {reason!r}") from reason


# The operations below have the order of those in transformers, so that the frequencies have the same bits.


def _wavelengths(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return positions per radian without scaling: theta^(2i / d)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return rope.get("rope_theta", 10000.0) ** exponents


def _default(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def _linear(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, head_dim) / rope["factor"], 1.0


def _llama3(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, and interpolate those between.

    Source: Llama 3.1, `apply_scaling` of its reference code.
    """
    frequencies = 1.0 / _wavelengths(rope, head_dim)
    factor = rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    trained = rope.get("original_max_position_embeddings", max_length)
    periods = 2 * math.pi / frequencies
    divided = torch.where(periods > trained / low, frequencies / factor, frequencies)
    weight = (trained / periods - low) / (high - low)
    between = (periods >= trained / high) & (periods <= trained / low)
    return torch.where(between, (1 - weight) * divided / factor + weight * divided, divided), 1.0


def _yarn(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, with a linear ramp to high ones, which are kept.

    Source: YaRN, arXiv 2309.00071: `beta_fast` and `beta_slow` are its beta and alpha, `scaling` its sqrt(1 / t).
    """
    trained = rope.get("original_max_position_embeddings", max_length)
    factor = max_length / trained if rope["factor"] is None else rope["factor"]
    wavelengths = _wavelengths(rope, head_dim)

    def index_with(rotations: float) -> float:
        """Return the (real) index of the number that rotates so often within the trained length."""
        theta = rope.get("rope_theta", 10000.0)
        return (head_dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    first, last = index_with(rope.get("beta_fast") or 32), index_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    scaling = rope.get("attention_factor")
    return frequencies, float(_yarn_scaling(rope, factor) if scaling is None else scaling)


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1)


def _proportional(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Rotate only the first pairs of numbers, as in Gemma 4."""
    frequencies = 1.0 / _wavelengths(rope, head_dim)
    frequencies[int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2) :] = 0.0
    return frequencies / rope.get("factor", 1.0), 1.0


def _longrope(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor for sequences of the trained length.

    Source: LongRoPE, arXiv 2402.13753.
    """
    trained = rope.get("original_max_position_embeddings", max_length)
    factors = torch.tensor(rope["short_factor"], dtype=torch.float32)
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"short_factor has {factors.numel()} numbers instead of {head_dim // 2}")
    frequencies = 1.0 / (factors * _wavelengths(rope, head_dim))
    scaling = rope.get("attention_factor")
    factor = rope.get("factor")
    if scaling is None:
        factor = max_length / trained if factor is None else factor
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return frequencies, float(scaling)


_FORMULAS: Mapping[str, Callable[[Mapping[str, Any], int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""Types of rotary positions whose frequencies do not depend on the length of a sequence."""


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda inner: F.gelu(inner, approximate="tanh"),
    "relu": F.relu,
}


@final
class Norm(nn.Module):
    """Root mean square norm with a gain."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Return normed states, same shape and dtype."""
        return F.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class Products(nn.Module):
    """Linear layers before and after attention, with norms of queries and keys if the head has them."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self._shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None

    def query(self, x: Tensor) -> Tensor:
        """Return queries before rotation, shape (..., rows, heads, head_dim)."""
        queries = self.q_proj(x).unflatten(-1, (self._shape[0], self._shape[2]))
        return queries if self.q_norm is None else self.q_norm(queries)

    def key(self, x: Tensor) -> Tensor:
        """Return keys before rotation, shape (..., rows, kv_heads, head_dim)."""
        keys = self.k_proj(x).unflatten(-1, (self._shape[1], self._shape[2]))
        return keys if self.k_norm is None else self.k_norm(keys)

    def value(self, x: Tensor) -> Tensor:
        """Return values, shape (..., rows, kv_heads, head_dim)."""
        return self.v_proj(x).unflatten(-1, (self._shape[1], self._shape[2]))

    def out(self, mixed: Tensor) -> Tensor:
        """Return the output of attention, from shape (..., rows, heads, head_dim)."""
        return self.o_proj(mixed.flatten(-2))


@final
class Attention(Products):
    """Attention with grouped heads; which rows attend to which is decided by `Attend`."""

    def __init__(self, config: HeadConfig, width: int, layer: int) -> None:
        super().__init__(config, width)
        self._layer = layer

    def forward(self, states: Tensor, rotated: Rotation, attend: Attend, chosen: Tensor | None = None) -> Tensor:
        """Return the output (..., rows, hidden) for the `chosen` rows, from normed inputs (..., rows, width)."""
        asking = states if chosen is None else states.index_select(-2, chosen)
        query = rotated(self.query(asking), chosen)
        return self.out(attend(self._layer, query, rotated(self.key(states)), self.value(states)))


@final
class Perceptron(nn.Module):
    """Gated multilayer perceptron."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)
        self._function = FUNCTIONS[config.activation]

    def forward(self, states: Tensor) -> Tensor:
        """Return its output, same shape."""
        return self.down_proj(self._function(self.gate_proj(states)) * self.up_proj(states))


@final
class Layer(nn.Module):
    """Decoder layer.

    If it `joins`, its attention reads the norm of the embedding and the norm of the state before, concatenated, as in
    the first layer of EAGLE-3. The first layer of EAGLE-1 has no norm before the attention.
    """

    def __init__(self, config: HeadConfig, index: int, *, joins: bool = False, has_input_norm: bool = True) -> None:
        super().__init__()
        width = config.hidden
        epsilon = config.epsilon
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
        """Return the residual stream of the `chosen` rows after the layer, from that before it, (..., rows, hidden)."""
        normed = states if self.input_layernorm is None else self.input_layernorm(states)
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed_states = self.hidden_norm(states)
            states = normed_states if self._norm_first else states
            normed = torch.cat((self.input_layernorm(embedded), normed_states), dim=-1)
        kept = states if chosen is None else states.index_select(-2, chosen)
        states = kept + self.self_attn(normed, rotated, attend, chosen)
        return states + self.mlp(self.post_attention_layernorm(states))


class Shared:
    """Embedding (vocabulary, hidden) and output (draft vocabulary, hidden) of a head: its own, or the target's.

    `scale` is the factor of embeddings; `facts` and `bias` are those of the target's output, None for an own one.
    """

    def __init__(
        self, parts: TargetParts, vocabulary: DraftVocabulary, embedding: Tensor | None, output: Tensor | None
    ) -> None:
        self.embedding = parts.embedding if embedding is None else embedding
        self.scale = parts.facts.embedding_scale if embedding is None else 1.0
        self.facts = parts.facts if output is None else None
        ids = vocabulary.ids.to(parts.output.device)
        if output is None:
            output = parts.output if vocabulary.is_full else parts.output[ids]
        self.output = output
        bias = None if self.facts is None else self.facts.bias
        self.bias = bias if bias is None or vocabulary.is_full else bias[ids.to(bias.device)]

    def forget_output(self) -> None:
        """Forget the output, which another copy replaces; `logits` cannot run then."""
        self.output = self.output.new_empty(0)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings, shape (..., hidden)."""
        embeddings = F.embedding(tokens, self.embedding)
        return embeddings if self.scale == 1.0 else embeddings * self.scale

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the draft vocabulary, float32."""
        logits = F.linear(states.to(self.output.dtype), self.output).float()
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.facts is None else self.facts.capped(logits)
