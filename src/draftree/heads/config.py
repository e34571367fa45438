"""Configuration of a learned head: its kind, sizes, and the hidden states of the target that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.core.errors import ConfigurationError, suggestion

EAGLE, EAGLE3, PEAGLE, MTP = "eagle", "eagle3", "peagle", "mtp"
DFLASH, DSPARK, MEDUSA = "dflash", "dspark", "medusa"
FEATURE_KINDS = (EAGLE, EAGLE3, PEAGLE, MTP)
"""Kinds that draft level by level: each level recycles the states of the level before."""
BLOCK_KINDS = (DFLASH, DSPARK, MEDUSA)
"""Kinds that draft all levels in one pass."""
KINDS = (*FEATURE_KINDS, *BLOCK_KINDS)
LAST_LAYER = -1
"""Index in `features` of the output of the last layer, before the final norm; others count back from it."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
MARKOV_TYPES = ("vanilla", "gated", "rnn")
MAX_SIZE = 1 << 24
"""Upper limit of every size: a damaged file must not allocate memory without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of a head.

    Attributes:
        kind: one of `KINDS`.
        features: hidden states of the target that are read, as in `DraftTraits.features`: index l is the residual
            stream that enters layer l (`hidden_states[l]` of transformers for l below the number of layers); the number
            of layers, or -1, is the output of the last layer before the final norm, and -2, -3, ... count back from it.
        target_hidden: width of the target's hidden states.
        hidden: width of the head's states.
        vocab_size: width of the target's logits.
        draft_vocab_size: width of the head's logits; equal to `vocab_size` if nothing is left out.
        depth: number of levels that it was trained for, the default depth of drafts.
        num_layers: number of decoder layers; 0 for heads without attention.
        num_heads: number of query heads; 0 without attention, as the other sizes of layers.
        num_kv_heads: number of key heads; it divides `num_heads`.
        head_dim: width of one attention head, an even number.
        intermediate: inner width of the perceptron.
        epsilon: added to the mean square in norms.
        rope: rotary positions as in configurations of transformers: `rope_type`, `rope_theta` and the parameters of
            scaling. Not to be mutated.
        max_length: maximum number of positions that it was trained for; older rows are dropped beyond it.
        activation: function in the perceptron, one of `ACTIVATIONS`.
        qk_norm: whether queries and keys are normalized per head, as in qwen3.
        attention_bias: whether the products of queries, keys and values have a bias.
        output_bias: whether the product after attention has a bias.
        mlp_bias: whether the products of the perceptron have a bias.
        fc_bias: whether the first product, `fc`, has a bias.
        fc_norm: whether every feature has a norm before `fc`.
        norm_output: whether states are recycled after the final norm and not before it.
        norm_before_residual: whether the residual stream starts after the norm of the state before.
        norm_before_fc: whether there is one norm over all features, concatenated, before `fc`.
        own_embedding: whether the folder has its own embedding; otherwise it is the target's.
        own_output: whether the folder has its own output head; otherwise it is the target's rows of the vocabulary.
        block_size: tokens of a block of block heads; number of heads for Medusa; 0 for other kinds.
        mask_token_id: token id of slots that are to be predicted; None without such slots.
        markov_rank: rank of the bias by the token before; 0 without it.
        markov_type: how the bias is computed, one of `MARKOV_TYPES`.
        has_confidence: whether it estimates the probability of acceptance.
        confidence_with_markov: whether that estimate also reads the embedding of the token before.
        anchor_predicts: whether the first row of a block, that of the last known token, predicts a token.
        windows: for each layer of a block head the number of positions that its rows see of the sequence, or 0 for all;
            empty for all layers without a window.
        causal_windows: whether rows of a block see only earlier rows of it, in layers with a window.
        head_layers: number of residual products of each Medusa head; 0 for other kinds.
        layer: configuration of transformers of the decoder layer inside an MTP head; empty for other kinds. Not to be
            mutated.
        target_name: name or path of the target, for messages and exports; empty if unknown.
        target_architecture: class of the target in transformers, for exports; empty if unknown.
    """

    kind: str
    features: tuple[int, ...]
    target_hidden: int
    hidden: int
    vocab_size: int
    draft_vocab_size: int
    depth: int
    num_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    epsilon: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_length: int = 2048
    activation: str = "silu"
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_embedding: bool = False
    own_output: bool = True
    block_size: int = 0
    mask_token_id: int | None = None
    markov_rank: int = 0
    markov_type: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
    anchor_predicts: bool = True
    windows: tuple[int, ...] = ()
    causal_windows: bool = False
    head_layers: int = 0
    layer: Mapping[str, Any] = field(default_factory=dict)
    target_name: str = ""
    target_architecture: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"kind of head '{self.kind}' is not supported: {suggestion(self.kind, KINDS)}")
        self._require_sizes()
        self._require_features()
        self._require_attention()
        self._require_variants()

    @property
    def is_block(self) -> bool:
        """Whether all levels are drafted in one pass."""
        return self.kind in BLOCK_KINDS

    @property
    def is_full(self) -> bool:
        """Whether every token of the target can be drafted."""
        return self.draft_vocab_size == self.vocab_size

    def changed(self, **values: Any) -> HeadConfig:
        """Return a configuration with other values."""
        return replace(self, **values)

    def _require_sizes(self) -> None:
        positive = ("target_hidden", "hidden", "vocab_size", "draft_vocab_size", "depth", "max_length")
        optional = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate", "block_size", "markov_rank")
        for names, least in ((positive, 1), (optional, 0)):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
                    raise ConfigurationError(
                        f"head: {name} is {value!r}: it must be an integer from {least} to {MAX_SIZE}"
                    )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigurationError(
                f"head: draft_vocab_size is {self.draft_vocab_size}: at most the target's {self.vocab_size} tokens"
            )
        if not 0 < self.epsilon < 1:
            raise ConfigurationError(f"head: epsilon is {self.epsilon!r}: it must be between 0 and 1")

    def _require_features(self) -> None:
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in self.features):
            raise ConfigurationError(f"head: features is {self.features!r}: layers are integers")
        if not self.features or len(set(self.features)) < len(self.features):
            raise ConfigurationError(f"head: features is {self.features!r}: name at least one layer, each once")
        if self.kind in (EAGLE, MTP, MEDUSA) and len(self.features) != 1:
            raise ConfigurationError(
                f"head: kind '{self.kind}' reads one hidden state, and features names {len(self.features)}"
            )

    def _require_attention(self) -> None:
        if not self.num_layers:
            return
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate"):
            if not getattr(self, name):
                raise ConfigurationError(f"head: {name} is 0, and it has {self.num_layers} layers: it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"head: num_heads is {self.num_heads}, not a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigurationError(f"head: head_dim is {self.head_dim}: rotary positions need an even number")
        if self.activation not in ACTIVATIONS:
            raise ConfigurationError(
                f"head: activation '{self.activation}' is not supported: {suggestion(self.activation, ACTIVATIONS)}"
            )

    def _require_variants(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ConfigurationError("head: fc_norm and norm_before_fc exclude each other: set at most one")
        if self.kind == EAGLE:
            for name in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"):
                if getattr(self, name):
                    raise ConfigurationError(f"head: {name} is a variant of kind '{EAGLE3}', not of '{EAGLE}'")
        if self.is_block and not self.block_size:
            raise ConfigurationError(f"head: block_size is 0: kind '{self.kind}' needs the tokens of a block")
        self._require_block()

    def _require_block(self) -> None:
        if self.markov_type not in MARKOV_TYPES:
            raise ConfigurationError(
                f"head: markov_type '{self.markov_type}' is not known: {suggestion(self.markov_type, MARKOV_TYPES)}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigurationError(
                f"head: windows names {len(self.windows)} layers, and it has {self.num_layers}: name each layer once"
            )
        if self.kind == MTP and "model_type" not in self.layer:
            raise ConfigurationError("head: layer has no model_type: kind 'mtp' needs the configuration of its layer")
        token = self.mask_token_id
        if token is None and self.kind in (PEAGLE, DFLASH, DSPARK):
            raise ConfigurationError(f"head: mask_token_id is not set: kind '{self.kind}' needs the token of its slots")
        if token is not None and not 0 <= token < self.vocab_size:
            raise ConfigurationError(f"head: mask_token_id is {token}: the target has {self.vocab_size} tokens")
