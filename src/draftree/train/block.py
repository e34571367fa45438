"""Training of a block head (DSpark): all levels of a draft from one pass, with a bias by the token before.

Every token of an answer is an anchor. Its block sees the context up to it, as in decoding. The bias of a level reads
the text's own token before, as after drafts that were right so far.

Sources: DFlash, arXiv 2602.06036; DSpark, github.com/deepseek-ai/DeepSpec. The losses are those of heads
(`train/losses.py`) with weights by survival, instead of cross-entropy and total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftree.core.errors import ConfigurationError
from draftree.heads.base import BlockHead, BlockRows
from draftree.heads.calibration import write_calibration
from draftree.heads.folders import write_head
from draftree.train.batches import Batch
from draftree.train.block_start import BlockOptions, fresh_block_head, start_block
from draftree.train.confidence import ConfidenceFit
from draftree.train.evaluate import Evaluation
from draftree.train.finishing import earlier_runs, finish
from draftree.train.head import HeadResult, json_ready
from draftree.train.head_trainee import TextTrainee
from draftree.train.loop import TrainingRun
from draftree.train.preparing import TrainingJob, prepare
from draftree.train.run_state import Progress
from draftree.train.scaling import fold
from draftree.train.settings import TrainSettings

__all__ = ["BlockOptions", "BlockTrainee", "fresh_block_head", "train_block"]


@dataclass(frozen=True, slots=True)
class AnchoredRows(BlockRows):
    """Context rows of texts, and the rows that are anchors of blocks.

    Attributes:
        starts: indices of the anchors' rows.
    """

    starts: Sequence[int] = ()

    @property
    def anchors(self) -> list[int]:
        """Index of the row of each anchor."""
        return list(self.starts)


class AnchorAttention:
    """`BlockAttend` with a block at every chain of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        start = batch.chain_rows.padded(batch.rows.places[batch.chains] % batch.rows.longest)
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
        found = chains.flat((weights[..., :longest] @ values).transpose(1, 2).unflatten(1, shape[1:]))
        shares = chains.flat(weights[..., longest:].transpose(1, 2).unflatten(1, shape[1:]))
        return found + torch.einsum("csht,cthd->cshd", shares, value)


class BlockTrainee(TextTrainee):
    """Block head in training.

    Args:
        head: the head, bound to the target's parts, on its device.
        arguments: of `TextTrainee`, after the vocabulary.
    """

    def __init__(self, head: BlockHead, *arguments: object) -> None:
        super().__init__(head, head.vocabulary, *arguments)  # type: ignore[arg-type]
        self.head = head

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states of each level; all are from one pass."""
        counts = torch.bincount(batch.rows.places // batch.rows.longest, minlength=batch.rows.num_texts)
        rows = AnchoredRows(batch.features, batch.tokens, batch.positions, counts.tolist(), batch.chains.tolist())
        states = self.head.run(rows, AnchorAttention(batch))
        for level in range(min(levels, self.head.num_levels)):
            yield states[:, self.head.first_slot + level]

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        """Return logits with the bias by the text's token before."""
        found = self.head.logits(states)
        if not self.head.has_bias:
            return found
        tokens = batch.tokens[batch.step_rows(level)[0][chains]]
        return found + self.head.follow(None, tokens, states)[0]


def train_block(
    job: TrainingJob,
    settings: TrainSettings,
    options: BlockOptions,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> HeadResult:
    """Train a block head and write its folder; blocks have as many tokens as drafts of evaluations have levels.

    Raises:
        ConfigurationError: the inputs do not fit, or fewer levels are trained than a block has.
        TrainingError: the training failed.
    """
    if settings.levels != settings.depth:
        raise ConfigurationError(
            f"levels is {settings.levels} and depth is {settings.depth}: a block has all its levels in one pass, so "
            "set both to its length"
        )
    prepared = prepare(job)
    head, data = start_block(prepared, settings, options, note)
    trainee = BlockTrainee(head, prepared.parts, data, prepared.seen, prepared.unseen, settings)
    if prepared.processes.count == 1:
        trainee.keep_rows(prepared.data)
    run = TrainingRun(trainee, settings, job.training, prepared.processes, report=report)
    if job.resume:
        run.resume()
        note(f"resumed after {run.state.step} updates")
    note(f"{run.num_weights:,} trained weights, {len(trainee.lengths):,} texts, {str(prepared.dtype)[6:]}")
    state = run.run()
    if prepared.processes.index:
        return HeadResult(job.output, Evaluation(), ())
    fit = ConfidenceFit(settings.depth)
    evaluation = trainee.evaluate(None, watch=fit.add)
    fold(head, data.sizes)
    write_head(head.to(prepared.loaded.model.dtype), job.output)
    calibration = fit.fit()
    write_calibration(calibration, job.output)
    facts = {"head": {"config": asdict(head.config)}, "confidence": fit.report(calibration)}
    more = facts | earlier_runs(options.head.start)
    notes = finish(
        prepared,
        settings,
        state,
        evaluation,
        kind="DSpark block head",
        usage=f"head:{job.output}",
        more=json_ready(more),
    )
    return HeadResult(job.output, evaluation, tuple(notes))
