"""Live beams, and strategies: which of their continuations are candidates, selected on tensors.

Selection does not wait for the device, and its order is total: score descending, then rank of the parent beam, then
token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.beam.forest import Tip
from draftree.beam.phrases import PhraseState
from draftree.core.tensors import on_host, to_device

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams


@dataclass(slots=True, eq=False)
class Beam:
    """A sequence in progress."""

    tips: list[Tip]  # end of the beam in the forest of each model
    tokens: tuple[int, ...] = ()  # generated tokens
    score: float = 0.0  # cumulative log-probability
    logprobs: tuple[float, ...] = ()  # what each token added to it
    ranks: tuple[int, ...] = ()  # for each token the rank of the beam that it continued
    phrases: PhraseState | None = None  # how much of the required phrases it contains; None without any
    trie_node: int = 0  # node of the trie that the sequence has reached
    draft_tips: list[Tip] = field(default_factory=list)  # end of the beam in the forests of the drafter
    # for each token the weights of cross-attention with which it was predicted, if they are wanted
    attention: tuple[np.ndarray, ...] = ()

    @property
    def is_scored(self) -> bool:
        return all(tip.row is not None for tip in self.tips)

    @property
    def meets_constraints(self) -> bool:
        return self.phrases is None or self.phrases.is_met


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation on the host: `logprob` is what the token added to the cumulative `score`."""

    parent: Beam
    rank: int
    token: int
    score: float
    logprob: float


class Candidates(NamedTuple):
    """Continuations of the live beams of one group, best first, or in the order of their draws."""

    scores: Tensor  # cumulative log-probabilities, shape (count,); -inf for an impossible candidate
    places: Tensor  # rank of the parent times the vocabulary plus the token id, int64, shape (count,)
    logprobs: Tensor  # what the token added to the score, shape (count,)


@dataclass(frozen=True, slots=True)
class Step:
    """What a strategy reads of a step."""

    params: BeamSearchParams
    groups: Sequence[Sequence[Beam]]  # live beams of each group; the rows of tensors are in their order
    width: int  # maximum number of beams of each group
    end_ids: Tensor  # tokens that end a sequence, int64 on the device of the log-probabilities
    is_last: bool  # whether this is the last token before the limit
    generator: torch.Generator  # of the draws

    @property
    def beams(self) -> list[Beam]:
        """All live beams, in the order of the rows."""
        return [beam for group in self.groups for beam in group]

    @property
    def count(self) -> int:
        """Number of candidates of each group."""
        return num_candidates(self.width, len(self.end_ids))


Strategy = Callable[[Tensor, Tensor, Step], list[Candidates]]
"""Function from `logprobs` (beams, vocab), which it may overwrite, and cumulative `scores` (beams,) of the beams to the
candidates of each group."""


def num_candidates(width: int, num_ends: int) -> int:
    """Return how many candidates leave at least `width` that do not end."""
    return max(2, 1 + num_ends) * width


def at_places(totals: Tensor, logprobs: Tensor, places: Tensor) -> Candidates:
    """Return candidates at flat `places` of `totals` and `logprobs`, both of shape (beams, vocab)."""
    return Candidates(totals.reshape(-1)[places], places, logprobs.reshape(-1)[places])


def best(values: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest entries of a vector, of equals the first; with NaN any places."""
    top, places = values.topk(count)
    lowest = top[-1]
    size = len(values)
    if on_host(values) and int((values >= lowest).sum()) == count:
        by_place = places.argsort()
        return places[by_place][top[by_place].argsort(descending=True, stable=True)]
    # entries above the lowest are unambiguous; of those equal to it the first ones are taken
    ids = torch.arange(size, device=values.device)
    firsts = torch.where(values == lowest, ids, size).topk(count, largest=False).values
    merged = torch.cat((torch.where(top > lowest, places, size), firsts)).sort().values
    ranks = values[merged.clamp(max=size - 1)].clamp(min=torch.finfo(values.dtype).min)
    ranks = torch.where(merged < size, ranks, -math.inf)
    # with NaN nothing compares equal: any places do, since the caller raises
    return merged[ranks.argsort(descending=True, stable=True)][:count].clamp_(max=size - 1)


def best_of_all(logprobs: Tensor, scores: Tensor, count: int) -> Candidates:
    totals = logprobs + scores[:, None]
    return at_places(totals, logprobs, best(totals.reshape(-1), min(count, totals.numel())))


def keep_top(logprobs: Tensor, params: BeamSearchParams, *, least: int = 1) -> Tensor:
    """Return log-probabilities with -inf outside of `top_k` and `top_p`, which keep at least `least` tokens of a row.

    Tokens equal to the last of the top k are kept too, and so is the one that crosses `top_p`.
    """
    vocab = logprobs.shape[-1]
    if params.top_k:
        lowest = logprobs.topk(min(max(params.top_k, least), vocab), dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < lowest, -math.inf)
    if params.top_p < 1.0:
        ascending, order = logprobs.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        tail[:, -min(least, vocab) :] = False
        logprobs = logprobs.masked_fill(tail.scatter(-1, order, tail), -math.inf)
    return logprobs


def best_continuations(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Select the best continuations of all beams; with the rule "any" the best of each beam, as in vLLM."""
    if step.params.eos_rule != "any":
        return [best_of_all(logprobs, scores, step.count)]
    vocab = logprobs.shape[1]
    totals = logprobs + scores[:, None]
    places = torch.cat([best(row, min(step.count, vocab)) + rank * vocab for rank, row in enumerate(totals)])
    order = totals.reshape(-1)[places].argsort(descending=True, stable=True)
    return [at_places(totals, logprobs, places[order])]


def sampled_beams(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Draw without replacement from the softmax of the scores, as transformers with `do_sample` and `num_beams` > 1.

    The filters `top_k` and `top_p` act on each beam's row before the scores are added. The draws are those of
    `beam_width` rows; there are fewer if fewer have a probability above 0. Candidates stay in the order of their draws,
    so only the first `beam_width` draws can finish; of the others the best go on.
    """
    logprobs = keep_top(logprobs, step.params, least=2)
    totals = logprobs + scores[:, None]
    missing = (step.width - len(totals)) * totals.shape[1]
    weights = torch.nn.functional.pad(totals.reshape(-1).softmax(dim=-1).cpu(), (0, missing))
    count = min(step.count, int((weights > 0).sum()))
    return [at_places(totals, logprobs, weights.multinomial(count, generator=step.generator).to(totals.device))]


def independent_samples(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Draw one token per beam; each beam is a group, and has no candidate without an allowed token.

    A score adds the log-probabilities before the filters.
    """
    weights = keep_top(logprobs, step.params).softmax(dim=-1).nan_to_num(0.0).cpu()
    # an impossible row draws token 0, whose score of -inf marks it
    weights[:, 0] += (weights.sum(dim=-1) == 0).to(weights.dtype)
    tokens = weights.multinomial(1, generator=step.generator).to(logprobs.device)
    drawn = logprobs.gather(1, tokens)
    return [Candidates(*row) for row in zip(drawn + scores[:, None], tokens, drawn, strict=True)]


def diverse_groups(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Search groups in order, each penalised for the tokens of earlier groups (diverse beam search).

    The penalty is `diversity_penalty` for each such beam (Hamming diversity), times 1 plus the discounted number of
    equal earlier tokens of the two groups if there is a discount. It stays in the cumulative score.

    Source: arXiv 1610.02424.
    """
    params = step.params
    sizes = list(map(len, step.groups))
    chosen: list[tuple[Tensor, Tensor]] = []
    candidates = []
    for group, rows, group_scores in zip(step.groups, logprobs.split(sizes), scores.split(sizes), strict=True):
        penalty = rows.new_zeros(rows.shape[1])
        for earlier, (tokens, counted) in zip(step.groups, chosen, strict=False):
            weight = params.diversity_penalty
            if params.diversity_discount and group and earlier:
                weight *= 1.0 + discounted_overlap(group, earlier, params.diversity_discount)
            penalty.index_add_(0, tokens, counted * weight)
        if not group:
            group_candidates = Candidates(group_scores, torch.empty_like(group_scores, dtype=torch.int64), group_scores)
        else:
            group_candidates = best_of_all(rows - penalty, group_scores, step.count)
        tokens = group_candidates.places % rows.shape[1]
        goes_on = ~torch.isin(tokens, step.end_ids) & group_candidates.scores.isfinite()
        chosen.append((tokens, (goes_on & (goes_on.cumsum(0) <= step.width)).to(rows.dtype)))
        candidates.append(group_candidates)
    return candidates


def discounted_overlap(group: Sequence[Beam], other: Sequence[Beam], discount: float) -> float:
    """Return the mean number of equal tokens of two groups' beams, discounted by their distance from the end."""
    pairs = list(zip(group, other, strict=False))
    overlap = sum(
        discount**distance * (left == right)
        for first, second in pairs
        for distance, (left, right) in enumerate(zip(first.tokens[::-1], second.tokens[::-1], strict=True), 1)
    )
    return overlap / len(pairs)


def diverse_siblings(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Subtract `sibling_penalty` times the rank (1, 2, …) of a continuation among those of its beam.

    The first step is plain beam search. The penalty stays in the cumulative score. Source: arXiv 1611.08562.
    """
    if not step.beams[0].tokens:
        return [best_of_all(logprobs, scores, step.count)]
    vocab = logprobs.shape[1]
    places = torch.stack([best(row, min(step.count, vocab)) for row in logprobs])
    ranks = torch.arange(1, places.shape[1] + 1, dtype=logprobs.dtype, device=logprobs.device)
    penalised = logprobs.gather(1, places) - step.params.sibling_penalty * ranks
    totals = penalised + scores[:, None]
    flat = places + torch.arange(len(places), device=places.device)[:, None] * vocab
    chosen = best(totals.reshape(-1), min(step.count, totals.numel()))
    return [Candidates(totals.reshape(-1)[chosen], flat.reshape(-1)[chosen], penalised.reshape(-1)[chosen])]


def phrase_candidates(logprobs: Tensor, scores: Tensor, step: Step) -> list[Candidates]:
    """Select the best continuations of all beams, the best of each beam, and the next phrase tokens of each beam.

    Some may occur twice. The end of sequences that lack a phrase is forbidden, except at the limit.
    `order_by_banks` orders them.

    Source: arXiv 1804.06609, 1905.04519.
    """
    beams = step.beams
    lacking = [row for row, beam in enumerate(beams) if not beam.meets_constraints]
    if lacking and not step.is_last:
        logprobs[to_device(lacking, logprobs.device)[:, None], step.end_ids] = -torch.inf
    vocab = logprobs.shape[-1]
    forced = [
        row * vocab + token for row, beam in enumerate(beams) if beam.phrases for token in beam.phrases.next_tokens()
    ]
    tops = torch.cat([best(values, 1) + row * vocab for row, values in enumerate(logprobs)])
    totals = logprobs + scores[:, None]
    top_candidates = best_of_all(logprobs, scores, step.count)
    return [at_places(totals, logprobs, torch.cat((top_candidates.places, tops, to_device(forced, logprobs.device))))]


def order_by_banks(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order distinct candidates by rank within their bank, the fullest bank first, so that banks share the places.

    A bank holds the candidates with the same number of phrase tokens.
    """
    banks: dict[int, list[Candidate]] = {}
    for candidate in {(candidate.rank, candidate.token): candidate for candidate in candidates}.values():
        assert candidate.parent.phrases is not None
        banks.setdefault(candidate.parent.phrases.advance(candidate.token).num_tokens, []).append(candidate)
    order = []
    for bank, members in banks.items():
        members.sort(key=lambda candidate: (-candidate.score, candidate.rank, candidate.token))
        order += [(place, -bank, candidate) for place, candidate in enumerate(members)]
    return [candidate for _, _, candidate in sorted(order, key=lambda entry: entry[:2])]


def strategy_for(params: BeamSearchParams) -> Strategy:
    """Return the strategy of a search; parameters that exclude each other were refused before."""
    if params.sampling != "none":
        return sampled_beams if params.sampling == "beam" else independent_samples
    if params.num_beam_groups > 1:
        return diverse_groups
    if params.sibling_penalty:
        return diverse_siblings
    return phrase_candidates if params.force_words_ids else best_continuations
