"""Candidates of a step: forward passes over trees of beams, log-probabilities and the rules that change them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.beam.forest import CHUNK, Forest, Row, gathered
from draftree.beam.sequence import Columns, Hooks, SequenceSearch
from draftree.beam.strategies import Beam, best_continuations, num_candidates
from draftree.core.tensors import to_device, to_host, widened
from draftree.models.base import LanguageModel, Pass
from draftree.models.source import EncoderDecoder
from draftree.sampling.logits import Logits
from draftree.sampling.logits_processors import ban_ngrams_of_source, ban_repeated_ngrams


def restrict(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Apply penalties and bans of a generation configuration that precede forced tokens to rows (beams, vocab).

    Settings have the meaning that they have in transformers, and act on log-probabilities. A parameter of the search
    takes precedence over a setting with the same meaning.
    """
    rules = search.opening.rules
    if rules is None or search.follows_prefix:
        return
    histories = [(*search.prompt, *beam.tokens) for beam in beams]
    tokens = to_device(histories, logprobs.device)
    if rules.repetition_penalty != 1.0:
        before = logprobs.gather(1, tokens)
        factor = rules.repetition_penalty
        logprobs.scatter_(1, tokens, torch.where(before < 0, before * factor, before / factor))
    if rules.no_repeat_ngram_size and not search.params.no_repeat_ngram_size:
        ban_repeated_ngrams(logprobs, tokens, size=rules.no_repeat_ngram_size)
    source = () if search.opening.source is None else search.opening.source.tokens
    if 0 < rules.source_ngram_size <= len(source):
        ban_ngrams_of_source(logprobs, tokens, to_device([source], logprobs.device), size=rules.source_ngram_size)
    bad = [
        (row, word[-1])
        for word in rules.bad_words
        for row, history in enumerate(histories)
        if len(word) <= max(1, len(history)) and word[-1] < logprobs.shape[-1]
        if history[len(history) - len(word) + 1 :] == word[:-1]
    ]
    if bad:
        rows, ends = to_device(bad, logprobs.device).unbind(dim=1)
        logprobs[rows, ends] = -math.inf
    if search.num_steps < max(rules.min_length - len(search.prompt), rules.min_new_tokens):
        logprobs[:, search.end_ids] = -math.inf


def force(logprobs: Tensor, search: SequenceSearch) -> None:
    """Write forced and suppressed tokens into rows of a search's beams, shape (beams, vocab)."""
    rules = search.opening.rules
    step = search.num_steps
    if rules is None or search.follows_prefix:
        return
    forced = search.opening.forced
    if step < len(forced):
        only(logprobs, forced[step : step + 1], 0.0)
    if rules.forced_last is not None and search.is_last and search.params.force_eos == "none":
        only(logprobs, (rules.forced_last,), 0.0)
    ban(logprobs, (*rules.suppressed, *(rules.suppressed_first if step == len(forced) else ())))


def ban(logprobs: Tensor, tokens: Iterable[int]) -> None:
    """Write -inf over these tokens of all rows."""
    if inside := sorted({token for token in tokens if token < logprobs.shape[-1]}):
        logprobs[:, to_device(inside, logprobs.device)] = -math.inf


def only(logprobs: Tensor, tokens: Sequence[int], value: float | None) -> None:
    """Write -inf over all tokens but these; they keep their log-probabilities, or get this value."""
    ids = to_device(list(tokens), logprobs.device)
    kept = logprobs[:, ids] if value is None else torch.full_like(logprobs[:, ids], value)
    logprobs.fill_(-math.inf)
    logprobs[:, ids] = kept


def next_logprobs(rows: Sequence[Row], temperatures: Sequence[float]) -> Tensor:
    """Return log-probabilities of the next token, shape (rows, vocab), with one temperature for each row."""
    logits = gathered(rows)
    if set(temperatures) != {1.0}:
        logits = logits / to_device(temperatures, logits.device, dtype=logits.dtype)[:, None]
    return logits.log_softmax(dim=-1)


def shape(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Write the penalties and bans of a search's parameters into the rows of these beams, shape (beams, vocab)."""
    params = search.params
    step = search.num_steps
    prefix = params.prefix_token_ids
    restrict(logprobs, search, beams)
    if params.unk_penalty and params.unk_token_id is not None:
        logprobs[:, params.unk_token_id] -= params.unk_penalty
    ban(logprobs, params.suppress_tokens)
    if step < len(prefix) and params.prefix_bias_beta:
        # the token of the soft prefix gets a share of the probability, in beams that follow it so far
        rows = to_device([row for row, beam in enumerate(beams) if beam.tokens == prefix[:step]], logprobs.device)
        logprobs[rows] += math.log1p(-params.prefix_bias_beta)
        before = logprobs[rows, prefix[step]]
        share = torch.full_like(before, math.log(params.prefix_bias_beta))
        logprobs[rows, prefix[step]] = torch.logaddexp(before, share)
    elif step < len(prefix):
        only(logprobs, prefix[step : step + 1], None if params.count_prefix else 0.0)
    elif search.is_last and params.force_eos != "none":
        only(logprobs, search.ends, 0.0 if params.force_eos == "zero_score" else None)
    elif step < search.minimum:
        logprobs[:, search.end_ids] = -math.inf
    if params.no_repeat_ngram_size:
        prompt = search.prompt if params.ngram_scope == "all" else ()
        tokens = to_device([(*prompt, *beam.tokens) for beam in beams], logprobs.device)
        ban_repeated_ngrams(logprobs, tokens, size=params.no_repeat_ngram_size)
    _allow(logprobs, search, beams)
    force(logprobs, search)


def _allow(logprobs: Tensor, search: SequenceSearch, beams: Sequence[Beam]) -> None:
    """Keep what the trie or the function allows."""
    vocab = logprobs.shape[-1]
    if (trie := search.params.allowed_trie) is not None:
        nodes = [beam.trie_node for beam in beams]
        rows, tokens = map(torch.from_numpy, trie.allowed(nodes, vocab))
        ending = trie.inner_ends(nodes)
        if len(ending):
            # one end token, so that no sequence is found twice
            ends = search.end_ids[logprobs[ending][:, search.end_ids].argmax(dim=1)].cpu()
            rows, tokens = torch.cat([rows, torch.from_numpy(ending)]), torch.cat([tokens, ends])
    elif (function := search.params.prefix_allowed_tokens_fn) is not None:
        pairs = [
            (row, int(token))
            for row, beam in enumerate(beams)
            for token in function(search.index, [*search.prompt, *beam.tokens])
            if 0 <= token < vocab
        ]
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
    step = search.num_steps
    changes = (
        search.strategy is not best_continuations,
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
    logits: Logits, beams: Mapping[SequenceSearch, Sequence[Beam]]
) -> dict[SequenceSearch, list[Columns] | None]:
    """Return what `candidates_of` does, for the scored beams of plain searches.

    Only the best `count` tokens of a beam can be among the best `count` of all beams. Their search reads each row of
    logits twice and writes nothing; log-probabilities of the whole vocabulary are never made. After a native pass the
    search is native too, so that no threads of torch delay the next pass. Rows of earlier passes are searched by the
    same implementation as those of the last.
    """
    with logits.computing():
        logits = logits.replaced(gathered(scored_rows(itertools.chain.from_iterable(beams.values()))))
    counts = [num_candidates(search.params.beam_width, len(search.ends)) for search in beams]
    top = logits.top([None] * logits.num_rows, min(max(counts), logits.width))
    columns: dict[SequenceSearch, list[Columns] | None] = {}
    first = 0
    for (search, search_beams), count in zip(beams.items(), counts, strict=True):
        rows = slice(first, first + len(search_beams))
        first = rows.stop
        tokens = np.array([row[:count] for row in top.tokens[rows]], dtype=np.int64)
        logprobs = np.array([row[:count] for row in top.scores[rows]]) - np.array(top.totals[rows])[:, None]
        logprobs = np.minimum(logprobs, 0.0)  # a score bounds its continuations, rounding included
        totals = (logprobs + np.array([beam.score for beam in search_beams])[:, None]).ravel()
        places = (tokens + logits.width * np.arange(len(tokens))[:, None]).ravel()
        order = np.lexsort((places, -totals))[: None if search.params.eos_rule == "any" else count]
        has_nan = np.isnan(logprobs).any()
        columns[search] = None if has_nan else [np.stack((totals, places, logprobs.ravel()))[:, order]]
    return columns


def run_pass(
    model: LanguageModel, forests: Sequence[Forest], chunk: int = CHUNK, *, attends: bool = False
) -> tuple[int, Logits]:
    """Run the jobs of forests on their model in one pass; returns the number of tokens, and the logits.

    `attends` asks for weights of cross-attention, of an encoder-decoder model.
    """
    jobs = [pair for forest in forests for pair in forest.jobs(chunk)]
    pass_ = Pass([job for _, job in jobs])
    attention: Sequence[np.ndarray | None]
    if attends:
        assert isinstance(model, EncoderDecoder), "the searches were checked"
        result, attention = model.run_attending(pass_)
    else:
        result = model.run(pass_)
        attention = [None] * len(jobs)
    logits = result.logits.tensor()
    first = 0
    for (trunk, job), weights in zip(jobs, attention, strict=True):
        first = trunk.note(job, logits, first, weights)
    return sum(len(job.tokens) for _, job in jobs), result.logits


def scored_rows(beams: Iterable[Beam], place: int = 0) -> list[Row]:
    """Return the rows of scored beams by the model at `place` of their search."""
    return [row for beam in beams if (row := beam.tips[place].row) is not None]


def combined_logprobs(search: SequenceSearch, logprobs: Tensor, beams: Sequence[Beam]) -> Tensor:
    """Return log-probabilities of the ensemble's mean probability, plus those of a language model (shallow fusion)."""
    params = search.params
    num_others = len(params.models)
    if num_others:
        others = [
            next_logprobs(scored_rows(beams, place), [params.temperature] * len(beams)).to(logprobs)
            for place in range(1, 1 + num_others)
        ]
        logprobs = torch.stack([logprobs, *others]).logsumexp(dim=0) - math.log(1 + num_others)
    if params.lm_model is None:
        return logprobs
    fused = next_logprobs(scored_rows(beams, 1 + num_others), [1.0] * len(beams))
    return logprobs + params.lm_weight * fused.to(logprobs)


def candidates_of(
    scored: Mapping[SequenceSearch, list[list[Beam]]], logits: Logits, hooks: Hooks | None
) -> list[list[Columns] | None]:
    """Return for each search the candidates of its groups, or None if a row has NaN.

    `scored` has the scored beams of each group, and `logits` are those of the last pass of the searched model.
    """
    beams = {search: [beam for group in groups for beam in group] for search, groups in scored.items()}
    # elsewhere than on the host, scores and totals would take two reads
    all_rows = scored_rows(itertools.chain.from_iterable(beams.values()))
    may_be_quick = hooks is None and all(row.logits.device.type == "cpu" for row in all_rows)
    # decided for each search alone: batch mates change no rounding
    quick = {search: search_beams for search, search_beams in beams.items() if may_be_quick and is_quick(search)}
    rest = {search: groups for search, groups in scored.items() if search not in quick}
    columns = quick_columns(logits, quick) if quick else {}
    if rest:
        columns |= _whole_rows(rest, {search: beams[search] for search in rest}, hooks)
    return [columns[search] for search in scored]


def _whole_rows(
    scored: Mapping[SequenceSearch, list[list[Beam]]],
    beams: Mapping[SequenceSearch, Sequence[Beam]],
    hooks: Hooks | None,
) -> dict[SequenceSearch, list[Columns] | None]:
    """Return the candidates from log-probabilities of the whole vocabulary, with one copy from the device."""
    temperatures = [search.params.temperature for search, search_beams in beams.items() for _ in search_beams]
    logprobs = next_logprobs(scored_rows(itertools.chain.from_iterable(beams.values())), temperatures)
    row_is_nan = logprobs.amax(dim=-1).isnan()  # the maximum of a row with NaN is NaN
    sizes = list(map(len, beams.values()))
    parts: list[Tensor] = []
    counts = []
    for (search, search_beams), rows, is_nan in zip(
        beams.items(), logprobs.split(sizes), row_is_nan.split(sizes), strict=True
    ):
        has_nan = is_nan.any()
        if search.params.models or search.params.lm_model is not None:
            rows = combined_logprobs(search, rows, search_beams)
            has_nan = has_nan | rows.amax(dim=-1).isnan().any()
        if hooks is not None:
            rows = hooks.process(search, rows)
        shape(rows, search, search_beams)
        groups = search.select(rows, scored[search])
        counts.append([len(group.scores) for group in groups])
        parts += [widened(has_nan)[None], *(widened(tensor) for group in groups for tensor in group)]
    numbers = np.array(to_host(torch.cat(parts)))
    columns: dict[SequenceSearch, list[Columns] | None] = {}
    for search, own_counts in zip(scored, counts, strict=True):
        has_nan, numbers = bool(numbers[0]), numbers[1:]
        *parts_of_groups, numbers = np.split(numbers, np.cumsum([3 * count for count in own_counts]))
        columns[search] = None if has_nan else [part.reshape(3, -1) for part in parts_of_groups]
    return columns
