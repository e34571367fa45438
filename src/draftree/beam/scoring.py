"""Candidates of a step: forward passes over trees of beams, log-probabilities and the rules that change them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftree.beam.candidates import Beam, Candidates, Columns
from draftree.beam.forest import CHUNK, Forest, gathered
from draftree.beam.sequence import Hooks, SequenceSearch
from draftree.beam.strategies import BeamStrategy
from draftree.core.tensors import to_device, to_host
from draftree.models.base import LanguageModel, Pass
from draftree.models.source import EncoderDecoder
from draftree.sampling.logits import Logits, Top
from draftree.sampling.logits_processors import ban_ngrams_of_source, ban_repeated_ngrams

if TYPE_CHECKING:
    from draftree.sampling.decoding_rules import DecodingRules


def restrict(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Apply penalties and bans of a generation configuration that precede forced tokens to rows (beams, vocab).

    Settings have the meaning that they have in transformers, and act on log-probabilities. A parameter of the search
    takes precedence over a setting with the same meaning.
    """
    rules = search.opening.rules
    if rules is None or _is_given(search):
        return
    histories = [(*search.prompt, *beam.tokens) for beam in beams]
    tokens = to_device(histories, logprobs.device)
    if rules.repetition_penalty != 1.0:
        own = logprobs.gather(1, tokens)
        factor = rules.repetition_penalty
        logprobs.scatter_(1, tokens, torch.where(own < 0, own * factor, own / factor))
    if rules.no_repeat_ngram_size and not search.params.no_repeat_ngram_size:
        ban_repeated_ngrams(logprobs, tokens, size=rules.no_repeat_ngram_size)
    source = () if search.opening.source is None else search.opening.source.tokens
    if 0 < rules.source_ngram_size <= len(source):
        read = to_device([source] * len(beams), logprobs.device)
        ban_ngrams_of_source(logprobs, tokens, read, size=rules.source_ngram_size)
    _ban_words(logprobs, rules, histories)
    least = max(rules.min_length - len(search.prompt), rules.min_new_tokens)
    if search.num_tokens < least and search.ends:
        logprobs[:, search.end_ids] = -math.inf


def _ban_words(logprobs: Tensor, rules: DecodingRules, histories: Sequence[tuple[int, ...]]) -> None:
    vocab = logprobs.shape[-1]
    places = [
        (row, word[-1])
        for word in rules.bad_words
        for row, tokens in enumerate(histories)
        if len(word) <= max(1, len(tokens)) and word[-1] < vocab and tokens[len(tokens) - len(word) + 1 :] == word[:-1]
    ]
    if places:
        rows, tokens = zip(*places, strict=True)
        logprobs[to_device(rows, logprobs.device), to_device(tokens, logprobs.device)] = -math.inf


def force(logprobs: Tensor, search: SequenceSearch) -> None:
    """Write forced and suppressed tokens into rows of a search's beams, shape (beams, vocab)."""
    rules = search.opening.rules
    step = search.num_tokens
    if rules is None or _is_given(search):
        return
    forced = search.opening.forced
    if step < len(forced):
        only(logprobs, forced[step : step + 1], 0.0)
    if rules.forced_last is not None and search.is_last and search.params.force_eos == "none":
        only(logprobs, (rules.forced_last,), 0.0)
    suppressed = (*rules.suppressed, *(rules.suppressed_first if step == len(forced) else ()))
    if suppressed:
        inside = sorted({token for token in suppressed if token < logprobs.shape[-1]})
        logprobs[:, to_device(inside, logprobs.device)] = -math.inf


def only(logprobs: Tensor, tokens: Sequence[int], value: float | None) -> None:
    """Write -inf over all tokens but these; they keep their log-probabilities, or get this value."""
    ids = to_device(list(tokens), logprobs.device)
    kept = logprobs[:, ids] if value is None else torch.full_like(logprobs[:, ids], value)
    logprobs.fill_(-math.inf)
    logprobs[:, ids] = kept


def _is_given(search: SequenceSearch) -> bool:
    """Whether the next token is one of `prefix_token_ids`, which settings do not restrict."""
    return search.num_tokens < len(search.params.prefix_token_ids) and not search.params.prefix_bias_beta


def next_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return log-probabilities of the next token, shape (rows, vocab), with one temperature for each row."""
    if set(temperatures) != {1.0}:
        logits = logits / to_device(temperatures, logits.device, dtype=logits.dtype)[:, None]
    return logits.log_softmax(dim=-1)


def shape(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Write the penalties and bans of a search's parameters into the rows of these beams, shape (beams, vocab)."""
    params = search.params
    step = search.num_tokens
    restrict(logprobs, search, beams)
    vocab = logprobs.shape[-1]
    if params.unk_penalty and params.unk_token_id is not None:
        logprobs[:, params.unk_token_id] -= params.unk_penalty
    if params.suppress_tokens:
        logprobs[
            :, to_device([token for token in params.suppress_tokens if token < vocab], logprobs.device)
        ] = -math.inf
    if step < len(params.prefix_token_ids) and params.prefix_bias_beta:
        _favour(logprobs, search, beams)
    elif step < len(params.prefix_token_ids):
        only(logprobs, params.prefix_token_ids[step : step + 1], None if params.count_prefix else 0.0)
    elif search.is_last and params.force_eos != "none":
        only(logprobs, search.ends, 0.0 if params.force_eos == "zero_score" else None)
    elif step < search.minimum and search.ends:
        logprobs[:, search.end_ids] = -math.inf
    if params.no_repeat_ngram_size:
        before = search.prompt if params.ngram_scope == "all" else ()
        tokens = to_device([(*before, *beam.tokens) for beam in beams], logprobs.device)
        ban_repeated_ngrams(logprobs, tokens, size=params.no_repeat_ngram_size)
    _allow(logprobs, search, beams)
    force(logprobs, search)


def _favour(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Give the next token of the soft prefix a share of the probability, in beams that follow it so far."""
    prefix = search.params.prefix_token_ids
    step = search.num_tokens
    share = search.params.prefix_bias_beta
    rows = [row for row, beam in enumerate(beams) if beam.tokens == tuple(prefix[:step])]
    if not rows:
        return
    at = to_device(rows, logprobs.device)
    logprobs[at] += math.log1p(-share)
    own = logprobs[at, prefix[step]]
    logprobs[at, prefix[step]] = torch.logaddexp(own, torch.full_like(own, math.log(share)))


def _allow(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Keep what the trie or the function allows."""
    params = search.params
    vocab = logprobs.shape[-1]
    if params.allowed_trie is not None:
        nodes = [beam.trie_node for beam in beams]
        rows, tokens = params.allowed_trie.allowed(nodes, vocab)
        ending = params.allowed_trie.inner_ends(nodes)
        if len(ending):
            # one end token, so that no sequence is found twice
            ends = search.end_ids[logprobs[ending][:, search.end_ids].argmax(dim=1)].cpu()
            rows, tokens = torch.cat([rows, torch.from_numpy(ending)]), torch.cat([tokens, ends])
    elif params.prefix_allowed_tokens_fn is not None:
        allowed = [
            [int(token) for token in params.prefix_allowed_tokens_fn(search.index, [*search.prompt, *beam.tokens])]
            for beam in beams
        ]
        pairs = [(row, token) for row, own in enumerate(allowed) for token in own if 0 <= token < vocab]
        rows, tokens = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    else:
        return
    rows, tokens = rows.to(logprobs.device), tokens.to(logprobs.device)
    kept = logprobs[rows, tokens]
    logprobs.fill_(-math.inf)
    logprobs[rows, tokens] = kept


def is_quick(search: SequenceSearch) -> bool:
    """Whether the next candidates of a search depend on the plain log-probabilities of one model only."""
    params = search.params
    step = search.num_tokens
    changes = (
        not isinstance(search.strategy, BeamStrategy),
        params.temperature != 1.0,
        params.models,
        params.lm_model is not None,
        params.unk_penalty,
        params.suppress_tokens,
        step < len(params.prefix_token_ids),
        search.is_last and params.force_eos != "none",
        step < search.minimum and search.ends,
        params.no_repeat_ngram_size,
        params.allowed_trie is not None,
        params.prefix_allowed_tokens_fn is not None,
        search.opening.rules is not None,
        params.reads_attention,
    )
    return not any(changes)


def quick_columns(
    logits: Logits, searches: Sequence[SequenceSearch], beams: Sequence[Sequence[Beam]]
) -> list[tuple[list[Columns], bool]]:
    """Return what `candidates_of` does, for plain searches.

    Only the best `count` tokens of a beam can be among the best `count` of all beams. Their search reads each row of
    logits twice and writes nothing; log-probabilities of the whole vocabulary are never made. After a native pass the
    search is native too, so that no threads of torch delay the next pass. Rows of earlier passes are searched by the
    same implementation as those of the last.
    """
    rows = [row for own in beams for beam in own if (row := beam.tips[0].row) is not None]
    with logits.computing():
        logits = logits.replaced(gathered(rows))
    width = logits.width
    counts = [search.strategy.num_candidates(search.params.beam_width, len(search.ends)) for search in searches]
    top = logits.top([None] * logits.num_rows, min(max(counts), width))
    found = []
    first = 0
    for search, own, count in zip(searches, beams, counts, strict=True):
        places = slice(first, first + len(own))
        first = places.stop
        columns, has_nan = _best(top, places, [beam.score for beam in own], count, width, search)
        found.append(([columns], has_nan))
    return found


def _best(
    top: Top, rows: slice, scores: Sequence[float], count: int, width: int, search: SequenceSearch
) -> tuple[Columns, bool]:
    """Return the best candidates of some rows: by score, rank of the parent, token."""
    tokens = np.array([row[:count] for row in top.tokens[rows]], dtype=np.int64)
    logprobs = np.array([row[:count] for row in top.scores[rows]]) - np.array(top.totals[rows])[:, None]
    logprobs = np.minimum(logprobs, 0.0)  # a score bounds its continuations, rounding included
    totals = (logprobs + np.array(scores)[:, None]).ravel()
    places = (tokens + width * np.arange(len(tokens))[:, None]).ravel()
    order = np.lexsort((places, -totals))
    if search.params.eos_rule != "any":
        order = order[:count]
    columns = (totals[order].tolist(), places[order].tolist(), logprobs.ravel()[order].tolist())
    return columns, bool(np.isnan(logprobs).any())


@dataclass(slots=True)
class SearchStats:
    """Counts of a search: forward passes, the tokens in them, and the most slots of one sequence."""

    num_passes: int = 0
    num_rows: int = 0
    most_slots: int = 0


def run_pass(
    model: LanguageModel, forests: Sequence[Forest], chunk: int = CHUNK, *, attends: bool = False
) -> tuple[int, Logits]:
    """Run the jobs of forests on their model in one pass; returns the number of tokens, and the logits.

    `attends` asks for weights of cross-attention, of an encoder-decoder model.
    """
    jobs = [forest.jobs(chunk) for forest in forests]
    together = [job for own in jobs for _, job in own]
    attention: list[np.ndarray] | None = None
    if attends:
        assert isinstance(model, EncoderDecoder), "the searches were checked"
        result, attention = model.run_attending(Pass(together))
    else:
        result = model.run(Pass(together))
    logits = result.logits.tensor()
    first = 0
    number = 0
    for forest, own in zip(forests, jobs, strict=True):
        weights = None if attention is None else attention[number : number + len(own)]
        first = forest.note(own, logits, first, weights)
        number += len(own)
    return sum(len(job.tokens) for job in together), result.logits


def logprobs_of(beams: Sequence[Sequence[Beam]], place: int, temperatures: Sequence[float]) -> Tensor:
    """Return log-probabilities of scored beams by the model at `place` of each search, shape (beams, vocab)."""
    rows = [row for own in beams for beam in own if (row := beam.tips[place].row) is not None]
    each = [warm for own, warm in zip(beams, temperatures, strict=True) for _ in own]
    return next_logprobs(gathered(rows), each)


def combined_logprobs(search: SequenceSearch, logprobs: Tensor, beams: Sequence[Beam]) -> Tensor:
    """Return log-probabilities of the ensemble's mean probability, plus those of a language model (shallow fusion)."""
    params = search.params
    num_others = len(params.models)
    if num_others:
        others = [logprobs_of([beams], place, [params.temperature]) for place in range(1, 1 + num_others)]
        stacked = torch.stack([logprobs, *(other.to(logprobs) for other in others)])
        logprobs = stacked.logsumexp(dim=0) - math.log(len(stacked))
    if params.lm_model is None:
        return logprobs
    return logprobs + params.lm_weight * logprobs_of([beams], 1 + num_others, [1.0]).to(logprobs)


def candidates_of(
    scored: Mapping[SequenceSearch, list[list[Beam]]], logits: Logits, hooks: Hooks | None
) -> list[tuple[list[Columns], bool]]:
    """Return for each search the candidates of its groups, and whether a row has NaN.

    `scored` has the scored beams of each group, and `logits` are those of the last pass of the searched model.
    """
    beams = {search: [beam for group in groups for beam in group] for search, groups in scored.items()}
    # elsewhere than on the host, scores and totals would take two reads
    rows = [row for own in beams.values() for beam in own if (row := beam.tips[0].row)]
    on_host = all(row.logits.device.type == "cpu" for row in rows)
    # decided for each search alone: batch mates change no rounding
    quick = [search for search in scored if hooks is None and on_host and is_quick(search)]
    rest = [search for search in scored if search not in quick]
    found: dict[SequenceSearch, tuple[list[Columns], bool]] = {}
    if quick:
        columns = quick_columns(logits, quick, [beams[search] for search in quick])
        found.update(zip(quick, columns, strict=True))
    if rest:
        columns = _whole_rows({search: scored[search] for search in rest}, [beams[search] for search in rest], hooks)
        found.update(zip(rest, columns, strict=True))
    return [found[search] for search in scored]


def _whole_rows(
    scored: Mapping[SequenceSearch, list[list[Beam]]], flat: Sequence[Sequence[Beam]], hooks: Hooks | None
) -> list[tuple[list[Columns], bool]]:
    """Return the candidates from log-probabilities of the whole vocabulary, with one copy from the device."""
    logprobs = logprobs_of(flat, 0, [search.params.temperature for search in scored])
    row_is_nan = logprobs.amax(dim=-1).isnan()  # the maximum of a row with NaN is NaN
    first = 0
    candidates: list[list[Candidates]] = []
    is_nan = []
    for search, beams in zip(scored, flat, strict=True):
        rows = slice(first, first + len(beams))
        first = rows.stop
        own = logprobs[rows]
        own_is_nan = row_is_nan[rows].any()
        if search.params.models or search.params.lm_model is not None:
            own = combined_logprobs(search, own, beams)
            own_is_nan = own_is_nan | own.amax(dim=-1).isnan().any()
        if hooks is not None:
            own = hooks.process(search, own)
        shape(own, search, beams)
        candidates.append(search.select(own, scored[search]))
        is_nan.append(own_is_nan)
    tensors = [tensor.double() for groups in candidates for group in groups for tensor in group]
    numbers = iter(to_host(torch.cat((torch.stack(is_nan).double(), *tensors))))
    flags = [bool(number) for number in itertools.islice(numbers, len(is_nan))]
    found = []
    for groups, flag in zip(candidates, flags, strict=True):
        columns = []
        for group in groups:
            scores, places, own_logprobs = (list(itertools.islice(numbers, len(group.scores))) for _ in range(3))
            columns.append((scores, [int(place) for place in places], own_logprobs))
        found.append((columns, flag))
    return found
