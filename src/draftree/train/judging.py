"""Drafted tokens of a drafter along known texts, compared with what the target wrote there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch

__all__ = ["CANDIDATES", "JudgedStep", "StepLogits", "judge"]

CANDIDATES = 4
"""Number of best tokens that are compared."""
CHUNK_ROWS = 512

StepLogits = Callable[[Tensor], Tensor]
"""Logits of a step for some chains: indices of chains, shape (rows,), to (rows, draft vocabulary)."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedStep:
    """Best tokens of one step for all chains of a batch.

    Attributes:
        has_room: whether the text has room for the step, shape (chains,); otherwise the values mean nothing.
        match: column of the target's pick among the candidates, -1 if it is none of them, shape (chains,).
        log_shares: logarithms of the candidates' shares of the softmax of perturbed scores, in the order in which they
            would be drafted, shape (chains, candidates); the scores of drafted nodes.
        is_covered: whether the draft vocabulary has the target's pick, shape (chains,).
    """

    has_room: Tensor
    match: Tensor
    log_shares: Tensor
    is_covered: Tensor


def judge(batch: Batch, steps: Iterable[StepLogits], vocabulary: DraftVocabulary) -> Iterator[JudgedStep]:
    """Yield the best tokens of every step, ranked with the noise with which the target wrote the text.

    Args:
        batch: the batch.
        steps: logits of each step.
        vocabulary: the draft vocabulary.
    """
    device = batch.tokens.device
    ids = vocabulary.ids.to(device)
    owner = torch.cat([torch.full((int(count),), text) for text, count in enumerate(_chain_counts(batch))])
    temperatures = torch.tensor([text.temperature for text in batch.texts])[owner].to(device)
    noises = [Noise(text.seed) for text in batch.texts]
    for step, logits_of in enumerate(steps):
        picks = batch.picks[batch.step_chains(step)]
        positions = (batch.positions[batch.chains] + step + 1).tolist()
        keys = [noises[text].keys(position) for text, position in zip(owner.tolist(), positions, strict=True)]
        parts = [
            _best(logits_of(part), temperatures[part], [keys[row] for row in part.tolist()], ids)
            for part in torch.arange(batch.num_chains, device=device).split(CHUNK_ROWS)
        ]
        chosen, log_shares = (torch.cat(values) for values in zip(*parts, strict=True))
        places = vocabulary.places(picks)
        equal = chosen == places[:, None]
        match = torch.where(equal.any(-1), equal.int().argmax(-1), -1)
        yield JudgedStep(batch.room > step, match, log_shares, places >= 0)


def _chain_counts(batch: Batch) -> Tensor:
    texts = batch.chain_rows.places // batch.chain_rows.longest
    return torch.bincount(texts, minlength=batch.chain_rows.num_texts).cpu()


def _best(logits: Tensor, temperatures: Tensor, keys: Sequence[tuple[int, int]], ids: Tensor) -> tuple[Tensor, ...]:
    """Return rows of the best tokens and logarithms of their shares."""
    is_noisy = temperatures > 0
    scores = logits.float() / torch.where(is_noisy, temperatures, 1.0)[:, None]
    noisy = is_noisy.nonzero()[:, 0]
    if len(noisy):
        scores[noisy] += gumbel([keys[row] for row in noisy.tolist()], ids)
    values, chosen = scores.topk(min(CANDIDATES, len(ids)), dim=-1)
    return chosen, values - scores.logsumexp(dim=-1, keepdim=True)
