"""How a decoder is built that passes in C can run: plain data, no weights and nothing of transformers."""

from __future__ import annotations

from dataclasses import dataclass

from draftree.models.native.rotary import Rope

SILU, GELU_TANH = 0, 1


@dataclass(frozen=True, slots=True)
class LinearBlueprint:
    """A linear layer.

    Attributes:
        weight: its name.
        bias: its name; None for none.
        inputs: numbers of a row that it reads.
        outputs: numbers of a row that it writes.
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerBlueprint:
    """One layer. Norms are named, None where there is none; projections that read the same rows stand together."""

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
    """Which kind of rotary positions; None for none."""

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        """All projections."""
        return (*self.qkv, self.output, *self.gate_up, self.down)

    @property
    def norms(self) -> tuple[str, ...]:
        """All norms that there are."""
        found = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return tuple(name for name in (*found, self.query_norm, self.key_norm) if name is not None)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A decoder, without its weights: these are named as the model of transformers names them.

    Attributes:
        kind: what messages call it.
        fingerprint: tells it from others.
        context: positions that it knows.
        dtype: of its weights, keys and values, as torch calls it.
        norm_offset: what is added to the norms' weights.
        residual_scale: factor of what is added to the residual stream.
        logit_scale: factor of the logits.
        ropes: kinds of rotary positions.
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

    @property
    def is_tied(self) -> bool:
        """Whether the head's weights are the embedding's."""
        return self.head.weight == self.embedding

    @property
    def names(self) -> frozenset[str]:
        """All parameters."""
        found = [self.embedding, self.final_norm, *self.head.names]
        for layer in self.layers:
            found += [*layer.norms, *(name for linear in layer.linears for name in linear.names)]
        return frozenset(found)
