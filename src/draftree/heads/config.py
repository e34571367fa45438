"""Configuration of a learned head: its kind, sizes, and the hidden states of the target that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.core.errors import ConfigurationError, suggestion

EAGLE, EAGLE3, PEAGLE, MTP = "eagle", "eagle3", "peagle", "mtp"
DFLASH, DFLASH2, DSPARK, XPRESS, MEDUSA = "dflash", "dflash2", "dspark", "xpress", "medusa"
GEMMA4 = "gemma4-assistant"
FEATURE_KINDS = (EAGLE, EAGLE3, PEAGLE, MTP)
"""Kinds that draft level by level: each level recycles the states of the level before."""
FLASH_KINDS = (DFLASH, DFLASH2, DSPARK, XPRESS)
"""DFlash and its variants."""
BLOCK_KINDS = (*FLASH_KINDS, MEDUSA)
"""Kinds that draft all levels in one pass."""
KINDS = (*FEATURE_KINDS, *BLOCK_KINDS, GEMMA4)
SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of layers in configurations of transformers."""
LAST_LAYER = -1
"""Index in `features` of the output of the last layer, before the final norm; others count back from it."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
MARKOV_TYPES = ("vanilla", "gated", "rnn")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3, as configurations call them."""
MAX_SIZE = 1 << 24
"""Upper limit of every size: a damaged file must not allocate memory without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of a head. Mappings are not to be mutated."""

    kind: str  # one of `KINDS`
    # hidden states of the target that are read, as in `DraftTraits.features`: index l is the residual stream that
    # enters layer l (`hidden_states[l]` of transformers for l below the number of layers); the number of layers, or -1,
    # is the output of the last layer before the final norm, and -2, -3, ... count back from it
    features: tuple[int, ...]
    target_hidden: int  # width of the target's hidden states
    hidden: int  # width of the head's states
    vocab_size: int  # width of the target's logits
    draft_vocab_size: int  # width of the head's logits; equal to `vocab_size` if nothing is left out
    depth: int  # number of levels that it was trained for, the default depth of drafts
    num_layers: int = 1  # decoder layers; 0 for heads without attention
    num_heads: int = 0  # query heads; 0 without attention, as the other sizes of layers
    num_kv_heads: int = 0  # key heads; it divides `num_heads`
    head_dim: int = 0  # width of one attention head, an even number
    intermediate: int = 0  # inner width of the perceptron
    epsilon: float = 1e-6  # added to the mean square in norms
    # rotary positions as in configurations of transformers: `rope_type`, `rope_theta` and the parameters of scaling
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_length: int = 2048  # positions that it was trained for; older rows are dropped beyond it
    activation: str = "silu"  # function in the perceptron, one of `ACTIVATIONS`
    qk_norm: bool = False  # whether queries and keys are normalized per head, as in qwen3
    attention_bias: bool = False  # whether the products of queries, keys and values have a bias
    output_bias: bool = False  # whether the product after attention has a bias
    mlp_bias: bool = False  # whether the products of the perceptron have a bias
    fc_bias: bool = False  # whether the first product, `fc`, has a bias
    fc_norm: bool = False  # whether every feature has a norm before `fc`
    has_norm: bool = True  # whether a norm follows the layer of an MTP head
    norm_output: bool = False  # whether states are recycled after the final norm and not before it
    norm_before_residual: bool = False  # whether the residual stream starts after the norm of the state before
    norm_before_fc: bool = False  # whether there is one norm over all features, concatenated, before `fc`
    own_embedding: bool = False  # whether the folder has its own embedding; otherwise it is the target's
    own_output: bool = True  # whether it has its own output head; otherwise it is the target's rows of the vocabulary
    block_size: int = 0  # tokens of a block of block heads; number of heads for Medusa; 0 for other kinds
    mask_token_id: int | None = None  # token id of slots that are to be predicted; None without such slots
    markov_rank: int = 0  # rank of the bias by the tokens before; 0 without it
    markov_type: str = "vanilla"  # how the bias of DSpark is computed, one of `MARKOV_TYPES`
    conv_taps: int = 0  # rows that a convolution of DFlash2 reads; 0 for other kinds
    conv_group: int = 0  # channels that share the part of its kernel that depends on the input
    num_candidates: int = 0  # best tokens of a level that DFlash2 ranks again; 0 for other kinds
    refiner_width: int = 0  # inner width of the perceptron of XPress' bias; 0 for other kinds
    has_confidence: bool = False  # whether it estimates the probability of acceptance
    confidence_with_markov: bool = False  # whether that estimate also reads the embedding of the token before
    anchor_predicts: bool = True  # whether the first row of a block, that of the last known token, predicts a token
    # for each layer of a block head or an assistant the number of positions that its rows see of the sequence, or 0 for
    # all; empty for all layers without a window
    windows: tuple[int, ...] = ()
    causal: bool = False  # whether rows of a block see only earlier rows of it, in every layer
    causal_windows: bool = False  # whether rows of a block see only earlier rows of it, in layers with a window
    head_layers: int = 0  # residual products of each Medusa head; 0 for other kinds
    # configuration of transformers of the decoder layer inside an MTP head; sizes of an assistant of Gemma 4 that other
    # kinds do not have; values of `EmbeddingFacts` that DFlash uses in place of the target's; empty for other kinds
    layer: Mapping[str, Any] = field(default_factory=dict)
    target_layers: int = 0  # number of the target's layers if `features` were derived from it; 0 otherwise
    target_name: str = ""  # name or path of the target, for messages and exports; empty if unknown
    target_architecture: str = ""  # class of the target in transformers, for exports; empty if unknown

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"kind of head '{self.kind}' is not supported: {suggestion(self.kind, KINDS)}")
        if (fault := next(self._faults(), None)) is not None:
            raise ConfigurationError(f"head: {fault}")

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

    def _faults(self) -> Iterator[str]:
        """Yield what is wrong; later checks assume that earlier ones found nothing."""
        positive = ("target_hidden", "hidden", "vocab_size", "draft_vocab_size", "depth", "max_length")
        optional = (
            "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate", "block_size", "markov_rank",
            "conv_taps", "conv_group", "refiner_width", "head_layers",
        )  # fmt: skip
        for name in (*positive, *optional):
            value = getattr(self, name)
            least = int(name in positive)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
                yield f"{name} is {value!r}: it must be an integer from {least} to {MAX_SIZE}"
        if self.draft_vocab_size > self.vocab_size:
            yield f"draft_vocab_size is {self.draft_vocab_size}: at most the target's {self.vocab_size} tokens"
        if not 0 < self.epsilon < 1:
            yield f"epsilon is {self.epsilon!r}: it must be between 0 and 1"
        if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in self.features):
            yield f"features is {self.features!r}: layers are integers"
        if not self.features or len(set(self.features)) < len(self.features):
            yield f"features is {self.features!r}: name at least one layer, each once"
        if self.kind in (EAGLE, MTP, MEDUSA, GEMMA4) and len(self.features) != 1:
            yield f"kind '{self.kind}' reads one hidden state, and features names {len(self.features)}"
        if self.num_layers:
            for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate"):
                if not getattr(self, name):
                    yield f"{name} is 0, and it has {self.num_layers} layers: it must be positive"
            if self.num_heads % self.num_kv_heads:
                yield f"num_heads is {self.num_heads}, not a multiple of num_kv_heads, {self.num_kv_heads}"
            if self.head_dim % 2:
                yield f"head_dim is {self.head_dim}: rotary positions need an even number"
            if self.activation not in ACTIVATIONS:
                yield f"activation '{self.activation}' is not supported: {suggestion(self.activation, ACTIVATIONS)}"
        if self.fc_norm and self.norm_before_fc:
            yield "fc_norm and norm_before_fc exclude each other: set at most one"
        for name in NORMS:
            if self.kind == EAGLE and getattr(self, name):
                yield f"{name} is a variant of kind '{EAGLE3}', not of '{EAGLE}'"
        if self.is_block and not self.block_size:
            yield f"block_size is 0: kind '{self.kind}' needs the tokens of a block"
        if self.markov_type not in MARKOV_TYPES:
            yield f"markov_type '{self.markov_type}' is not known: {suggestion(self.markov_type, MARKOV_TYPES)}"
        if self.kind == DFLASH2 and (not self.conv_taps or not self.conv_group or self.hidden % self.conv_group):
            yield f"conv_taps is {self.conv_taps} and conv_group {self.conv_group}: the group must divide {self.hidden}"
        if self.kind == DFLASH2 and not 1 <= self.num_candidates <= self.draft_vocab_size:
            yield f"num_candidates is {self.num_candidates}: it must be from 1 to {self.draft_vocab_size}"
        if self.kind in (DFLASH2, XPRESS) and not self.markov_rank:
            yield f"markov_rank is 0: kind '{self.kind}' needs the rank of its bias"
        if self.windows and len(self.windows) != self.num_layers:
            yield f"windows names {len(self.windows)} layers, and it has {self.num_layers}: name each layer once"
        if self.kind == MTP and "model_type" not in self.layer:
            yield "layer has no model_type: kind 'mtp' needs the configuration of its layer"
        token = self.mask_token_id
        if token is None and self.kind in (PEAGLE, *FLASH_KINDS):
            yield f"mask_token_id is not set: kind '{self.kind}' needs the token of its slots"
        if token is not None and not 0 <= token < self.vocab_size:
            yield f"mask_token_id is {token}: the target has {self.vocab_size} tokens"
