"""Measured costs of rounds with a drafter of some kind and size, before one is trained.

A head gets random weights, and a student is the model that it would start from: rounds take as long whatever is
accepted, and seconds are counted by round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from draftree.core.types import RoundRecord
from draftree.heads.base import TargetParts
from draftree.heads.config import EAGLE3
from draftree.heads.folders import head_class, write_head
from draftree.heads.vocabulary import DraftVocabulary
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.sampling.params import SamplingParams
from draftree.train.data.capture import CaptureSettings
from draftree.train.head import HeadOptions, head_config
from draftree.train.preparing import text_config

LENGTHS = (1, 3, 6)
"""Lengths of drafts that are measured; the costs of others lie between."""
LONGEST = LENGTHS[-1]
PROMPT = range(16)
TOKENS = 8
MIN_TEXTS = 4
MAX_TEXTS = 16
"""Texts with each length of draft."""
ENOUGH_SECONDS = 4.0
"""Time after which no text more than `MIN_TEXTS` begins."""

Costs = Mapping[int, float]
"""Seconds of a round by the length of its draft, relative to a round of plain decoding."""


def round_costs(loaded: LoadedModel, draft: str) -> Costs:
    """Measure rounds with a drafter, such as `head:FOLDER`, and plain ones in turn; medians of their ratios count."""
    return {length: _relative_cost(loaded, draft, length) for length in LENGTHS}


def _relative_cost(loaded: LoadedModel, draft: str, length: int) -> float:
    rounds: list[float] = []

    def keep(record: RoundRecord) -> None:
        if record.num_rows == 1 + length:  # drafts at the end of a text are shorter
            rounds.append(record.total_seconds)

    new = partial(LLM, loaded, max_batch_size=1, generation_config="none")
    drafting, plain = new(draft=f"{draft},k={length}", plan="fixed", on_round=keep), new(draft=None)
    params = SamplingParams(max_tokens=TOKENS + length, temperature=0, ignore_eos=True)
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < MAX_TEXTS and (len(ratios) < MIN_TEXTS or time.perf_counter() - start < ENOUGH_SECONDS):
        rounds.clear()
        for llm in (drafting, plain):
            llm.forget()
            (text,) = llm.generate([list(PROMPT)], params, progress=False)
        ratios.append(statistics.fmean(rounds) * text.stats.tokens_per_second)
    return statistics.median(ratios[1:])  # the first texts are slower


def head_costs(loaded: LoadedModel, vocabularies: tuple[int, ...]) -> dict[int, Costs]:
    """Measure heads with the smallest and the largest draft vocabulary; costs grow evenly between them."""
    ends = {vocab: _costs_of_head(loaded, vocab) for vocab in {min(vocabularies), max(vocabularies)}}
    sizes = sorted(ends)
    return {
        vocab: {length: float(np.interp(vocab, sizes, [ends[size][length] for size in sizes])) for length in LENGTHS}
        for vocab in vocabularies
    }


def _costs_of_head(loaded: LoadedModel, vocab: int) -> Costs:
    parts = TargetParts.of(loaded.model)
    layers = CaptureSettings().layers(parts.num_layers)
    config = head_config(
        text_config(loaded), parts, layers, HeadOptions(), draft_vocab=vocab, depth=LONGEST, name=loaded.name
    )
    head = head_class(EAGLE3)(config, DraftVocabulary(torch.arange(vocab), parts.vocab_size))
    with tempfile.TemporaryDirectory() as folder:
        write_head(head.to(loaded.model.dtype), Path(folder))
        return round_costs(loaded, f"head:{folder}")
