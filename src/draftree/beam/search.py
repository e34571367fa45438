"""The loop of beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from draftree.beam.drafting import MAX_NODES, BeamDrafter, Pace, require_draftable
from draftree.beam.forest import CHUNK, BeamPrompt, Forest, beam_prompt, capacity_for
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.scoring import SearchStats, candidates_of, run_pass
from draftree.beam.sequence import Decode, Hooks, OnStep, SequenceSearch, require_models
from draftree.core.errors import GenerationError, NonFiniteLogitsError
from draftree.models.base import LanguageModel
from draftree.sampling.logits import Logits

T = TypeVar("T")

BATCH_SIZE = 32
"""Maximum number of prompts that are searched at the same time."""


class BeamSearch:
    """Searches of a batch of prompts on one model; every prompt has its own parameters.

    Args:
        model: the model; trees are used if it supports them, and one slot per beam otherwise.
        end_ids: the model's end-of-text tokens.
        decode_after: returns, for the tokens of a prompt, the function from generated tokens to the text that continues
            the prompt; None without a tokenizer.
        capacity: maximum number of live nodes in one slot; None for a default by width.
        batch_size: maximum number of prompts that are searched at the same time.
        hooks: further rules, called for each text in every step; None for none.
        drafter: guesses the next beams, so that one pass may serve several steps; None for one step a pass.
        on_step: called with a search after each of its steps; None for none.
        has_room: whether there is memory for a number of slots of a length; searches wait for it, but never if no other
            search runs. None if there always is.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        end_ids: Sequence[int] = (),
        decode_after: Callable[[Sequence[int]], Decode] | None = None,
        capacity: int | None = None,
        batch_size: int = BATCH_SIZE,
        hooks: Hooks | None = None,
        drafter: BeamDrafter | None = None,
        on_step: OnStep | None = None,
        has_room: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._on_step, self._has_room = on_step, has_room
        self._model, self._end_ids, self._decode_after = model, tuple(end_ids), decode_after
        self._capacity, self._batch_size, self._hooks = capacity, batch_size, hooks
        self._drafter = drafter
        self.stats = SearchStats()
        self.chunk_size = CHUNK
        """Maximum number of prompt tokens of a text in one pass."""
        self._waiting: deque[SequenceSearch] = deque()
        self._forests: dict[SequenceSearch, list[Forest]] = {}
        self._paces: dict[SequenceSearch, Pace] = {}
        self._logits: Logits
        """Those of the last pass of the model that is searched."""

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
            UnsatisfiableError: no token is allowed, or required phrases are missing with `strict`.
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

    def add(self, prompt: Sequence[int] | BeamPrompt, params: BeamSearchParams) -> SequenceSearch:
        """Queue a search for `step`, which returns it when it has ended; arguments as for `run`, one of each."""
        text = self._text(0, prompt, params)
        self._waiting.append(text)
        return text

    def cancel(self, text: SequenceSearch) -> None:
        """Drop a search and close its slots; one that has ended is unchanged."""
        self._alone(lambda: self._cancel(text))

    def _cancel(self, text: SequenceSearch) -> None:
        if text in self._waiting:
            self._waiting.remove(text)
        forests = self._forests.pop(text, None)
        for forest in forests or ():
            forest.close()
        if self._drafter is not None and forests is not None:
            self._paces.pop(text, None)
            self._drafter.finish(text)

    def close(self) -> None:
        """Drop all searches and close their slots."""
        self._waiting.clear()
        for text in list(self._forests):
            self.cancel(text)

    def _text(self, index: int, given: Sequence[int] | BeamPrompt, params: BeamSearchParams) -> SequenceSearch:
        prompt = beam_prompt(given)
        require_models(self._model, prompt, params)
        if self._drafter is not None:
            require_draftable(self._model, params)
        models = [self._model, *params.models, *([params.lm_model] if params.lm_model is not None else [])]
        text = SequenceSearch(
            index,
            prompt,
            params,
            end_ids=self._end_ids,
            vocab_size=self._model.vocab_size,
            max_length=min(model.max_length for model in models),
            device=self._model.device,
            decode=None if self._decode_after is None else self._decode_after(prompt.tokens),
            hooks=self._hooks,
        )
        text.on_step = self._on_step
        return text

    def slot_length(self, text: SequenceSearch) -> int:
        """Return the number of tokens that a slot of a search may hold."""
        return len(text.prompt) + text.limit + min(self._capacity_of(text), 16 * text.params.beam_width)

    def _capacity_of(self, text: SequenceSearch) -> int:
        if self._capacity is not None:
            return self._capacity
        return capacity_for(text.params.beam_width) + (0 if self._drafter is None else MAX_NODES)

    def _may_start(self, text: SequenceSearch) -> bool:
        if not self._forests or self._has_room is None:
            return len(self._forests) < self._batch_size
        open_slots = sum(len(forest.trunks) for forests in self._forests.values() for forest in forests)
        lengths = map(self.slot_length, (*self._forests, text))
        return len(self._forests) < self._batch_size and self._has_room(open_slots + 1, max(lengths))

    def _start(self, text: SequenceSearch) -> None:
        capacity, length = self._capacity_of(text), self.slot_length(text)
        forests = self._forests[text] = []
        for model in self._models_of(text):
            prompt = BeamPrompt(text.prompt) if model is text.params.lm_model else text.opening
            forests.append(Forest(model, prompt, capacity=capacity, length=length))
        text.start([forest.root for forest in forests])
        if self._drafter is not None:
            self._paces[text] = Pace()
            self._drafter.start(text, capacity=capacity, length=length)

    def _models_of(self, text: SequenceSearch) -> list[LanguageModel]:
        """The model, the others of the ensemble, and the language model of shallow fusion."""
        fused = [] if text.params.lm_model is None else [text.params.lm_model]
        return [self._model, *text.params.models, *fused]

    def _alone(self, use: Callable[[], T]) -> T:
        """Run a use of all models, which others may share."""
        texts = (*self._waiting, *self._forests)
        models = {self._model, *(model for text in texts for model in self._models_of(text))}
        if self._drafter is not None and self._drafter.model is not None:
            models.add(self._drafter.model)
        for model in sorted(models, key=id):  # in one order, so that no two searches wait for each other
            use = partial(model.lock.run, use)
        return use()

    def step(self) -> list[SequenceSearch]:
        """Start waiting searches, run one pass of each model, and make the steps of which all beams are scored.

        Returns the searches that ended, with a result or an error.
        """
        return self._alone(self._step)

    @torch.inference_mode()
    def _step(self) -> list[SequenceSearch]:
        while self._waiting and self._may_start(self._waiting[0]):
            self._start(self._waiting.popleft())
        texts = list(self._forests)
        if self._drafter is not None:
            self._draft(self._drafter, [text for text in texts if text.num_steps])
        for model in dict.fromkeys(model for text in texts for model in self._models_of(text)):
            forests = [forest for text in texts for forest in self._forests[text] if forest.model is model]
            attends = model is self._model and any(text.params.reads_attention for text in texts)
            rows, logits = run_pass(model, forests, self.chunk_size, attends=attends)
            self.stats.num_rows += rows
            if model is self._model:
                self._logits = logits
            self.stats.num_passes += 1
        ready = [text for text in texts if all(forest.is_complete for forest in self._forests[text])]
        for text in texts:
            if text not in ready:
                for forest in self._forests[text]:
                    forest.settle([forest.root])
        before = {text: text.num_steps for text in ready}
        going = ready
        while going:
            going = self._advance(going)
        for text in ready:
            text.num_passes += 1
            if text in self._paces:
                self._paces[text].note(text.num_steps - before[text])
            self._settle(text)
        return [text for text in ready if text not in self._forests]

    def _draft(self, drafter: BeamDrafter, texts: Sequence[SequenceSearch]) -> None:
        """Append drafts to the trees of all models of each text."""
        depths = {text: min(self._paces[text].next_depth(), text.limit - text.num_steps - 1) for text in texts}
        depths = {text: depth for text, depth in depths.items() if depth > 0}
        for text in texts:
            self._paces[text].is_drafting = False
        if not depths:
            return
        for text, drafts in zip(depths, drafter.propose(depths, self.stats), strict=True):
            for place, forest in enumerate(self._forests[text]):
                room = MAX_NODES
                for beam, tree in drafts:
                    room -= forest.graft(beam.tips[place], tree, room, text.ends)
                if place == 0:
                    text.num_drafted += MAX_NODES - room
                    self._paces[text].is_drafting = room < MAX_NODES

    def _advance(self, texts: Sequence[SequenceSearch]) -> list[SequenceSearch]:
        """Make one step of each text of which enough beams are scored; returns those that go on."""
        scored = {text: groups for text in texts if (groups := text.ready()) is not None}
        if not scored:
            return []
        flat = [[beam for group in own_groups for beam in group] for own_groups in scored.values()]
        columns, nan = candidates_of(scored, flat, self._logits, self._hooks)
        vocab = self._logits.width
        going = []
        for text, own_columns, has_nan in zip(scored, columns, nan, strict=True):
            try:
                if has_nan:
                    raise NonFiniteLogitsError(
                        "a model gave NaN as a logit, so beams cannot be ranked: check its weights"
                    )
                if text.advance(own_columns, vocab, scored[text]) and not text.is_done:
                    self._extend(text)
                    going.append(text)
            except GenerationError as error:
                text.error = error
        return going

    def _extend(self, text: SequenceSearch) -> None:
        """Append the newest token of every live beam to the trees."""
        beams = text.live
        drafting = () if self._drafter is None else self._drafter.forests(text)
        for forests, name in ((self._forests[text], "tips"), (drafting, "draft_tips")):
            grown = [
                forest.extend([(getattr(beam, name)[place], beam.tokens[-1]) for beam in beams])
                for place, forest in enumerate(forests)
            ]
            for index, beam in enumerate(beams):
                setattr(beam, name, [tips[index] for tips in grown])

    def _settle(self, text: SequenceSearch) -> None:
        """Drop what the trees of a text no longer need, or close them."""
        forests = self._forests[text]
        text.num_used = forests[0].num_reused
        if text.is_done or text.error is not None:
            self._cancel(text)
            return
        beams = text.live
        for place, forest in enumerate(forests):
            forest.settle([beam.tips[place] for beam in beams])
        if self._drafter is not None:
            for place, forest in enumerate(self._drafter.forests(text)):
                forest.settle([beam.draft_tips[place] for beam in beams])
        self.stats.most_live = max(self.stats.most_live, *(forest.num_live for forest in forests))
        self.stats.most_slots = max(self.stats.most_slots, *(len(forest.trunks) for forest in forests))
