"""Loop of the beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.beam.candidates import Candidates
from draftree.beam.forest import Forest, capacity_for
from draftree.beam.opening import BeamPrompt, beam_prompt, require_source
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.shaping import combined, next_logprobs, shape
from draftree.beam.state import Decode, Hooks, TextSearch
from draftree.core.errors import InvalidRequestError, NonFiniteLogitsError
from draftree.core.transfer import to_device, to_host
from draftree.models.base import LanguageModel, Pass
from draftree.sampling.logits import Logits

BATCH_SIZE = 32
"""Maximum number of prompts that are searched at the same time."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of a pass, and the row of every tip: its trunk's identity and its node."""

    logits: Logits
    row_of: dict[tuple[int, int], int]


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
        hooks: further rules, called for each text in every step; None for none.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        end_ids: Sequence[int] = (),
        decode: Decode | None = None,
        capacity: int | None = None,
        batch_size: int = BATCH_SIZE,
        hooks: Hooks | None = None,
    ) -> None:
        self._model, self._end_ids, self._decode = model, tuple(end_ids), decode
        self._capacity, self._batch_size, self._hooks = capacity, batch_size, hooks
        self.stats = SearchStats()
        self._forests: dict[TextSearch, list[Forest]] = {}

    def run(
        self, prompts: Sequence[Sequence[int] | BeamPrompt], params: Sequence[BeamSearchParams]
    ) -> list[BeamResult]:
        """Search all prompts. All slots are closed at the end, also after an error.

        Args:
            prompts: token ids, each with at least one, or prompts with a source.
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
            for forests in self._forests.values():
                for forest in forests:
                    forest.close()
            self._forests.clear()

    def _require_models(self, prompt: BeamPrompt, params: BeamSearchParams) -> None:
        require_source(self._model, prompt, "prompts")
        for model in params.models:
            require_source(model, prompt, "models")
        if params.lm_model is not None:
            require_source(params.lm_model, BeamPrompt(prompt.tokens), "lm_model")
        for name, models in (("models", params.models), ("lm_model", [params.lm_model])):
            for model in models:
                if model is not None and model.vocab_size != self._model.vocab_size:
                    raise InvalidRequestError(
                        f"a model of {name} has {model.vocab_size} tokens, and the model that is searched has "
                        f"{self._model.vocab_size}: give a model with the same vocabulary",
                        param=name,
                    )

    def _text(self, index: int, given: Sequence[int] | BeamPrompt, params: BeamSearchParams) -> TextSearch:
        prompt = beam_prompt(given)
        self._require_models(prompt, params)
        models = [self._model, *params.models, *([params.lm_model] if params.lm_model is not None else [])]
        return TextSearch(
            index,
            prompt,
            params,
            end_ids=self._end_ids,
            vocab_size=self._model.vocab_size,
            max_length=min(model.max_length for model in models),
            device=self._model.device,
            decode=self._decode,
            hooks=self._hooks,
        )

    def _start(self, text: TextSearch) -> None:
        capacity = self._capacity or capacity_for(text.params.beam_width)
        length = len(text.prompt) + text.limit + min(capacity, 16 * text.params.beam_width)
        forests = self._forests[text] = []
        for model in self._models_of(text):
            prompt = BeamPrompt(text.prompt) if model is text.params.lm_model else text.opening
            forests.append(Forest(model, prompt, capacity=capacity, length=length))
        text.start([forest.root for forest in forests])

    def _models_of(self, text: TextSearch) -> list[LanguageModel]:
        """The model, the others of the ensemble, and the language model of shallow fusion."""
        fused = [] if text.params.lm_model is None else [text.params.lm_model]
        return [self._model, *text.params.models, *fused]

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass of each model over all live texts, and advance those whose beams it completed."""
        texts = list(self._forests)
        scored: dict[LanguageModel, Scored] = {}
        for model in dict.fromkeys(model for text in texts for model in self._models_of(text)):
            scored[model] = self._pass(model, texts)
        ready = [text for text in texts if all(forest.is_complete for forest in self._forests[text])]
        for text in texts:
            if text not in ready:
                for forest in self._forests[text]:
                    forest.settle([forest.root])
        if ready:
            self._advance(ready, scored)

    def _pass(self, model: LanguageModel, texts: Sequence[TextSearch]) -> Scored:
        """Run the jobs of all forests on one model; a model that takes part twice has two slots."""
        forests = [forest for text in texts for forest in self._forests[text] if forest.model is model]
        jobs = [forest.jobs() for forest in forests]
        result = model.run(Pass([job for own in jobs for _, job in own]))
        self.stats.num_passes += 1
        self.stats.num_rows += sum(len(job.tokens) for own in jobs for _, job in own)
        row_of: dict[tuple[int, int], int] = {}
        for forest, own in zip(forests, jobs, strict=True):
            for trunk, job in own:
                for place in job.logits_at or ():
                    row_of[id(trunk), trunk.num_stored + place] = len(row_of)
            forest.note(own)
        return Scored(result.logits, row_of)

    def _advance(self, texts: Sequence[TextSearch], scored: Mapping[LanguageModel, Scored]) -> None:
        logprobs = self._logprobs(texts, 0, scored)
        vocab, row, found = logprobs.shape[-1], 0, []
        is_nan = logprobs.amax(dim=-1).isnan().any()  # the maximum of a row with NaN is NaN
        for text in texts:
            own = logprobs[row : row + len(text.live)]
            row += len(own)
            if len(self._forests[text]) > 1:
                own = self._combined(text, own, scored)
                is_nan = is_nan | own.amax(dim=-1).isnan().any()
            if self._hooks is not None:
                own = self._hooks.process(text, own)
            shape(own, text, text.live)
            found.append(text.select(own))
        columns, nan = read(found, is_nan)
        if nan:
            raise NonFiniteLogitsError("a model gave NaN as a logit, so beams cannot be ranked: check its weights")
        for text, own_columns in zip(texts, columns, strict=True):
            text.advance(own_columns, vocab)
            self._grow(text)

    def _logprobs(
        self, texts: Sequence[TextSearch], place: int, scored: Mapping[LanguageModel, Scored], *, plain: bool = False
    ) -> Tensor:
        """Log-probabilities of the live beams of texts by their model number `place`; `plain` without temperature."""
        scores = scored[self._forests[texts[0]][place].model]
        logits = scores.logits.tensor()
        tips = [beam.tips[place] for text in texts for beam in text.live]
        rows = [scores.row_of[id(tip.trunk), tip.node] for tip in tips]
        if rows != list(range(len(logits))):
            logits = logits[to_device(rows, logits.device)]
        return next_logprobs(logits, [1.0 if plain else text.params.temperature for text in texts for _ in text.live])

    def _combined(self, text: TextSearch, own: Tensor, scored: Mapping[LanguageModel, Scored]) -> Tensor:
        count = len(text.params.models)
        others = [self._logprobs([text], place, scored) for place in range(1, 1 + count)]
        has_lm = text.params.lm_model is not None
        fused = self._logprobs([text], 1 + count, scored, plain=True) if has_lm else None
        return combined(own, others, fused, text.params.lm_weight)

    def _grow(self, text: TextSearch) -> None:
        forests = self._forests[text]
        if text.is_done:
            for forest in forests:
                forest.close()
            del self._forests[text]
            return
        beams = text.live
        grown = [
            forest.advance([(beam.tips[place], beam.tokens[-1]) for beam in beams])
            for place, forest in enumerate(forests)
        ]
        for index, beam in enumerate(beams):
            beam.tips = [tips[index] for tips in grown]
        self.stats.most_live = max(self.stats.most_live, *(forest.num_live for forest in forests))
        self.stats.most_slots = max(self.stats.most_slots, *(len(forest.trunks) for forest in forests))


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
