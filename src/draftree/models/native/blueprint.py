"""Architecture of a decoder that passes in C support, as plain data without weights."""

from __future__ import annotations

from dataclasses import dataclass

from draftree.models.native.rotary import Rope

SILU, GELU_TANH = 0, 1


@dataclass(frozen=True, slots=True)
class LinearBlueprint:
    """Linear layer.

    Attributes:
        weight: name of its weight.
        bias: name of its bias; None for none.
        inputs: number of inputs.
        outputs: number of outputs.
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerBlueprint:
    """One layer: names of its norms, None for none, and its projections, grouped by their input.

    Attributes:
        rope: index in `Blueprint.ropes`; None for no rotary positions.
        embedding_norm: norm of the embedding of a joined layer, whose attention reads the normed embedding of the token
            and then the normed residual stream, concatenated; None for other layers.
        is_normed_residual: whether the residual stream of a joined layer starts after `attention_norm`.
    """

    attention_norm: str
    attention_post_norm: str | None
    mlp_norm: str
    mlp_post_norm: str | None
    query_norm: str | None
    key_norm: str | None
    qkv: tuple[LinearBlueprint, ...]
    output: LinearBlueprint
    gate_up: tuple[LinearBlueprint, ...]
    down: LinearBlueprint
    window: int | None
    scaling: float
    rope: int | None
    embedding_norm: str | None = None
    is_normed_residual: bool = False

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        """All projections."""
        return (*self.qkv, self.output, *self.gate_up, self.down)

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of all norms."""
        found = (self.attention_norm, self.embedding_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return tuple(name for name in (*found, self.query_norm, self.key_norm) if name is not None)


@dataclass(frozen=True, slots=True)
class ProjectionBlueprint:
    """Product of features of a row, such as another model's hidden states, that enters the first layer.

    It is never quantized: the sizes of features differ too much.

    Attributes:
        linear: the product.
        norms: names of the norms of equal parts of the features, in their order; empty for none.
    """

    linear: LinearBlueprint
    norms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Architecture of a decoder. Weights have the names of the transformers model.

    Attributes:
        kind: name in messages.
        fingerprint: identity of the weights.
        context: maximum number of positions.
        dtype: torch's name of the dtype of weights, keys and values.
        norm_offset: offset added to the norms' weights.
        residual_scale: factor of each sublayer's output in the residual stream.
        logit_scale: factor of the logits.
        ropes: kinds of rotary positions.
        projection: product of features; None if passes start at embeddings or hidden states only.
    """

    kind: str
    fingerprint: str
    context: int
    dtype: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    activation: int
    epsilon: float
    norm_offset: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    embedding: str
    final_norm: str
    head: LinearBlueprint
    ropes: tuple[Rope, ...]
    layers: tuple[LayerBlueprint, ...]
    projection: ProjectionBlueprint | None = None

    @property
    def is_tied(self) -> bool:
        """Whether the head and the embedding share their weight."""
        return self.head.weight == self.embedding

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters."""
        found = [self.embedding, self.final_norm, *self.head.names]
        if self.projection is not None:
            found += [*self.projection.norms, *self.projection.linear.names]
        for layer in self.layers:
            found += [*layer.norms, *(name for linear in layer.linears for name in linear.names)]
        return frozenset(found)
