"""Block heads before training: new ones, those that continue a block head, and those with the weights of a head.

A head that drafts level by level (EAGLE-3) and a block head have most products in common. The head's attention reads
the embedding of a token beside the state before it; a block reads keys and values from projected hidden states, and its
queries begin as embeddings. So keys and values take the columns of the state, queries those of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftree.core.errors import ConfigurationError
from draftree.heads.base import TargetParts
from draftree.heads.config import DSPARK, EAGLE3, HeadConfig
from draftree.heads.dflash import BlockLayer, DFlashHead
from draftree.heads.eagle import Eagle3Head
from draftree.heads.folders import read_head
from draftree.heads.layers import Layer
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.fresh_head import HeadShape, fill_fresh, head_config
from draftree.train.head import HeadOptions, scaled
from draftree.train.preparing import Prepared, answer_vocabulary, chosen_features
from draftree.train.scaling import ScaledTexts, unfold
from draftree.train.settings import TrainSettings

__all__ = ["BlockOptions", "fresh_block_head", "seed_block", "start_block"]

OUTPUT_SIZE = 20.0
"""Factor of the first weights of products whose outputs are added to a block's states. Without it, masked rows stay
near the embedding of the masked token, which the final norm turns into a confident prediction: 46 nats."""
GAIN_SIZE = 0.5
"""Factor of the first gain of the final norm, relative to other heads: both together start at 9 nats."""
MARKOV_RANK = 64
"""Rank of the bias of new heads by the token before."""
OUTPUTS = ("o_proj.weight", "down_proj.weight")
VARIANTS = (
    *("attention_bias", "output_bias", "mlp_bias", "fc_bias", "fc_norm", "qk_norm"),
    *("norm_before_residual", "norm_before_fc", "own_embedding"),
)
"""Variants of heads whose weights mean nothing in a block head."""


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options of a block head.

    Attributes:
        head: options that it shares with other heads; `start` is a block head to continue, or a head of kind `eagle3`
            whose weights the first layer of a new block head begins with.
        markov_rank: rank of the bias by the token before; 0 for none. If None, that of the block head to continue, and
            64 for a new one.
    """

    head: HeadOptions = field(default_factory=HeadOptions)
    markov_rank: int | None = None

    def __post_init__(self) -> None:
        if self.markov_rank is not None and self.markov_rank < 0:
            raise ConfigurationError(f"markov_rank is {self.markov_rank}: it must not be negative")

    @property
    def new_markov_rank(self) -> int:
        """Rank of a new head's bias."""
        return MARKOV_RANK if self.markov_rank is None else self.markov_rank


def start_block(
    prepared: Prepared, settings: TrainSettings, options: BlockOptions, note: Callable[[str], None]
) -> tuple[DFlashHead, ScaledTexts]:
    """Return the head before training, in the dtype of computation, and the data with the hidden states that it reads.

    Raises:
        ConfigurationError: the given head cannot be continued or does not fit, or the data lacks hidden states.
    """
    start = options.head.start
    given = None if start is None else read_head(start, dtype=torch.float32)
    if start is not None:
        options.head.require_sizes_of_start(but="layers" if isinstance(given, Eagle3Head) else "")
    if isinstance(given, Eagle3Head):
        head, data = _seeded(prepared, settings, options, given)
        note(f"the first layer begins with the weights of '{start}'")
    elif given is not None:
        assert start is not None, "given"
        head, data = _continued(prepared, settings, options, given, start)
    else:
        head, data = _new(prepared, settings, options, note)
    head.to(device=prepared.processes.device, dtype=prepared.dtype)
    head.vocabulary = head.vocabulary.to(prepared.processes.device)
    head.bind(prepared.parts)
    return head, data


def _continued(
    prepared: Prepared, settings: TrainSettings, options: BlockOptions, given: object, start: Path
) -> tuple[DFlashHead, ScaledTexts]:
    if not isinstance(given, DFlashHead) or given.config.kind != DSPARK:
        kind = getattr(getattr(given, "config", None), "kind", "unknown")
        raise ConfigurationError(
            f"'{start}' has a head of kind '{kind}': a block head starts from one of kind '{DSPARK}' or '{EAGLE3}'"
        )
    if given.num_levels != settings.depth:
        raise ConfigurationError(
            f"'{start}' drafts {given.num_levels} tokens in a pass, and depth is {settings.depth}: give --depth "
            f"{given.num_levels}"
        )
    if options.markov_rank not in (None, given.config.markov_rank):
        raise ConfigurationError(
            f"'{start}' has a bias of rank {given.config.markov_rank}: leave out markov_rank, which is "
            f"{options.markov_rank}"
        )
    given.bind(prepared.parts)
    for name, parameter in given.named_parameters():
        parameter.requires_grad_(options.head.shape.trains_output or not name.startswith(("lm_head", "embed_tokens")))
    data = _data(prepared, given.config)
    unfold(given, data.sizes)
    return given, data


def _seeded(
    prepared: Prepared, settings: TrainSettings, options: BlockOptions, given: Eagle3Head
) -> tuple[DFlashHead, ScaledTexts]:
    variants = [name for name in VARIANTS if getattr(given.config, name)]
    if variants or given.config.hidden != prepared.parts.hidden:
        reason = f"its {variants[0]} is set" if variants else "its width is not the target's"
        raise ConfigurationError(f"a block head cannot start from this head: {reason}; leave out --from for a new one")
    shape = given.config.changed(num_layers=options.head.shape.layers)
    config = _block_config(shape, prepared, settings, options.new_markov_rank)
    data = _data(prepared, config)
    given.bind(prepared.parts)
    unfold(given, data.sizes)
    head = fresh_block_head(
        config,
        given.vocabulary,
        prepared.parts,
        trains_output=options.head.shape.trains_output,
        seed=settings.seed,
    )
    seed_block(head, given)
    return head, data


def _new(
    prepared: Prepared, settings: TrainSettings, options: BlockOptions, note: Callable[[str], None]
) -> tuple[DFlashHead, ScaledTexts]:
    vocabulary, share = answer_vocabulary(prepared, options.head.new_vocab)
    note(f"draft vocabulary: {len(vocabulary):,} tokens, {100 * share:.2f} % of unseen answers")
    stored = prepared.data.recipe.features
    places = chosen_features(options.head.features, stored, prepared.parts.num_layers)
    base = head_config(
        prepared.config,
        prepared.parts,
        [stored[place] for place in places],
        HeadShape(options.head.shape.layers, options.head.shape.intermediate),
        draft_vocab=len(vocabulary),
        depth=settings.depth,
        name=prepared.loaded.name,
    )
    config = _block_config(base, prepared, settings, options.new_markov_rank)
    head = fresh_block_head(
        config, vocabulary, prepared.parts, trains_output=options.head.shape.trains_output, seed=settings.seed
    )
    return head, _data(prepared, config)


def _data(prepared: Prepared, config: HeadConfig) -> ScaledTexts:
    stored = prepared.data.recipe.features
    return scaled(prepared, config, chosen_features(config.features, stored, prepared.parts.num_layers))


def _block_config(base: HeadConfig, prepared: Prepared, settings: TrainSettings, markov_rank: int) -> HeadConfig:
    counts = prepared.data.counts(answers_only=False)
    return base.changed(
        kind=DSPARK,
        depth=settings.depth,
        qk_norm=True,
        norm_output=False,
        own_output=True,
        block_size=settings.depth,
        # a token that texts do not use stands for what is to be predicted
        mask_token_id=int((counts == counts.min()).nonzero()[-1]),
        markov_rank=markov_rank,
        anchor_predicts=True,
    )


def fresh_block_head(
    config: HeadConfig,
    vocabulary: DraftVocabulary,
    parts: TargetParts,
    *,
    trains_output: bool,
    seed: int,
) -> DFlashHead:
    """Return a new block head, bound to its target; as `fresh_head`, with other sizes of outputs and gain."""
    head = DFlashHead(config, vocabulary)
    fill_fresh(head, parts, trains_output=trains_output, seed=seed)
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            if name.endswith(OUTPUTS):
                parameter.mul_(OUTPUT_SIZE)
        head.norm.weight.mul_(GAIN_SIZE)
    return head


@torch.no_grad()
def seed_block(head: DFlashHead, given: Eagle3Head) -> None:
    """Give a block head the first product, the final norm, the output rows and the first layer of another head.

    Args:
        head: the block head.
        given: of the same sizes; its first product reads hidden states as that of `head` does.
    """
    first, layer = head.layers[0], given.layers[0]
    assert isinstance(first, BlockLayer), "block heads have layers of their own"
    assert isinstance(layer, Layer), "heads have decoder layers"
    assert layer.hidden_norm is not None, "the first layer of eagle3 joins both"
    assert layer.input_layernorm is not None, "the first layer of eagle3 joins both"
    width = given.config.hidden
    head.fc.weight.copy_(given.fc.weight)
    head.norm.weight.copy_(given.norm.weight)
    head.hidden_norm.weight.copy_(layer.hidden_norm.weight)
    first.input_layernorm.weight.copy_(layer.input_layernorm.weight)
    first.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
    first.mlp.load_state_dict(layer.mlp.state_dict())
    first.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    first.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[:, :width])
    for name in ("k_proj", "v_proj"):
        getattr(first.self_attn, name).weight.copy_(getattr(layer.self_attn, name).weight[:, width:])
    if head.lm_head is not None and given.lm_head is not None:
        head.lm_head.weight.copy_(given.lm_head.weight)
