"""Loop of the beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.beam.candidates import read
from draftree.beam.forest import CHUNK, Forest, capacity_for
from draftree.beam.opening import BeamPrompt, beam_prompt, require_source
from draftree.beam.params import BeamSearchParams
from draftree.beam.quick import Columns, is_quick, quick_columns
from draftree.beam.result import BeamResult
from draftree.beam.search_stats import SearchStats
from draftree.beam.shaping import combined, next_logprobs, shape
from draftree.beam.state import Decode, Hooks, OnStep, TextSearch
from draftree.core.errors import GenerationError, InvalidRequestError, NonFiniteLogitsError
from draftree.core.transfer import to_device
from draftree.models.base import LanguageModel, Pass
from draftree.sampling.logits import Logits

BATCH_SIZE = 32
"""Maximum number of prompts that are searched at the same time."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of a pass, and the row of every tip: its trunk's identity and its node."""

    logits: Logits
    row_of: dict[tuple[int, int], int]


class BeamSearch:
    """Searches of a batch of prompts on one model; every prompt has its own parameters.

    Args:
        model: the model; trees are used if it supports them, and one slot per beam otherwise.
        end_ids: the model's end-of-text tokens.
        decode: function from generated tokens to text; None without a tokenizer.
        capacity: maximum number of live nodes in one slot; None for a default by width.
        batch_size: maximum number of prompts that are searched at the same time.
        hooks: further rules, called for each text in every step; None for none.
        on_step: called with a search after each of its steps; None for none.
        has_room: whether there is memory for a number of slots of a length; searches wait for it, but never if no other
            search runs. None if there always is.
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
        on_step: OnStep | None = None,
        has_room: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._on_step, self._has_room = on_step, has_room
        self._model, self._end_ids, self._decode = model, tuple(end_ids), decode
        self._capacity, self._batch_size, self._hooks = capacity, batch_size, hooks
        self.stats = SearchStats()
        self.chunk_size = CHUNK
        """Maximum number of prompt tokens of a text in one pass."""
        self._forests: dict[TextSearch, list[Forest]] = {}
        self._waiting: deque[TextSearch] = deque()

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
        self._waiting += texts
        try:
            while not self.is_idle:
                for text in self.step():
                    if text.error is not None:
                        raise text.error
            return [text.result() for text in texts]
        finally:
            self.close()

    @property
    def is_idle(self) -> bool:
        """Whether no search runs or waits."""
        return not (self._waiting or self._forests)

    @property
    def num_running(self) -> int:
        """Number of searches that have slots."""
        return len(self._forests)

    @property
    def num_waiting(self) -> int:
        """Number of searches that wait for a place in the batch."""
        return len(self._waiting)

    def add(
        self, prompt: Sequence[int] | BeamPrompt, params: BeamSearchParams, *, decode: Decode | None = None
    ) -> TextSearch:
        """Queue a search for `step`.

        Args:
            prompt: token ids, at least one.
            params: its parameters.
            decode: function from its tokens to its text; None for that of all searches.

        Returns:
            The search; `step` returns it again when it has ended.

        Raises:
            InvalidRequestError: parameters that do not fit.
        """
        text = self._text(0, prompt, params, decode)
        self._waiting.append(text)
        return text

    def cancel(self, text: TextSearch) -> None:
        """Drop a search and close its slots; one that has ended is unchanged."""
        if text in self._waiting:
            self._waiting.remove(text)
        for forest in self._forests.pop(text, ()):
            forest.close()

    def close(self) -> None:
        """Drop all searches and close their slots."""
        self._waiting.clear()
        for text in list(self._forests):
            self.cancel(text)

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

    def _text(
        self,
        index: int,
        given: Sequence[int] | BeamPrompt,
        params: BeamSearchParams,
        decode: Decode | None = None,
    ) -> TextSearch:
        prompt = beam_prompt(given)
        self._require_models(prompt, params)
        models = [self._model, *params.models, *([params.lm_model] if params.lm_model is not None else [])]
        text = TextSearch(
            index,
            prompt,
            params,
            end_ids=self._end_ids,
            vocab_size=self._model.vocab_size,
            max_length=min(model.max_length for model in models),
            device=self._model.device,
            decode=decode or self._decode,
            hooks=self._hooks,
        )
        text.on_step = self._on_step
        return text

    def slot_length(self, text: TextSearch) -> int:
        """Return the number of tokens that a slot of a search may hold."""
        return len(text.prompt) + text.limit + min(self._capacity_of(text), 16 * text.params.beam_width)

    def _capacity_of(self, text: TextSearch) -> int:
        return self._capacity or capacity_for(text.params.beam_width)

    def _may_start(self, text: TextSearch) -> bool:
        if not self._forests or self._has_room is None:
            return len(self._forests) < self._batch_size
        open_slots = sum(len(forest.trunks) for forests in self._forests.values() for forest in forests)
        lengths = map(self.slot_length, (*self._forests, text))
        return len(self._forests) < self._batch_size and self._has_room(open_slots + 1, max(lengths))

    def _start(self, text: TextSearch) -> None:
        capacity, length = self._capacity_of(text), self.slot_length(text)
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
    def step(self) -> list[TextSearch]:
        """Start waiting searches, run one pass of each model, and advance the searches whose beams it completed.

        Returns:
            The searches that ended, with a result or an error.
        """
        while self._waiting and self._may_start(self._waiting[0]):
            self._start(self._waiting.popleft())
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
        return [text for text in ready if text not in self._forests]

    def _pass(self, model: LanguageModel, texts: Sequence[TextSearch]) -> Scored:
        """Run the jobs of all forests on one model; a model that takes part twice has two slots."""
        forests = [forest for text in texts for forest in self._forests[text] if forest.model is model]
        jobs = [forest.jobs(self.chunk_size) for forest in forests]
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
        columns, nan, vocab = self._candidates(texts, scored)
        for text, own_columns, text_is_nan in zip(texts, columns, nan, strict=True):
            try:
                if text_is_nan:
                    raise NonFiniteLogitsError(
                        "a model gave NaN as a logit, so beams cannot be ranked: check its weights"
                    )
                text.advance(own_columns, vocab)
            except GenerationError as error:
                text.error = error
            self._grow(text)

    def _candidates(
        self, texts: Sequence[TextSearch], scored: Mapping[LanguageModel, Scored]
    ) -> tuple[list[list[Columns]], list[bool], int]:
        """Return the candidates of each group of each text, whether a row has NaN, and the width of the rows."""
        # elsewhere than on the host, scores and totals would take two reads
        if self._hooks is None and self._model.device.type == "cpu" and all(map(is_quick, texts)):
            logits = self._rows(texts, 0, scored)
            return (*quick_columns(logits, texts), logits.width)
        logprobs = self._logprobs(texts, 0, scored)
        vocab, row, found, is_nan = logprobs.shape[-1], 0, [], []
        row_is_nan = logprobs.amax(dim=-1).isnan()  # the maximum of a row with NaN is NaN
        for text in texts:
            rows = slice(row, row + len(text.live))
            row = rows.stop
            own, own_is_nan = logprobs[rows], row_is_nan[rows].any()
            if len(self._forests[text]) > 1:
                own = self._combined(text, own, scored)
                own_is_nan = own_is_nan | own.amax(dim=-1).isnan().any()
            if self._hooks is not None:
                own = self._hooks.process(text, own)
            shape(own, text, text.live)
            found.append(text.select(own))
            is_nan.append(own_is_nan)
        return (*read(found, is_nan), vocab)

    def _logprobs(
        self, texts: Sequence[TextSearch], place: int, scored: Mapping[LanguageModel, Scored], *, plain: bool = False
    ) -> Tensor:
        """Log-probabilities of the live beams of texts by their model number `place`; `plain` without temperature."""
        logits = self._rows(texts, place, scored).tensor()
        return next_logprobs(logits, [1.0 if plain else text.params.temperature for text in texts for _ in text.live])

    def _rows(self, texts: Sequence[TextSearch], place: int, scored: Mapping[LanguageModel, Scored]) -> Logits:
        """Return the logits of the live beams of texts by their model number `place`."""
        scores = scored[self._forests[texts[0]][place].model]
        tips = [beam.tips[place] for text in texts for beam in text.live]
        rows = [scores.row_of[id(tip.trunk), tip.node] for tip in tips]
        if rows == list(range(scores.logits.num_rows)):
            return scores.logits
        return scores.logits.replaced(scores.logits.tensor()[to_device(rows, scores.logits.tensor().device)])

    def _combined(self, text: TextSearch, own: Tensor, scored: Mapping[LanguageModel, Scored]) -> Tensor:
        count = len(text.params.models)
        others = [self._logprobs([text], place, scored) for place in range(1, 1 + count)]
        has_lm = text.params.lm_model is not None
        fused = self._logprobs([text], 1 + count, scored, plain=True) if has_lm else None
        return combined(own, others, fused, text.params.lm_weight)

    def _grow(self, text: TextSearch) -> None:
        forests = self._forests[text]
        if text.is_done or text.error is not None:
            self.cancel(text)
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
