"""The steps of `generate`: what it would hold, and hand to the user's code, when a token is chosen.

A step has a length: that of all rows' ids, padding included. Processors, criteria and streamer get at each step the
ids and scores that `generate` would hand them. Where one of them may remember earlier calls, or watches the batch as a
whole, all rows take every step together, and the calls are those of `generate` one for one. Where all are known to be
functions of a row alone, rows go on at their own pace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from draftree.core.errors import ConfigurationError, NonFiniteLogitsError
from draftree.core.noise import Noise, gumbel
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.engine.sequence import WritingSequence
from draftree.sampling.distributions import NodeDistributions
from draftree.sampling.logits_processors import ban_repeated_ngrams
from draftree.sampling.params import NGRAM_SCOPES
from draftree.verifiers.base import RandomSource, Verifier

SEEDS = 2**63 - 1


class GeneratedNgramsProcessor(LogitsProcessor):
    """Bans tokens that would repeat an n-gram of `size` tokens after the first `prompt_length` columns of the ids."""

    def __init__(self, size: int, prompt_length: int) -> None:
        self.size = size
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of shape (rows, vocab) with -inf at the banned tokens."""
        return ban_repeated_ngrams(scores.clone(), input_ids[:, self.prompt_length :], size=self.size)


def scoped(processors: Any, scope: str, prompt_length: int) -> Any:
    """Return the processors of a call with the n-gram blocking of a scope; `prompt_length` includes padding."""
    if scope not in NGRAM_SCOPES:
        raise ConfigurationError(f"ngram_scope={scope!r} is unknown: give 'all' or 'generated'")
    if scope == "all":
        return processors
    if not any(type(processor) is NoRepeatNGramLogitsProcessor for processor in processors):
        raise ConfigurationError(
            f"ngram_scope={scope!r} needs no_repeat_ngram_size of at least 1: give both or neither"
        )
    return LogitsProcessorList(
        GeneratedNgramsProcessor(processor.ngram_size, prompt_length)
        if type(processor) is NoRepeatNGramLogitsProcessor
        else processor
        for processor in processors
    )


ROW_WISE = frozenset(
    {
        processing.MinLengthLogitsProcessor,
        processing.MinNewTokensLengthLogitsProcessor,
        processing.TemperatureLogitsWarper,
        processing.TopPLogitsWarper,
        processing.TopKLogitsWarper,
        processing.MinPLogitsWarper,
        processing.TypicalLogitsWarper,
        processing.EpsilonLogitsWarper,
        processing.EtaLogitsWarper,
        processing.NoRepeatNGramLogitsProcessor,
        GeneratedNgramsProcessor,
        processing.SequenceBiasLogitsProcessor,
        processing.NoBadWordsLogitsProcessor,
        processing.ForcedBOSTokenLogitsProcessor,
        processing.ForcedEOSTokenLogitsProcessor,
        processing.ExponentialDecayLengthPenalty,
        processing.LogitNormalization,
        processing.SuppressTokensAtBeginLogitsProcessor,
        processing.SuppressTokensLogitsProcessor,
        stopping.MaxLengthCriteria,
        stopping.StopStringCriteria,
        stopping.EosTokenCriteria,
    }
)
"""Functions of one row's ids and scores, which do not depend on the other rows."""
BY_PLACE = frozenset(
    {
        processing.RepetitionPenaltyLogitsProcessor,
        processing.EncoderRepetitionPenaltyLogitsProcessor,
        processing.EncoderNoRepeatNGramLogitsProcessor,
    }
)
"""Functions of one row that keep something for each place in the batch: they must see all rows."""


@dataclass(slots=True, eq=False)
class Row:
    """One row of the batch. Mutated by the walk."""

    place: int
    num_pads: int  # tokens of padding before the prompt
    sequence: WritingSequence  # without the padding
    noise: Noise | None  # None where the likeliest token is taken


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The user's code, and what transformers made out of the generation config."""

    processors: Any
    criteria: Any
    streamer: Any = None
    keeps_scores: bool = False
    keeps_logits: bool = False


def callbacks_of(config: Any, processors: Any, criteria: Any, streamer: Any) -> Callbacks:
    """Return what a call of `generate` hands over, with what its config keeps."""
    as_dict = bool(config.return_dict_in_generate)
    return Callbacks(
        processors,
        criteria,
        streamer,
        keeps_scores=as_dict and bool(config.output_scores),
        keeps_logits=as_dict and bool(config.output_logits),
    )


def pad_id_of(config: Any, calls: Callbacks) -> int | None:
    """Return the token after finished rows; None, as in `generate`, if no criterion has an end-of-text token."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in calls.criteria):
        return None
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


class Steps:
    """Tokens, scores and logits of all steps. Mutated by `take`.

    `input_ids` has the shape (batch, length). `pad_id` stands after finished rows; without one they are written on.
    """

    def __init__(self, input_ids: Tensor, *, max_length: int, pad_id: int | None, callbacks: Callbacks) -> None:
        self._calls = callbacks
        self._start = input_ids.shape[1]
        self._batch = input_ids.shape[0]
        self._ids = input_ids.new_full((self._batch, max_length), 0 if pad_id is None else pad_id)
        self._ids[:, : self._start] = input_ids
        self._length = self._start
        self._unfinished = [True] * self._batch
        criteria = {type(criterion) for criterion in callbacks.criteria}
        kinds = {type(processor) for processor in callbacks.processors} | criteria
        self._by_place = bool(kinds & BY_PLACE)
        self._writes_on = self._batch > 1 and pad_id is None and not criteria <= {stopping.MaxLengthCriteria}
        is_known = kinds <= ROW_WISE | BY_PLACE and callbacks.streamer is None
        self.in_step = self._batch > 1 and (self._writes_on or not is_known)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    @property
    def sequences(self) -> Tensor:
        """All ids, as far as the longest row goes."""
        return self._ids[:, : self._length].clone()

    def take(self, rows: Sequence[Row], length: int, logits: Tensor) -> tuple[list[int], list[bool]]:
        """Choose the next token of rows of this length, padding included; return the tokens, and which rows end there.

        Where rows are in step, these are all that are not finished. `logits` are the model's, shape (rows, vocab).
        """
        scores = self._processed(rows, length, logits)
        picks = self._picks(rows, length, scores)
        places = self._places(rows)
        self._ids[places, length] = torch.tensor(picks, dtype=self._ids.dtype, device=self._ids.device)
        self._length = max(self._length, length + 1)
        flags = self._flags(rows, length + 1)
        for row, flag in zip(rows, flags, strict=True):
            self._unfinished[row.place] &= not flag
        if self._calls.streamer is not None:
            self._calls.streamer.put(self._ids[:, length].cpu())
        if self._writes_on:
            # without an end-of-text criterion generate has nothing to pad with: all rows go on until the last one ends
            flags = [not any(self._unfinished)] * len(rows)
        return picks, flags

    def _places(self, rows: Sequence[Row]) -> Tensor:
        return torch.tensor([row.place for row in rows], device=self._ids.device)

    def _seen(self, rows: Sequence[Row], *, whole: bool) -> list[int]:
        """Return the rows of the batch for a call; the first wanted row replaces rows that are not wanted."""
        wanted = [row.place for row in rows]
        if not whole:
            return wanted
        return [place if place in wanted or self.in_step else wanted[0] for place in range(self._batch)]

    def _processed(self, rows: Sequence[Row], length: int, logits: Tensor) -> Tensor:
        # float32, as generate does; a copy outside of inference mode, for processors that write in place
        scores = raw = logits.to(dtype=torch.float32, device=self._ids.device, copy=True)
        if self._calls.keeps_logits:
            self._keep(self.logits, rows, length, raw)
        if len(self._calls.processors):
            whole = self.in_step or self._by_place
            ids = self._ids[self._seen(rows, whole=whole), :length]
            if whole:
                index = {row.place: number for number, row in enumerate(rows)}
                filler = torch.zeros_like(raw[:1]) if self.in_step else raw[:1]
                parts = [raw[index[place], None] if place in index else filler for place in range(self._batch)]
                scores = self._calls.processors(ids, torch.cat(parts))[self._places(rows)]
            else:
                scores = self._calls.processors(ids, raw)
        if self._calls.keeps_scores:
            self._keep(self.scores, rows, length, scores)
        return scores

    def _keep(self, kept: list[Tensor], rows: Sequence[Row], length: int, values: Tensor) -> None:
        step = length - self._start
        while len(kept) <= step:
            kept.append(values.new_zeros(self._batch, values.shape[-1]))
        kept[step][self._places(rows)] = values

    def _picks(self, rows: Sequence[Row], length: int, scores: Tensor) -> list[int]:
        noises = [row.noise for row in rows if row.noise is not None]
        if noises:
            keys = [noise.keys(length - row.num_pads) for noise, row in zip(noises, rows, strict=True)]
            token_ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
            scores = scores + gumbel(keys, token_ids)
        best = scores.argmax(dim=-1, keepdim=True)
        for row, value in zip(rows, scores.gather(1, best)[:, 0].tolist(), strict=True):
            if math.isnan(value) or value == -math.inf:
                raise NonFiniteLogitsError(
                    f"row {row.place}: at position {length} the scores are NaN, or the logits processors left no "
                    "token: check weights and dtype, or loosen the processors"
                )
        return best[:, 0].tolist()

    def _flags(self, rows: Sequence[Row], length: int) -> list[bool]:
        seen = self._seen(rows, whole=self.in_step)
        ids = self._ids[seen, :length]
        scores = tuple(self.scores) if self._calls.keeps_scores else None
        flags = torch.as_tensor(self._calls.criteria(ids, scores)).expand(len(seen)).tolist()
        return [flags[row.place] for row in rows] if self.in_step else flags


# Walks the drafted trees of a batch in the order in which `generate` takes its steps, along the picks.
#
# The rule is `coupled`: it goes down for as long as the pick is a child. It differs in when the logits become scores:
# at a node only once the walk stands there, since the user's code must not be asked about texts that are never written.


UNDECIDED = -1  # the bonus token of a walk that goes on


@dataclass(slots=True, eq=False)
class _Walk:
    """Where the walk down one tree stands: at a node and its twins, which stand for the same text."""

    row: Row
    tree: TokenTree
    distributions: NodeDistributions
    nodes: list[int] = field(default_factory=lambda: [ROOT])
    depth: int = 0
    bonus: int = UNDECIDED

    @property
    def length(self) -> int:
        return self.row.num_pads + len(self.row.sequence.history) + self.depth

    def children(self, token: int) -> list[int]:
        here = set(self.nodes)
        pairs = enumerate(zip(self.tree.parents, self.tree.tokens, strict=True))
        return [node for node, (parent, other) in pairs if parent in here and other == token]


@final
class StepwiseVerifier(Verifier):
    """Keeps what `generate` would have written, step by step."""

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    shares_noise: ClassVar[bool] = True

    def __init__(self, steps: Steps, rows: Sequence[Row]) -> None:
        super().__init__(None)
        self._steps = steps
        self._rows = {id(row.sequence.history): row for row in rows}

    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
        return self.verify_many([tree], [distributions], [chance])[0]

    def verify_many(
        self, trees: Sequence[TokenTree], distributions: Sequence[NodeDistributions], chances: Sequence[RandomSource]
    ) -> list[Verdict]:
        """All trees, the shortest texts first; side by side where rows are in step."""
        pairs = zip(trees, distributions, strict=True)
        walks = [_Walk(self._rows[id(each.source.history)], tree, each) for tree, each in pairs]
        while walking := [walk for walk in walks if walk.bonus == UNDECIDED]:
            length = min(walk.length for walk in walking)
            self._step([walk for walk in walking if walk.length == length], length)
        return [Verdict(tuple(walk.tree.path(walk.nodes[0])), walk.bonus) for walk in walks]

    def _step(self, walks: Sequence[_Walk], length: int) -> None:
        logits = torch.stack([walk.distributions.raw[walk.nodes[0] + 1] for walk in walks])
        picks, ends = self._steps.take([walk.row for walk in walks], length, logits)
        children = [walk.children(pick) for walk, pick in zip(walks, picks, strict=True)]
        halts = self._steps.in_step and any(
            not below and not ends_here for below, ends_here in zip(children, ends, strict=True)
        )
        for walk, pick, ends_here, below in zip(walks, picks, ends, children, strict=True):
            if ends_here:
                walk.row.sequence.end_at(length + 1 - walk.row.num_pads)
            if ends_here or halts or not below:
                walk.bonus = pick
            else:
                walk.nodes, walk.depth = below, walk.depth + 1
