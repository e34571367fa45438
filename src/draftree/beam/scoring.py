"""Passes of models over forests, log-probabilities of beams, and the one read of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.beam.candidates import Candidates
from draftree.beam.forest import CHUNK, Forest
from draftree.beam.group import Beam, Columns
from draftree.beam.hooks import Hooks
from draftree.beam.quick import is_quick, quick_columns
from draftree.beam.shaping import combined, next_logprobs, shape
from draftree.beam.state import TextSearch
from draftree.beam.trunk import gathered
from draftree.core.transfer import to_host
from draftree.models.base import LanguageModel, Pass
from draftree.models.source import EncoderDecoder
from draftree.sampling.logits import Logits


@dataclass(slots=True)
class SearchStats:
    """Counts of a search.

    Attributes:
        num_passes: forward passes.
        num_rows: tokens computed in them.
        num_draft_passes: passes of a drafter's model.
        most_live: largest number of nodes in the trees of one text.
        most_slots: largest number of open slots of one text.
    """

    num_passes: int = 0
    num_rows: int = 0
    num_draft_passes: int = 0
    most_live: int = 0
    most_slots: int = 0


def run_pass(
    model: LanguageModel, forests: Sequence[Forest], chunk: int = CHUNK, *, attends: bool = False
) -> tuple[int, Logits]:
    """Run the jobs of forests on their model in one pass; returns the number of tokens, and the logits.

    Args:
        model: the model.
        forests: trees of texts.
        chunk: maximum number of prompt tokens of a text.
        attends: whether weights of cross-attention are noted, for an encoder-decoder model.
    """
    jobs = [forest.jobs(chunk) for forest in forests]
    together = [job for own in jobs for _, job in own]
    attention: list[np.ndarray] | None = None
    if attends:
        assert isinstance(model, EncoderDecoder), "the texts were checked"
        result, attention = model.run_attending(Pass(together))
    else:
        result = model.run(Pass(together))
    logits, first, number = result.logits.tensor(), 0, 0
    for forest, own in zip(forests, jobs, strict=True):
        weights = None if attention is None else attention[number : number + len(own)]
        first, number = forest.note(own, logits, first, weights), number + len(own)
    return sum(len(job.tokens) for job in together), result.logits


def logprobs_of(beams: Sequence[Sequence[Beam]], place: int, temperatures: Sequence[float]) -> Tensor:
    """Return log-probabilities of scored beams by one model, shape (beams, vocab).

    Args:
        beams: beams of each text.
        place: number of the model among those of a text.
        temperatures: one for each text.
    """
    rows = [row for own in beams for beam in own if (row := beam.tips[place].row) is not None]
    each = [warm for own, warm in zip(beams, temperatures, strict=True) for _ in own]
    return next_logprobs(gathered(rows), each)


def combined_logprobs(text: TextSearch, own: Tensor, beams: Sequence[Beam]) -> Tensor:
    """Return log-probabilities with those of the ensemble and of shallow fusion.

    Args:
        text: the search.
        own: log-probabilities by the model, shape (beams, vocab).
        beams: scored beams of the text.
    """
    params, count = text.params, len(text.params.models)
    others = [logprobs_of([beams], place, [params.temperature]) for place in range(1, 1 + count)]
    fused = logprobs_of([beams], 1 + count, [1.0]) if params.lm_model is not None else None
    return combined(own, others, fused, params.lm_weight)


def candidates_of(
    scored: Mapping[TextSearch, list[list[Beam]]], flat: Sequence[Sequence[Beam]], logits: Logits, hooks: Hooks | None
) -> tuple[list[list[Columns]], list[bool]]:
    """Return the candidates of each group of each text, and whether a row has NaN.

    Args:
        scored: for each text the scored beams of its groups.
        flat: for each text all of them.
        logits: of the last pass of the model that is searched.
        hooks: further rules; None for none.
    """
    # elsewhere than on the host, scores and totals would take two reads
    on_host = all(row.logits.device.type == "cpu" for own in flat for beam in own if (row := beam.tips[0].row))
    beams = dict(zip(scored, flat, strict=True))
    # decided for each text alone: batch mates change no rounding
    quick = [text for text in scored if hooks is None and on_host and is_quick(text)]
    rest = [text for text in scored if text not in quick]
    found: dict[TextSearch, tuple[list[Columns], bool]] = {}

    def note(texts: Sequence[TextSearch], columns: tuple[list[list[Columns]], list[bool]]) -> None:
        found.update(zip(texts, zip(*columns, strict=True), strict=True))

    if quick:
        note(quick, quick_columns(logits, quick, [beams[text] for text in quick]))
    if rest:
        note(rest, _whole_rows({text: scored[text] for text in rest}, [beams[text] for text in rest], hooks))
    return [found[text][0] for text in scored], [found[text][1] for text in scored]


def _whole_rows(
    scored: Mapping[TextSearch, list[list[Beam]]], flat: Sequence[Sequence[Beam]], hooks: Hooks | None
) -> tuple[list[list[Columns]], list[bool]]:
    """Return the candidates from log-probabilities of the whole vocabulary, read at once."""
    logprobs = logprobs_of(flat, 0, [text.params.temperature for text in scored])
    first, found, is_nan = 0, [], []
    row_is_nan = logprobs.amax(dim=-1).isnan()  # the maximum of a row with NaN is NaN
    for text, beams in zip(scored, flat, strict=True):
        rows = slice(first, first + len(beams))
        first = rows.stop
        own, own_is_nan = logprobs[rows], row_is_nan[rows].any()
        if text.params.models or text.params.lm_model is not None:
            own = combined_logprobs(text, own, beams)
            own_is_nan = own_is_nan | own.amax(dim=-1).isnan().any()
        if hooks is not None:
            own = hooks.process(text, own)
        shape(own, text, beams)
        found.append(text.select(own, scored[text]))
        is_nan.append(own_is_nan)
    return read(found, is_nan)


def read(found: Sequence[Sequence[Candidates]], is_nan: Sequence[Tensor]) -> tuple[list[list[Columns]], list[bool]]:
    """Read the candidates of all texts with one copy from the device.

    Args:
        found: candidates of the groups of each text.
        is_nan: for each text a bool tensor without dimensions.

    Returns:
        Scores, places and log-probabilities for each group of each text; and the flags.
    """
    flat = [column.double() for groups in found for candidates in groups for column in candidates]
    numbers = to_host(torch.cat((*flat, torch.stack(tuple(is_nan)).double())))
    columns, start = [], 0
    for groups in found:
        own = []
        for candidates in groups:
            count = len(candidates.scores)
            scores, places, logprobs = (numbers[start + k * count : start + (k + 1) * count] for k in range(3))
            own.append((scores, [int(place) for place in places], logprobs))
            start += 3 * count
        columns.append(own)
    return columns, [bool(number) for number in numbers[start:]]
