"""Training of a block head (DSpark): all levels of a draft from one pass, with a bias by the token before.

Every token of an answer is an anchor. Its block sees the context up to it, as in decoding. The bias of a level reads
the text's own token before, as after drafts that were right so far.

Sources: DFlash, arXiv 2602.06036; DSpark, github.com/deepseek-ai/DeepSpec. The losses are those of heads
(`train/losses.py`) with weights by survival, instead of cross-entropy and total variation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftree.core.errors import ConfigurationError
from draftree.heads.base import BlockNodes, BlockRows, Head, TargetParts
from draftree.heads.config import DSPARK, EAGLE3
from draftree.heads.dflash import BlockLayer, DFlashHead
from draftree.heads.eagle import Eagle3Head
from draftree.heads.folders import read_head
from draftree.heads.layers import Layer
from draftree.train.batches import Batch
from draftree.train.finishing import TrainingResult, earlier_runs
from draftree.train.head import (
    HeadOptions,
    continued,
    finish_head,
    fresh,
    new_config,
    placed,
    scaled,
)
from draftree.train.head_trainee import ScaledTexts, TextTrainee, unfold
from draftree.train.preparing import Note, Prepared, Report, TrainingJob, ignore, prepare
from draftree.train.settings import TrainSettings

# Block heads before training: new ones, those that continue a block head, and those with the weights of a head.
#
# A head that drafts level by level (EAGLE-3) and a block head have most products in common. The head's attention reads
# the embedding of a token beside the state before it; a block reads keys and values from projected hidden states, and
# its queries begin as embeddings. So keys and values take the columns of the state, queries those of the embedding.

OUTPUT_SIZE = 20.0
"""Factor of the first weights of products whose outputs are added to a block's states. Without it, masked rows stay
near the embedding of the masked token, which the final norm turns into a confident prediction: 46 nats."""
GAIN_SIZE = 0.5  # factor of the first gain of the final norm, relative to other heads: both together start at 9 nats
LAYERS = 2  # layers of a new head, unless the user chooses others
MARKOV_RANK = 64  # rank of the bias of new heads by the token before
OUTPUTS = ("o_proj.weight", "down_proj.weight")
VARIANTS = (
    *("attention_bias", "output_bias", "mlp_bias", "fc_bias", "fc_norm", "qk_norm"),
    *("norm_before_residual", "norm_before_fc", "own_embedding"),
)
"""Variants of heads whose weights mean nothing in a block head."""


def start_block(prepared: Prepared, options: HeadOptions, markov_rank: int | None) -> tuple[DFlashHead, ScaledTexts]:
    """Return the head before training, in the dtype of computation, and the data with its hidden states."""
    start = options.start
    parts = prepared.parts
    depth = prepared.settings.depth
    source = None if start is None else read_head(start, dtype=torch.float32)
    if source is not None:
        options.require_sizes_of_start(but="layers")
        if not isinstance(source, Eagle3Head):
            return continued(_require_block(source, options, depth, markov_rank), prepared, options)
    if source is None:
        base, vocabulary = new_config(prepared, options)
    else:
        variants = [name for name in VARIANTS if getattr(source.config, name)]
        if variants or source.config.hidden != parts.hidden:
            reason = f"its {variants[0]} is set" if variants else "its width is not the target's"
            raise ConfigurationError(
                f"a block head cannot start from this head: {reason}; leave out --from for a new one"
            )
        base = source.config.changed(num_layers=options.layers)
        vocabulary = source.vocabulary
    counts = prepared.data.counts(answers_only=False)
    config = base.changed(
        kind=DSPARK,
        depth=depth,
        qk_norm=True,
        norm_output=False,
        own_output=True,
        block_size=depth,
        # a token that texts do not use stands for what is to be predicted
        mask_token_id=int((counts == counts.min()).nonzero()[-1]),
        markov_rank=MARKOV_RANK if markov_rank is None else markov_rank,
        anchor_predicts=True,
    )
    data = scaled(prepared, config)
    head = DFlashHead(config, vocabulary)
    fresh_block(head, parts, trains_output=options.trains_output, seed=prepared.settings.seed)
    if source is not None:
        source.bind(parts)
        unfold(source, data.sizes)
        seed_block(head, source)
        prepared.note(f"the first layer begins with the weights of '{start}'")
    return placed(head, prepared), data


def _require_block(source: Head, options: HeadOptions, depth: int, markov_rank: int | None) -> DFlashHead:
    """Return the block head that is to be continued."""
    start = options.start
    if not isinstance(source, DFlashHead) or source.config.kind != DSPARK:
        raise ConfigurationError(
            f"'{start}' has a head of kind '{source.config.kind}': a block head starts from one of kind '{DSPARK}' or "
            f"'{EAGLE3}'"
        )
    if source.num_levels != depth:
        raise ConfigurationError(
            f"'{start}' drafts {source.num_levels} tokens in a pass, and depth is {depth}: give --depth "
            f"{source.num_levels}"
        )
    if options.layers not in (LAYERS, source.config.num_layers):
        raise ConfigurationError(
            f"'{start}' has {source.config.num_layers} layers, not {options.layers}: leave out --layers"
        )
    if markov_rank not in (None, source.config.markov_rank):
        raise ConfigurationError(
            f"'{start}' has a bias of rank {source.config.markov_rank}: leave out markov_rank, which is {markov_rank}"
        )
    return source


def fresh_block(head: DFlashHead, parts: TargetParts, *, trains_output: bool, seed: int) -> DFlashHead:
    """Do as `fresh`, with other sizes of outputs and gain."""
    fresh(head, parts, trains_output=trains_output, seed=seed)
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            if name.endswith(OUTPUTS):
                parameter.mul_(OUTPUT_SIZE)
        head.norm.weight.mul_(GAIN_SIZE)
    return head


@torch.no_grad()
def seed_block(head: DFlashHead, source: Eagle3Head) -> None:
    """Give a block head the first product, the final norm, the output rows and the first layer of another head.

    `source`: of the same sizes; its first product reads hidden states as that of `head` does.
    """
    first = head.layers[0]
    layer = source.layers[0]
    assert isinstance(first, BlockLayer), "block heads have layers of their own"
    assert isinstance(layer, Layer), "heads have decoder layers"
    assert layer.hidden_norm is not None, "the first layer of eagle3 joins both"
    assert layer.input_layernorm is not None, "the first layer of eagle3 joins both"
    width = source.config.hidden
    head.fc.weight.copy_(source.fc.weight)
    head.norm.weight.copy_(source.norm.weight)
    head.hidden_norm.weight.copy_(layer.hidden_norm.weight)
    first.input_layernorm.weight.copy_(layer.input_layernorm.weight)
    first.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
    first.mlp.load_state_dict(layer.mlp.state_dict())
    first.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    first.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[:, :width])
    for name in ("k_proj", "v_proj"):
        getattr(first.self_attn, name).weight.copy_(getattr(layer.self_attn, name).weight[:, width:])
    if head.lm_head is not None and source.lm_head is not None:
        head.lm_head.weight.copy_(source.lm_head.weight)


@dataclass(frozen=True, slots=True)
class AnchoredRows(BlockRows):
    """Context rows of texts, and the rows that are anchors of blocks."""

    starts: Sequence[int] = ()

    @property
    def anchors(self) -> list[int]:
        return list(self.starts)


class AnchorAttention:
    """`BlockAttend` with a block at every chain of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        start = batch.chain_rows.padded(batch.rows.columns[batch.chains])
        self._distance = start[..., None] - torch.arange(batch.rows.longest, device=start.device)
        """Number of rows from a context row to a chain's anchor, shape (texts, chains, rows)."""

    def context(
        self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0
    ) -> Tensor | None:
        """Keep keys and values; attend causally if there are queries."""
        rows = self._batch.rows
        keys, values = (rows.padded(part).transpose(1, 2) for part in (key, value))
        self._context[layer] = keys, values
        if query is None:
            return None
        queries = rows.padded(query).transpose(1, 2)
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        places = torch.arange(rows.longest, device=key.device)
        distance = places[:, None] - places
        seen = (distance >= 0) & ((distance < window) if window else True)
        return rows.flat(scaled_dot_product_attention(queries, keys, values, attn_mask=seen).transpose(1, 2))

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        """Attend from the rows of every block to the context up to its anchor, and to the block."""
        chains, slots = self._batch.chain_rows, query.shape[1]
        keys, values = self._context[layer]
        groups = query.shape[2] // key.shape[2]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
        query = query / math.sqrt(query.shape[-1])
        # (texts, heads, chains * slots, rows)
        spread = chains.padded(query).flatten(1, 2).transpose(1, 2)
        hidden = (self._distance < 0) | ((self._distance >= window) if window else False)
        hidden = hidden[:, None].repeat_interleave(slots, dim=2)
        outer = (spread @ keys.transpose(-1, -2)).float().masked_fill(hidden, -math.inf)
        inner = torch.einsum("cshd,cthd->csht", query, key).float()
        if is_causal:
            later = torch.ones(slots, slots, dtype=torch.bool, device=query.device).triu(1)
            inner = inner.masked_fill(later[:, None], -math.inf)
        padded = chains.padded(inner).flatten(1, 2).transpose(1, 2)
        weights = torch.cat((outer, padded), dim=-1).softmax(dim=-1).to(query.dtype)
        longest = keys.shape[2]
        shape = (chains.num_texts, chains.longest, slots)
        mixed = chains.flat((weights[..., :longest] @ values).transpose(1, 2).unflatten(1, shape[1:]))
        shares = chains.flat(weights[..., longest:].transpose(1, 2).unflatten(1, shape[1:]))
        return mixed + torch.einsum("csht,cthd->cshd", shares, value)


class BlockTrainee(TextTrainee):
    """Block head in training; `module` is bound to the target's parts."""

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states of each level; all are from one pass."""
        counts = torch.bincount(batch.rows.texts, minlength=batch.rows.num_texts)
        rows = AnchoredRows(batch.features, batch.tokens, batch.positions, counts.tolist(), batch.chains.tolist())
        states = self.module.run(rows, AnchorAttention(batch))
        for level in range(min(levels, self.module.num_levels)):
            yield states[:, self.module.first_slot + level]

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        logits: Tensor = self.module.logits(states)
        if self.module.has_bias:
            tokens = batch.tokens[batch.step_rows(level)[0][chains]]
            nodes = BlockNodes(tokens, torch.full_like(tokens, level), states, logits, memory=None)
            logits, _ = self.module.follow(nodes)
        return logits


def train_block(
    job: TrainingJob,
    settings: TrainSettings,
    options: HeadOptions,
    *,
    markov_rank: int | None = None,
    report: Report = ignore,
    note: Note = ignore,
) -> TrainingResult:
    """Train a block head and write its folder; blocks have as many tokens as drafts of evaluations have levels.

    `options`: `start` is a block head to continue, or a head of kind `eagle3` whose weights the first layer of a new
    block head begins with. `markov_rank`: rank of the bias by the token before; 0 for none. If None, that of the block
    head to continue, and 64 for a new one.
    """
    if markov_rank is not None and markov_rank < 0:
        raise ConfigurationError(f"markov_rank is {markov_rank}: it must not be negative")
    if settings.levels != settings.depth:
        raise ConfigurationError(
            f"levels is {settings.levels} and depth is {settings.depth}: a block has all its levels in one pass, so "
            "set both to its length"
        )
    prepared = prepare(job, settings, report, note)
    head, data = start_block(prepared, options, markov_rank)
    trainee = BlockTrainee.of(prepared, head, data)
    return finish_head(prepared, trainee, data.sizes, "DSpark block head", earlier_runs(options.start))
