"""Architecture of a decoder that the native kernels support, as plain data without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.structures import CPass


@dataclass(frozen=True, slots=True)
class OutputPart:
    """Outputs of a weight that are in equal groups: of each group those from `first` to `end`, exclusive."""

    groups: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LinearBlueprint:
    weight: str  # name of its weight
    bias: str | None  # name of its bias; None for none
    inputs: int
    outputs: int
    is_transposed: bool = False  # whether the weight has shape (inputs, outputs)
    # index in the first dimension of the weight, which many experts share; None for a weight of its own
    expert: int | None = None
    is_interleaved: bool = False  # whether outputs of gate and up alternate; otherwise those of the gate come first
    # number of groups of heads with their key and value one after the other; 0 if all queries come first, then all
    # keys, then all values
    groups: int = 0
    # number of outputs of each head, its first ones, of which neighbours rotate together by position; 0 if those of
    # two halves do, as native kernels require
    pairs: int = 0
    unpaired: int = 0  # outputs of each head before those, after which its last ones follow in this case
    part: OutputPart | None = None  # outputs of the weight that are used; None for all
    factor: float = 1.0  # by which the weight is multiplied
    added: tuple[str, str] | None = None  # names of two weights, of which the second times the first is added
    after: str | None = None  # name of a weight by which the results are multiplied; None for none

    @property
    def is_reordered(self) -> bool:
        """Whether the weight has its outputs in another order, or more of them."""
        return self.is_interleaved or self.groups > 0 or self.pairs > 0 or self.part is not None

    @property
    def is_arranged(self) -> bool:
        """Whether the weight has its outputs in another order, is transposed, or is not the whole parameter."""
        return self.is_transposed or self.is_reordered or self.expert is not None

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.weight, self.bias, *(self.added or ()), self.after)
        return tuple(name for name in names if name is not None)

    @property
    def is_merged(self) -> bool:
        return self.added is not None or self.after is not None


@dataclass(frozen=True, slots=True)
class LatentBlueprint:
    """Inputs of a mixer that are computed from a vector: the first outputs of another product."""

    vector: LinearBlueprint  # product whose outputs start with the vector
    norm: str | None  # name of the root-mean-square norm of the vector; None for none
    epsilon: float  # of that norm
    product: LinearBlueprint  # of the vector


@dataclass(frozen=True, slots=True)
class SourceBlueprint:
    """Attention of a layer to sources, whose keys and values are computed elsewhere."""

    norm: str | None  # name of the norm before it; None for none
    query: LinearBlueprint  # queries
    output: LinearBlueprint  # product of its results
    scaling: float  # factor of the scores


@dataclass(frozen=True, slots=True)
class ScoreBias:
    weight: str  # name of its table of shape (buckets, heads)
    buckets: tuple[int, ...]  # bucket of each distance; farther ones are in the last of these


SCORES = {"SOFTMAX": 0, "SIGMOID": 1}
SOFTMAX, SIGMOID = SCORES.values()


@dataclass(frozen=True, slots=True)
class ExpertsBlueprint:
    """Perceptrons of which every row uses some, and the router that chooses them."""

    router: LinearBlueprint  # product whose outputs are the experts' logits
    gate_up: LinearBlueprint  # first products of expert 0
    down: LinearBlueprint  # last product of expert 0
    count: int  # number of experts
    chosen: int  # number of experts of a row, those of the largest logits
    is_renormalized: bool  # whether the weights of the chosen experts, before the scale, have the sum 1
    shared_gate_up: tuple[LinearBlueprint, ...] = ()  # first products of the expert that every row uses; empty for none
    shared_down: LinearBlueprint | None = None  # its last product
    # product whose logistic function is the weight of that expert; None for weight 1
    shared_gate: LinearBlueprint | None = None
    scores: int = SOFTMAX  # function from logits to weights: SOFTMAX over all experts, or SIGMOID of each one
    choice_bias: str | None = None  # name of what is added to scores where experts are chosen; None for none
    scale: float = 1.0  # factor of the weights
    groups: int = 1  # equal groups of experts, of which a row chooses some first
    chosen_groups: int = 1  # number of groups of a row, those of the largest sums
    group_scores: int = 1  # largest scores of a group that are summed

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        """All products; of the experts those of expert 0."""
        linears = (self.router, self.gate_up, self.down, *self.shared_gate_up, self.shared_down, self.shared_gate)
        return tuple(linear for linear in linears if linear is not None)

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
        return max(self.down.inputs, 0 if self.shared_down is None else self.shared_down.inputs)


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Where the results of one process's share of a mixer are among those of all processes."""

    first: int
    of: int  # number of all results


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Mixer whose inputs are B, C and x, of `channels` numbers each: C times the causal convolution of B times x.

    Its state is the last `taps - 1` inputs of the convolution.
    """

    convolution: str  # name of its weight, shape (channels, 1, taps)
    bias: str | None  # name of its bias; None for none
    taps: int
    channels: int
    place: ResultPlace | None = None  # of a share

    @property
    def kind(self) -> int:
        return RECURRENCES["SHORT_CONVOLUTION"]

    @property
    def num_results(self) -> int:
        return self.channels

    @property
    def width(self) -> int:
        """Numbers of a token that its state follows from."""
        return self.channels

    @property
    def state_size(self) -> int:
        """Numbers of a state besides the last inputs of the convolution."""
        return 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.convolution,) if self.bias is None else (self.convolution, self.bias)


@dataclass(frozen=True, slots=True)
class LinearRecurrence:
    """Gated delta net or Mamba2: a state per head that decays, and to which each token adds key times value.

    Inputs are queries, keys, values, factors, time steps and gates of a gated delta net, and values, keys, queries,
    time steps and gates of Mamba2. Queries, keys and values are convolved. Source: arXiv 2412.06464, 2405.21060,
    2510.26692.
    """

    kind: int  # one of `RECURRENCES`
    convolution: str  # name of its weight, shape (channels, 1, taps)
    bias: str | None  # name of its bias; None for none
    taps: int
    heads: int  # of values
    groups: int  # heads of queries and of keys
    heads_of_group: int  # heads of values for each of them; a share has a part of its first and of its last group
    key_dim: int
    value_dim: int
    decay: str  # name of the logarithms of the rates of decay
    step_bias: str  # name of what is added to time steps
    norm: str | None  # name of the norm of the results; None for none
    norm_groups: int  # equal parts of the results that are normed apart
    norm_epsilon: float
    is_norm_first: bool  # whether results are normed before they are multiplied by their gates
    is_logistic: bool = False  # whether gates are logistic functions; otherwise SiLU
    decays: int = 1  # of a head: 1, or one for each number of a key
    skip: str | None = None  # name of the factors of values in results; None for none
    step_limits: tuple[float, float] = (0.0, math.inf)
    factor_scale: float = 1.0  # largest factor of a value, of a gated delta net
    is_tiled: bool = False  # whether heads next to each other are of different groups; otherwise those of one group are
    place: ResultPlace | None = None  # of a share
    has_joint_norm: bool = False  # whether a share's norms are over the results of all processes

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.num_results

    @property
    def num_results(self) -> int:
        return self.heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers of a token that its state follows from."""
        if self.kind == RECURRENCES["MAMBA2"]:
            return self.channels + filled_up(self.heads)
        return self.channels + filled_up(self.heads) + filled_up(self.heads * self.decays)

    @property
    def state_size(self) -> int:
        """Numbers of a state besides the last inputs of the convolution, in blocks of columns."""
        return self.heads * filled_up(self.value_dim, STATE_COLUMNS) * self.key_dim

    def packed_state(self, state: Tensor) -> Tensor:
        """Return a state of transformers, one matrix per head, as the C library keeps it, shape (state_size,)."""
        matrices = state.float() if self.kind == RECURRENCES["GATED_DELTA"] else state.float().transpose(1, 2)
        width = filled_up(self.value_dim, STATE_COLUMNS)
        columns = torch.nn.functional.pad(matrices, (0, width - self.value_dim))
        blocks = columns.reshape(self.heads, self.key_dim, width // STATE_COLUMNS, STATE_COLUMNS)
        return blocks.transpose(1, 2).flatten()

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.convolution, self.bias, self.decay, self.step_bias, self.norm, self.skip)
        return tuple(name for name in names if name is not None)


Recurrence = ShortConvolution | LinearRecurrence
"""Kinds of mixers with a state."""


@dataclass(frozen=True, slots=True)
class MixerBlueprint:
    """A mixer with a state: the products of its inputs, what it computes from them, and the product of its results."""

    inputs: tuple[LinearBlueprint, ...]
    recurrence: Recurrence | None  # None for a copy of the products alone
    output: LinearBlueprint
    latents: tuple[LatentBlueprint, ...] = ()  # of further inputs, which follow


STATE_COLUMNS = 32  # columns of a state that the C library keeps together


def filled_up(count: int, block: int = 16) -> int:
    """Return a number filled up to a multiple of the numbers that the C library handles at once."""
    return -(-count // block) * block


NEAR, FAR, MOST = 64, 97, 4096
"""Number of first positions that are all compared with the model; smallest step between later ones; their number."""
FIRST_POSITIONS = 1024  # number of positions in the first tables
TOLERANCE = 1e-3  # maximum error of a cosine; angles of thousands have few fractional digits in float32


@dataclass(frozen=True, slots=True)
class Rope:
    frequencies: tuple[float, ...]  # radians per position for each pair of numbers
    scaling: float  # factor of cosines and sines

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions, shape (positions, rotary size)."""
        angles = positions.float()[:, None] * torch.tensor(self.frequencies, dtype=torch.float32)[None]
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.scaling, both.sin() * self.scaling


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Factors of queries that grow with each `length` positions by the logarithm of their number."""

    slope: float
    length: int

    def at(self, positions: Tensor) -> Tensor:
        """Return the factors of positions, float32."""
        return 1 + self.slope * torch.log1p((positions // self.length).float())


class RopeTables:
    """Tables of cosines and sines, and of factors of queries, computed once for every position."""

    def __init__(self, ropes: Sequence[Rope], scaling: QueryScaling | None = None) -> None:
        self._ropes, self._scaling = ropes, scaling
        self._scales: Tensor | None = None
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def point(self, run: CPass, *, longest: int) -> None:
        """Set the tables of a pass whose positions are below `longest`."""
        if longest > self._length:
            self._length = max(2 * self._length, longest, FIRST_POSITIONS)
            self._tables = [rope.at(torch.arange(self._length)) for rope in self._ropes]
            for kind, (cosines, sines) in enumerate(self._tables):
                run.cosines[kind], run.sines[kind] = cosines.data_ptr(), sines.data_ptr()
            run.rotary_dim = self._tables[0][0].shape[-1] if self._tables else 0
            if self._scaling is not None:
                self._scales = self._scaling.at(torch.arange(self._length))
                run.query_scales = self._scales.data_ptr()


@torch.inference_mode()
def read_ropes(rotary: Any, kinds: Sequence[str], *, context: int) -> tuple[Rope, ...]:
    positions = torch.cat((torch.arange(min(NEAR, context)), torch.arange(0, context, max(FAR, context // MOST))))
    return tuple(_read_rope(rotary, kind, positions) for kind in kinds)


def _read_rope(rotary: Any, kind: str, positions: Tensor) -> Rope:
    prefix = f"{kind}_" if kind else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    if not isinstance(frequencies, Tensor):
        raise NativeUnavailableError(f"{type(rotary).__name__} stores its frequencies under an unknown name")
    like, ids = torch.zeros(1, 1, 1), positions.unsqueeze(0)
    wanted = rotary(like, ids, kind) if kind else rotary(like, ids)
    wanted = (wanted.real, wanted.imag) if isinstance(wanted, Tensor) else wanted
    rope = Rope(tuple(frequencies.float().tolist()), float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
    for table, theirs in zip(rope.at(positions), wanted, strict=True):
        angles = table[:, : table.shape[-1] // 2]  # both halves of a head have the same; or both numbers of a pair
        forms = (table, angles, angles.repeat_interleave(2, dim=-1))
        of_size = [form for form in forms if form.shape == theirs[0].shape]
        if not any(torch.allclose(form, theirs[0], rtol=0, atol=TOLERANCE) for form in of_size):
            raise NativeUnavailableError("its rotary positions are computed in another way")
    return rope


ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("SILU", "GELU_TANH", "GELU", "RELU", "QUICK_GELU", "CLAMPED_SILU", "RELU_SQUARED"),
    )
}
SILU, GELU_TANH, GELU, RELU, QUICK_GELU, CLAMPED_SILU, RELU_SQUARED = ACTIVATIONS.values()
MAX_EXPERTS = 1024
MAX_TAPS = 16
MAX_LATENTS = 2
RECURRENCES = {"SHORT_CONVOLUTION": 0, "GATED_DELTA": 1, "MAMBA2": 2}
NORM_KINDS = {"RMS_NORM": 0, "LAYER_NORM": 1}
RMS_NORM, LAYER_NORM = NORM_KINDS.values()


@dataclass(frozen=True, slots=True)
class LayerBlueprint:
    """One layer: names of its norms, None for none, and its projections, grouped by their input.

    Its mixer is attention, or a recurrence, or missing: then `qkv` is empty and `output` is None. Without a perceptron
    `gate_up` is empty and `down` is None.
    """

    attention_norm: str | None
    attention_post_norm: str | None
    mlp_norm: str | None
    mlp_post_norm: str | None
    query_norm: str | None
    key_norm: str | None
    qkv: tuple[LinearBlueprint, ...]  # inputs of the mixer: queries, keys, values, then the gate of attention, if any
    output: LinearBlueprint | None
    gate_up: tuple[LinearBlueprint, ...]
    down: LinearBlueprint | None
    window: int | None
    scaling: float
    rope: int | None  # index in `Blueprint.ropes`; None for no rotary positions
    # norm of the embedding of a joined layer, whose attention reads the normed embedding of the token and then the
    # normed residual stream, concatenated; None for other layers
    embedding_norm: str | None = None
    is_normed_residual: bool = False  # whether the residual stream of a joined layer starts after `attention_norm`
    # whether the layer reads the residual stream and after it the embedding of the token, normed together, and what it
    # gives is added to what the mixer of the next layer reads, and not to the residual stream
    is_beside: bool = False
    sees_block: bool = False  # whether rows of a block also attend to its later rows
    source: SourceBlueprint | None = None  # attention to sources, after that to the text; None for none
    score_bias: int | None = None  # index in `Blueprint.score_biases`; None for none
    score_cap: float | None = None  # soft cap of the scores of attention; None for none
    # name of scores, one for each head, of a key without a value that every row sees; None for none
    sinks: str | None = None
    # the perceptron has experts, and `gate_up` and `down` are those of expert 0
    experts: ExpertsBlueprint | None = None
    recurrence: Recurrence | None = None  # in place of attention
    # recurrence that reads the same input as attention, and whose results are added to those of attention
    beside: MixerBlueprint | None = None
    # outputs of the gate of attention, whose logistic function is a factor of its results: 1 for each head, or as many
    # as a head has; 0 for no gate
    gate_size: int = 0
    latents: tuple[LatentBlueprint, ...] = ()  # of further inputs of the mixer, which follow those of `qkv`

    @property
    def attends(self) -> bool:
        return self.output is not None and self.recurrence is None

    @property
    def has_latent_keys(self) -> bool:
        """Whether keys and values are expanded from the last latent vector; the heads share what follows that."""
        last = self.latents[-1] if self.latents else None
        return last is not None and last.vector.outputs > last.product.inputs

    def with_norms_of(self, before: str | None) -> LayerBlueprint:
        """Return a layer with norms after its sublayers as one with norms before them."""
        if self.source is None:
            return replace(self, attention_norm=before, mlp_norm=self.attention_norm)
        source = replace(self.source, norm=self.attention_norm)
        return replace(self, attention_norm=before, source=source, mlp_norm=self.source.norm)

    @property
    def inputs(self) -> tuple[LinearBlueprint, ...]:
        """The products of the normed stream before the mixer, in the order of the C library."""
        inputs = (*(latent.vector for latent in self.latents), *self.qkv)
        return inputs if self.beside is None else (*inputs, *self.beside.inputs)

    @property
    def outputs(self) -> tuple[LinearBlueprint, ...]:
        """The products of the results of the mixer, which are added."""
        outputs = (self.output, None if self.beside is None else self.beside.output)
        return tuple(output for output in outputs if output is not None)

    def without_state(self) -> LayerBlueprint:
        """Return the layer with its products alone."""
        beside = None if self.beside is None else replace(self.beside, recurrence=None)
        return replace(self, recurrence=None, beside=beside)

    @property
    def state(self) -> Recurrence | None:
        """The recurrence, in place of attention or beside it; None for none."""
        return self.recurrence if self.beside is None else self.beside.recurrence

    @property
    def linears(self) -> tuple[LinearBlueprint, ...]:
        experts = () if self.experts is None else self.experts.linears
        return (*self._mixer, *self._perceptron, *experts)

    @property
    def products(self) -> tuple[LinearBlueprint, ...]:
        """All projections but routers; of experts, those of each one."""
        return (*self._mixer, *(self._perceptron if self.experts is None else self.experts.products))

    @property
    def _mixer(self) -> tuple[LinearBlueprint, ...]:
        source = () if self.source is None else (self.source.query, self.source.output)
        return (*self.inputs, *(latent.product for latent in self.latents), *self.outputs, *source)

    @property
    def _perceptron(self) -> tuple[LinearBlueprint, ...]:
        return self.gate_up if self.down is None else (*self.gate_up, self.down)

    @property
    def norms(self) -> tuple[str, ...]:
        names = (self.attention_norm, self.embedding_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        source = None if self.source is None else self.source.norm
        return tuple(name for name in (*names, source, self.query_norm, self.key_norm) if name is not None)


@dataclass(frozen=True, slots=True)
class ProjectionBlueprint:
    """Product of features of a row, such as another model's hidden states, that enters the first layer.

    It is never quantized: the sizes of features differ too much.
    """

    linear: LinearBlueprint  # the product
    norms: tuple[str, ...]  # names of the norms of equal parts of the features, in their order; empty for none
    context_norm: str | None = None  # name of the norm of what layers read of context rows; None for no such rows


@dataclass(frozen=True, slots=True)
class FusionBlueprint:
    """Product of the embedding of a token and the state before it, side by side, that enters the first layer."""

    linear: LinearBlueprint  # the product
    embedding_norm: str | None  # name of the norm of the embedding; None for none
    state_norm: str | None  # name of the norm of the state; None for none


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Architecture of a decoder. Weights have the names of the transformers model."""

    kind: str  # name in messages
    fingerprint: str  # identity of the weights
    context: int  # maximum number of positions
    dtype: str  # torch's name of the dtype of weights, keys and values
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    activation: int
    epsilon: float
    norm_offset: float  # offset added to the norms' weights
    embedding_scale: float
    residual_scale: float  # factor of each sublayer's output in the residual stream
    logit_scale: float  # factor of the logits
    embedding: str
    final_norm: str | None  # name of the norm before the head; None for none
    head: LinearBlueprint
    ropes: tuple[Rope, ...]  # kinds of rotary positions
    layers: tuple[LayerBlueprint, ...]
    query_scaling: QueryScaling | None = None  # factors of queries by position; None for none
    # product of features; None if passes start at embeddings or hidden states only
    projection: ProjectionBlueprint | None = None
    fusion: FusionBlueprint | None = None  # of states in place of the input of the first layer; None for none
    norm: int = RMS_NORM  # RMS_NORM, or LAYER_NORM with mean and variance
    has_norm_bias: bool = False  # whether norms have biases, whose names end in "bias" in place of "weight"
    # whether the norm before a sublayer replaces the residual stream. A norm after a sublayer is the norm before
    # the next one
    is_post_norm: bool = False
    is_gated: bool = True  # whether perceptrons have gates; otherwise `gate_up` of a layer is its first product
    is_parallel: bool = False  # whether attention and perceptron of a layer read the same residual stream
    has_joint_norms: bool = False  # whether `query_norm` and `key_norm` of a layer are over all of its heads together
    logit_cap: float | None = None  # soft cap of the logits; None for none
    gate_limit: float = 0.0  # largest size of the gate and of what it multiplies, of CLAMPED_SILU
    gate_slope: float = 0.0  # factor in the logistic function of the gate, of CLAMPED_SILU
    positions: str | None = None  # name of a table that is added to embeddings by position; None for none
    position_offset: int = 0  # row of the table for position 0
    unplaced: int | None = None  # token to which no position is added; None for none
    start_norm: str | None = None  # name of the norm of what enters the first layer; None for none
    is_start_norm_first: bool = False  # whether positions are added after that norm
    shared_dim: int = 0  # of latent attention: last numbers of a key, which all heads share; 0 for other attention
    # numbers of a value, at most `head_dim`, to which it is filled up with zeros; None for all
    values: int | None = None
    score_biases: tuple[ScoreBias, ...] = ()  # biases of scores by distance

    def as_unpacked(self) -> Blueprint:
        """Return the blueprint of weights that were unpacked: (outputs, inputs), positions from 0 on.

        Parts of a weight are weights of their own.
        """

        def plain(linear: LinearBlueprint) -> LinearBlueprint:
            if (part := linear.part) is not None:
                place = f"[{part.groups}, {part.first}:{part.end}]"
                bias = None if linear.bias is None else f"{linear.bias}{place}"
                linear = replace(linear, weight=f"{linear.weight}{place}", bias=bias, part=None)
            if linear.is_merged:
                merged = f"[{linear.added}, {linear.after}]"
                bias = None if linear.bias is None else f"{linear.bias}{merged}"
                linear = replace(linear, weight=f"{linear.weight}{merged}", bias=bias, added=None, after=None)
            plain_order: dict[str, Any] = {"groups": 0, "pairs": 0, "unpaired": 0}
            return replace(linear, is_transposed=False, is_interleaved=False, factor=1.0, **plain_order)

        def plain_or_none(linear: LinearBlueprint | None) -> LinearBlueprint | None:
            return None if linear is None else plain(linear)

        def plain_mixer(mixer: MixerBlueprint | None) -> MixerBlueprint | None:
            if mixer is None:
                return None
            return replace(mixer, inputs=tuple(map(plain, mixer.inputs)), output=plain(mixer.output))

        def plain_latent(latent: LatentBlueprint) -> LatentBlueprint:
            return replace(latent, vector=plain(latent.vector), product=plain(latent.product))

        layers = tuple(
            replace(
                layer,
                latents=tuple(map(plain_latent, layer.latents)),
                qkv=tuple(map(plain, layer.qkv)),
                output=plain_or_none(layer.output),
                beside=plain_mixer(layer.beside),
                gate_up=tuple(map(plain, layer.gate_up)),
                down=plain_or_none(layer.down),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, position_offset=0)

    @property
    def value_dim(self) -> int:
        """Numbers of a value, which are fewer than those of a key in some models."""
        return self.head_dim if self.values is None else self.values

    def width_before_mixer(self, layer: LayerBlueprint) -> int:
        """Return the numbers of a row before the mixer of a layer."""
        linears = (*layer.inputs, *(latent.product for latent in layer.latents))
        width = sum(filled_up(linear.outputs) for linear in linears)
        # keys and values are expanded beside what they are expanded from
        return width + 2 * self.heads * self.head_dim if layer.has_latent_keys else width

    def bias_of_norm(self, name: str) -> str | None:
        """Return the name of a norm's bias, from that of its weight; None for none."""
        return f"{name.removesuffix('weight')}bias" if self.has_norm_bias else None

    @property
    def starts(self) -> tuple[int, ...]:
        """Index of the first layer here of each layer of the model, and the number of layers here."""
        return (0, *(index for index, layer in enumerate(self.layers, 1) if not layer.is_beside))

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have a state besides keys and values."""
        return any(layer.state is not None for layer in self.layers)

    @property
    def has_parts(self) -> bool:
        """Whether products have parts of the outputs of a weight."""
        return any(linear.part is not None for layer in self.layers for linear in layer.linears)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def is_tied(self) -> bool:
        return self.head.weight == self.embedding

    @property
    def names(self) -> frozenset[str]:
        norms = [self.start_norm, self.final_norm, *(name for layer in self.layers for name in layer.norms)]
        names = {name for name in norms if name is not None}
        names |= {bias for name in names if (bias := self.bias_of_norm(name)) is not None}
        names |= {self.embedding, *self.head.names, *(bias.weight for bias in self.score_biases)}
        if self.positions is not None:
            names.add(self.positions)
        if self.projection is not None:
            context = self.projection.context_norm
            names |= {*self.projection.norms, *self.projection.linear.names, *([] if context is None else [context])}
        if (fusion := self.fusion) is not None:
            names |= {*fusion.linear.names, *(name for name in (fusion.embedding_norm, fusion.state_norm) if name)}
        for layer in self.layers:
            names |= {name for linear in layer.linears for name in linear.names}
            names |= set() if layer.sinks is None else {layer.sinks}
            names |= {latent.norm for latent in layer.latents if latent.norm is not None}
            names |= set() if layer.state is None else set(layer.state.names)
            if layer.experts is not None and layer.experts.choice_bias is not None:
                names.add(layer.experts.choice_bias)
        return frozenset(names)
