"""Parts of a `Blueprint`: products, experts, attention to sources, score biases."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LinearBlueprint:
    """Linear layer.

    Attributes:
        weight: name of its weight.
        bias: name of its bias; None for none.
        inputs: number of inputs.
        outputs: number of outputs.
        is_transposed: whether the weight has shape (inputs, outputs).
        expert: index in the first dimension of the weight, which many experts share; None for a weight of its own.
        is_interleaved: whether outputs of gate and up alternate; otherwise those of the gate come first.
        groups: number of groups of heads with their key and value one after the other; 0 if all queries come first,
            then all keys, then all values.
        pairs: number of outputs of each head, its first ones, of which neighbours rotate together by position; 0 if
            those of two halves do, as passes in C require.
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    is_transposed: bool = False
    expert: int | None = None
    is_interleaved: bool = False
    groups: int = 0
    pairs: int = 0

    @property
    def is_reordered(self) -> bool:
        """Whether the weight has its outputs in another order."""
        return self.is_interleaved or self.groups > 0 or self.pairs > 0

    @property
    def is_arranged(self) -> bool:
        """Whether the weight has its outputs in another order, is transposed, or is not the whole parameter."""
        return self.is_transposed or self.is_reordered or self.expert is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SourceBlueprint:
    """Attention of a layer to sources, whose keys and values are computed elsewhere.

    Attributes:
        norm: name of the norm before it; None for none.
        query: queries.
        output: product of its results.
        scaling: factor of the scores.
    """

    norm: str | None
    query: LinearBlueprint
    output: LinearBlueprint
    scaling: float


@dataclass(frozen=True, slots=True)
class ScoreBias:
    """Bias of scores by distance.

    Attributes:
        weight: name of its table of shape (buckets, heads).
        buckets: bucket of each distance; farther ones are in the last of these.
    """

    weight: str
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertsBlueprint:
    """Perceptrons of which every row uses some, and the router that chooses them.

    Attributes:
        router: product whose outputs are the experts' logits.
        gate_up: first products of expert 0.
        down: last product of expert 0.
        count: number of experts.
        chosen: number of experts of a row, those of the largest logits.
        is_renormalized: whether the softmax runs over the chosen experts only; otherwise over all.
        shared_gate_up: first products of the expert that every row uses; empty for none.
        shared_down: its last product.
        shared_gate: product whose logistic function is the weight of that expert; None for weight 1.
    """

    router: LinearBlueprint
    gate_up: LinearBlueprint
    down: LinearBlueprint
    count: int
    chosen: int
    is_renormalized: bool
    shared_gate_up: tuple[LinearBlueprint, ...] = ()
    shared_down: LinearBlueprint | None = None
    shared_gate: LinearBlueprint | None = None

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        """All products; of the experts those of expert 0."""
        found = (self.router, self.gate_up, self.down, *self.shared_gate_up, self.shared_down, self.shared_gate)
        return tuple(linear for linear in found if linear is not None)

    @property
    def products(self) -> tuple[LinearBlueprint, ...]:
        """The products of every expert, the shared one last; without the router and the shared expert's gate."""
        each = [replace(part, expert=expert) for expert in range(self.count) for part in (self.gate_up, self.down)]
        shared = () if self.shared_down is None else (*self.shared_gate_up, self.shared_down)
        return (*each, *shared)

    @property
    def unquantized(self) -> tuple[LinearBlueprint, ...]:
        """The products that are never quantized: the router, and the shared expert's gate."""
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)

    @property
    def widest(self) -> int:
        """Largest number of results of an activation."""
        return max(self.down.inputs, 0 if self.shared_down is None else self.shared_down.inputs)
