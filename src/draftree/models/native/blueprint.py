"""Architecture of a decoder that passes in C support, as plain data without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from draftree.models.native.blueprint_parts import ExpertsBlueprint, LinearBlueprint, ScoreBias, SourceBlueprint
from draftree.models.native.rotary import Rope

__all__ = [
    "ACTIVATIONS",
    "CLAMPED_SILU",
    "GELU",
    "GELU_TANH",
    "LAYER_NORM",
    "MAX_EXPERTS",
    "NORM_KINDS",
    "QUICK_GELU",
    "RELU",
    "RELU_SQUARED",
    "RMS_NORM",
    "SILU",
    "Blueprint",
    "ExpertsBlueprint",
    "LayerBlueprint",
    "LinearBlueprint",
    "ProjectionBlueprint",
    "ScoreBias",
    "SourceBlueprint",
]

SILU, GELU_TANH, GELU, RELU, QUICK_GELU, CLAMPED_SILU, RELU_SQUARED = range(7)
MAX_EXPERTS = 1024
RMS_NORM, LAYER_NORM = range(2)
ACTIVATIONS: Mapping[str, int] = MappingProxyType(
    {
        "SILU": SILU,
        "GELU_TANH": GELU_TANH,
        "GELU": GELU,
        "RELU": RELU,
        "QUICK_GELU": QUICK_GELU,
        "CLAMPED_SILU": CLAMPED_SILU,
        "RELU_SQUARED": RELU_SQUARED,
    }
)
NORM_KINDS: Mapping[str, int] = MappingProxyType({"RMS_NORM": RMS_NORM, "LAYER_NORM": LAYER_NORM})


@dataclass(frozen=True, slots=True)
class LayerBlueprint:
    """One layer: names of its norms, None for none, and its projections, grouped by their input.

    Attributes:
        rope: index in `Blueprint.ropes`; None for no rotary positions.
        embedding_norm: norm of the embedding of a joined layer, whose attention reads the normed embedding of the token
            and then the normed residual stream, concatenated; None for other layers.
        is_normed_residual: whether the residual stream of a joined layer starts after `attention_norm`.
        source: attention to sources, after that to the text; None for none.
        score_bias: index in `Blueprint.score_biases`; None for none.
        score_cap: soft cap of the scores of attention; None for none.
        sinks: name of scores, one for each head, of a key without a value that every row sees; None for none.
        experts: the perceptron has experts, and `gate_up` and `down` are those of expert 0.
    """

    attention_norm: str | None
    attention_post_norm: str | None
    mlp_norm: str | None
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
    source: SourceBlueprint | None = None
    score_bias: int | None = None
    score_cap: float | None = None
    sinks: str | None = None
    experts: ExpertsBlueprint | None = None

    def with_norms_of(self, before: str | None) -> LayerBlueprint:
        """Return a layer with norms after its sublayers as one with norms before them.

        Args:
            before: norm of what enters the layer.
        """
        if self.source is None:
            return replace(self, attention_norm=before, mlp_norm=self.attention_norm)
        source = replace(self.source, norm=self.attention_norm)
        return replace(self, attention_norm=before, source=source, mlp_norm=self.source.norm)

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        """All projections."""
        source = () if self.source is None else (self.source.query, self.source.output)
        own = () if self.experts is None else self.experts.linears
        return (*self.qkv, self.output, *source, *self.gate_up, self.down, *own)

    @property
    def products(self) -> tuple[LinearBlueprint, ...]:
        """All projections but routers; of experts, those of each one."""
        source = () if self.source is None else (self.source.query, self.source.output)
        perceptron = (*self.gate_up, self.down) if self.experts is None else self.experts.products
        return (*self.qkv, self.output, *source, *perceptron)

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of all norms."""
        found = (self.attention_norm, self.embedding_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        source = None if self.source is None else self.source.norm
        return tuple(name for name in (*found, source, self.query_norm, self.key_norm) if name is not None)


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
        final_norm: name of the norm before the head; None for none.
        norm: RMS_NORM, or LAYER_NORM with mean and variance.
        has_norm_bias: whether norms have biases, whose names end in "bias" in place of "weight".
        is_post_norm: whether the norm before a sublayer replaces the residual stream. A norm after a sublayer is the
            norm before the next one.
        is_parallel: whether attention and perceptron of a layer read the same residual stream.
        has_joint_norms: whether `query_norm` and `key_norm` of a layer are over all of its heads together.
        logit_cap: soft cap of the logits; None for none.
        gate_limit: largest size of the gate and of what it multiplies, of CLAMPED_SILU.
        gate_slope: factor in the logistic function of the gate, of CLAMPED_SILU.
        is_gated: whether perceptrons have gates; otherwise `gate_up` of a layer is its first product.
        positions: name of a table that is added to embeddings by position; None for none.
        position_offset: row of the table for position 0.
        unplaced: token to which no position is added; None for none.
        start_norm: name of the norm of what enters the first layer; None for none.
        is_start_norm_first: whether positions are added after that norm.
        score_biases: biases of scores by distance.
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
    final_norm: str | None
    head: LinearBlueprint
    ropes: tuple[Rope, ...]
    layers: tuple[LayerBlueprint, ...]
    projection: ProjectionBlueprint | None = None
    norm: int = RMS_NORM
    has_norm_bias: bool = False
    is_post_norm: bool = False
    is_gated: bool = True
    is_parallel: bool = False
    has_joint_norms: bool = False
    logit_cap: float | None = None
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    positions: str | None = None
    position_offset: int = 0
    unplaced: int | None = None
    start_norm: str | None = None
    is_start_norm_first: bool = False
    score_biases: tuple[ScoreBias, ...] = ()

    def as_unpacked(self) -> Blueprint:
        """Return the blueprint of weights that were unpacked: (outputs, inputs), positions from 0 on."""

        def plain(linears: tuple[LinearBlueprint, ...]) -> tuple[LinearBlueprint, ...]:
            return tuple(
                replace(linear, is_transposed=False, is_interleaved=False, groups=0, pairs=0) for linear in linears
            )

        layers = [
            replace(
                layer,
                qkv=plain(layer.qkv),
                output=plain((layer.output,))[0],
                gate_up=plain(layer.gate_up),
                down=plain((layer.down,))[0],
            )
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers), position_offset=0)

    def bias_of_norm(self, name: str) -> str | None:
        """Return the name of a norm's bias, from that of its weight; None for none."""
        return f"{name.removesuffix('weight')}bias" if self.has_norm_bias else None

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def is_tied(self) -> bool:
        """Whether the head and the embedding share their weight."""
        return self.head.weight == self.embedding

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters."""
        norms = [self.start_norm, self.final_norm, *(name for layer in self.layers for name in layer.norms)]
        found = [name for name in norms if name is not None]
        found += [bias for name in found if (bias := self.bias_of_norm(name)) is not None]
        found += [self.embedding, *self.head.names]
        found += [bias.weight for bias in self.score_biases]
        if self.positions is not None:
            found.append(self.positions)
        if self.projection is not None:
            found += [*self.projection.norms, *self.projection.linear.names]
        for layer in self.layers:
            found += [name for linear in layer.linears for name in linear.names]
            found += [] if layer.sinks is None else [layer.sinks]
        return frozenset(found)
