"""Loop of the beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates
from draftree.beam.forest import Forest, capacity_for
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.shaping import next_logprobs, shape
from draftree.beam.state import Decode, TextSearch
from draftree.core.errors import NonFiniteLogitsError
from draftree.core.transfer import to_device, to_host
from draftree.models.base import LanguageModel, Pass

BATCH_SIZE = 32
"""Maximum number of prompts that are searched at the same time."""


@dataclass(slots=True)
class SearchStats:
    """Counts of a search.

    Attributes:
        num_passes: forward passes.
        num_rows: tokens computed in them.
        most_live: largest number of nodes in the trees of one text.
        most_slots: largest number of open slots of one text.
    """

    num_passes: int = 0
    num_rows: int = 0
    most_live: int = 0
    most_slots: int = 0


class BeamSearch:
    """Searches of a batch of prompts on one model; every prompt has its own parameters.

    Args:
        model: the model; trees are used if it supports them, and one slot per beam otherwise.
        end_ids: the model's end-of-text tokens.
        decode: function from generated tokens to text; None without a tokenizer.
        capacity: maximum number of live nodes in one slot; None for a default by width.
        batch_size: maximum number of prompts that are searched at the same time.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        end_ids: Sequence[int] = (),
        decode: Decode | None = None,
        capacity: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self._model, self._end_ids, self._decode = model, tuple(end_ids), decode
        self._capacity, self._batch_size = capacity, batch_size
        self.stats = SearchStats()
        self._forests: dict[TextSearch, Forest] = {}

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[BeamSearchParams]) -> list[BeamResult]:
        """Search all prompts. All slots are closed at the end, also after an error.

        Args:
            prompts: token ids, each with at least one.
            params: parameters of each prompt.

        Raises:
            InvalidRequestError: parameters that do not fit; nothing has been computed then.
            NonFiniteLogitsError: the model gave NaN.
            GenerationError: no token is allowed, or required phrases are missing with `strict`.
        """
        texts = [self._text(index, *pair) for index, pair in enumerate(zip(prompts, params, strict=True))]
        waiting = texts[::-1]
        try:
            while waiting or self._forests:
                while waiting and len(self._forests) < self._batch_size:
                    self._start(waiting.pop())
                self.step()
            return [text.result() for text in texts]
        finally:
            for forest in self._forests.values():
                forest.close()
            self._forests.clear()

    def _text(self, index: int, prompt: Sequence[int], params: BeamSearchParams) -> TextSearch:
        return TextSearch(
            index,
            prompt,
            params,
            end_ids=self._end_ids,
            vocab_size=self._model.vocab_size,
            max_length=self._model.max_length,
            device=self._model.device,
            decode=self._decode,
        )

    def _start(self, text: TextSearch) -> None:
        capacity = self._capacity or capacity_for(text.params.beam_width)
        length = len(text.prompt) + text.limit + min(capacity, 16 * text.params.beam_width)
        forest = Forest(self._model, text.prompt, capacity=capacity, length=length)
        self._forests[text] = forest
        text.start([forest.root])

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass over all live texts and advance those whose beams it completed."""
        texts = list(self._forests)
        jobs = [self._forests[text].jobs() for text in texts]
        result = self._model.run(Pass([job for own in jobs for _, job in own]))
        self.stats.num_passes += 1
        self.stats.num_rows += sum(len(job.tokens) for own in jobs for _, job in own)
        ready, rows, row = [], [], 0
        for text, own in zip(texts, jobs, strict=True):
            forest, row_of = self._forests[text], {}
            for trunk, job in own:
                for place in job.logits_at or ():
                    row_of[id(trunk), trunk.num_stored + place] = row
                    row += 1
            forest.note(own)
            if not forest.is_complete:
                forest.settle([forest.root])
                continue
            ready.append(text)
            rows += [row_of[id(beam.tips[0].trunk), beam.tips[0].node] for beam in text.live]
        if ready:
            self._advance(ready, result.logits.tensor(), rows)

    def _advance(self, texts: Sequence[TextSearch], logits: Tensor, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(logits))):
            logits = logits[to_device(rows, logits.device)]
        temperatures = [text.params.temperature for text in texts for _ in text.live]
        logprobs = next_logprobs(logits, temperatures)
        vocab, row, found = logprobs.shape[-1], 0, []
        is_nan = logprobs.amax(dim=-1).isnan().any()  # the maximum of a row with NaN is NaN
        for text in texts:
            own = logprobs[row : row + len(text.live)]
            row += len(own)
            shape(own, text)
            found.append(text.select(own))
        columns, nan = read(found, is_nan)
        if nan:
            raise NonFiniteLogitsError("the model gave NaN as a logit, so beams cannot be ranked: check its weights")
        for text, own_columns in zip(texts, columns, strict=True):
            text.advance(own_columns, vocab)
            self._grow(text)

    def _grow(self, text: TextSearch) -> None:
        forest = self._forests[text]
        if text.is_done:
            forest.close()
            del self._forests[text]
            return
        beams = text.live
        tips = forest.advance([(beam.tips[0], beam.tokens[-1]) for beam in beams])
        for beam, tip in zip(beams, tips, strict=True):
            beam.tips = [tip]
        self.stats.most_live = max(self.stats.most_live, forest.num_live)
        self.stats.most_slots = max(self.stats.most_slots, len(forest.trunks))


def read(
    found: Sequence[Sequence[Candidates]], is_nan: Tensor
) -> tuple[list[list[tuple[list[float], list[int], list[float]]]], bool]:
    """Read the candidates of all texts with one copy from the device.

    Args:
        found: candidates of the groups of each text.
        is_nan: a bool tensor of one element.

    Returns:
        Scores, places and log-probabilities for each group of each text; and the flag.
    """
    flat = [column.double() for groups in found for candidates in groups for column in candidates]
    numbers = to_host(torch.cat((*flat, is_nan.double().reshape(1))))
    columns, start = [], 0
    for groups in found:
        own = []
        for candidates in groups:
            count = len(candidates.scores)
            scores, places, logprobs = (numbers[start + k * count : start + (k + 1) * count] for k in range(3))
            own.append((scores, [int(place) for place in places], logprobs))
            start += 3 * count
        columns.append(own)
    return columns, bool(numbers[-1])
