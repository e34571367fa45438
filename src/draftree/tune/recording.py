"""Recording of a target for replays: its texts with hidden states, and the seconds of its passes by rows."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.llm import LLM
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.replay.text import RecordedText
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

__all__ = ["MeasuredCosts", "measure_round_costs", "record_text", "states_of"]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 5
CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of passes and picks by rows, interpolated between the measured numbers.

    Attributes:
        passes: seconds of a pass by rows.
        picks: for each temperature seconds of the picks by rows.
    """

    passes: Mapping[int, float]
    picks: Mapping[float, Mapping[int, float]] = field(default_factory=dict)

    def pass_seconds(self, rows: int) -> float:
        """Return the seconds of a pass over so many tokens."""
        return interpolated(self.passes, rows)

    def pick_seconds(self, rows: int, temperature: float) -> float:
        """Return the seconds of the picks of so many rows; 0 at a temperature that was not measured."""
        known = self.picks.get(temperature)
        return 0.0 if known is None else interpolated(known, rows)


def interpolated(known: Mapping[int, float], rows: int) -> float:
    """Return a value between the measured ones; beyond the last by its ratio per row."""
    counts = sorted(known)
    place = bisect.bisect_left(counts, rows)
    if place == len(counts):
        return known[counts[-1]] * rows / counts[-1]
    if counts[place] == rows or place == 0:
        return known[counts[place]]
    low, high = counts[place - 1], counts[place]
    share = (rows - low) / (high - low)
    return (1 - share) * known[low] + share * known[high]


def record_text(llm: LLM, prompt: Sequence[int], params: SamplingParams, layers: Sequence[int] = ()) -> RecordedText:
    """Write a text and return it with the states of these layers.

    Args:
        llm: the target without a drafter.
        prompt: token ids.
        params: with a seed.
        layers: layers whose input is recorded, counted from 0; the number of layers is the output of the last one.
    """
    assert params.seed is not None, "a text that is replayed has a seed"
    (done,) = llm.generate([list(prompt)], params, progress=False)
    tokens = tuple(done.token_ids)
    wanted = tuple(sorted(set(layers)))
    hidden = states_of(llm.model, (*prompt, *tokens[:-1]), wanted) if wanted else None
    is_ended = done.finish_reason == "stop"
    return RecordedText(tuple(prompt), tokens, params, params.seed, is_ended, wanted, hidden)


def states_of(model: LanguageModel, tokens: Sequence[int], layers: tuple[int, ...]) -> Tensor:
    """Return hidden states of a text, shape (tokens, layers, hidden), by passes over up to 512 tokens."""
    model.reserve(model.num_open + 1, len(tokens))
    slot = model.open()
    found = []
    try:
        for start in range(0, len(tokens), CHUNK_ROWS):
            chunk = list(tokens[start : start + CHUNK_ROWS])
            job = Extend(slot, chunk, range(-1, len(chunk) - 1), logits_at=())
            hidden = model.run(Pass([job], capture=layers)).hidden
            assert hidden is not None, "the pass captured layers"
            found.append(hidden.clone())
            model.commit(slot, range(len(chunk)))
    finally:
        model.close(slot)
    return torch.cat(found)


def measure_round_costs(
    model: LanguageModel,
    *,
    max_rows: int,
    prefix: int,
    temperatures: Sequence[float],
    clock: Clock = SYSTEM_CLOCK,
) -> MeasuredCosts:
    """Measure passes and picks by rows after a prefix; the numbers of rows take turns, and medians count.

    Args:
        model: the target.
        max_rows: most tokens of a pass.
        prefix: tokens before the pass.
        temperatures: temperatures of the picks.
        clock: of the measurement.
    """
    widths = [rows for rows in ROWS if rows < max_rows] + [max_rows]
    prefix = max(1, min(prefix, model.max_length - max_rows))
    tokens = [(7 + 31 * place) % model.vocab_size for place in range(prefix + max_rows)]
    model.reserve(model.num_open + 1, prefix + max_rows)
    slot = model.open_probe()
    passes: dict[int, list[float]] = {rows: [] for rows in widths}
    picks: dict[float, dict[int, list[float]]] = {one: {rows: [] for rows in widths} for one in temperatures}
    controls = {one: controls_of(model, one) for one in temperatures}
    try:
        model.run(Pass([Extend(slot, tokens[:prefix], range(-1, prefix - 1), logits_at=())]))
        model.commit(slot, range(prefix))
        for repeat in range(-1, REPEATS):
            for rows in widths:
                for temperature in temperatures:
                    chain = tokens[prefix : prefix + rows]
                    model.synchronize()
                    start = clock()
                    logits = model.run(Pass([Extend(slot, chain, range(-1, rows - 1))])).logits
                    model.synchronize()
                    between = clock()
                    paths = [chain[1:stop] for stop in range(1, rows + 1)]
                    own = DistributionRows(History(tokens[: prefix + 1]), controls[temperature], paths)
                    with Distributions(logits, [own]) as distributions:
                        distributions.picks()
                        distributions.finite([range(rows)])
                    end = clock()
                    model.commit(slot, ())
                    if repeat >= 0:  # the first passes of a shape are slower
                        passes[rows].append(between - start)
                        picks[temperature][rows].append(end - between)
    finally:
        model.close(slot)
    return MeasuredCosts(medians(passes), {one: medians(by_rows) for one, by_rows in picks.items()})


def medians(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the median of each number of rows."""
    return {rows: statistics.median(each) for rows, each in seconds.items()}


def controls_of(model: LanguageModel, temperature: float) -> Controls:
    """Return controls with a temperature only."""
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    return build_controls(params, vocab_size=model.vocab_size, seed=0)
