"""The loop of beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TypeVar

import torch

from draftree.beam.drafting import MAX_NODES, BeamDrafter, Pace, require_draftable
from draftree.beam.forest import CHUNK, Forest, capacity_for
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.scoring import candidates_of, run_pass
from draftree.beam.sequence import Decode, Hooks, OnStep, SequenceSearch, require_models
from draftree.core.errors import GenerationError, NonFiniteLogitsError
from draftree.engine.sequence import DecoderInput
from draftree.models.base import LanguageModel
from draftree.sampling.logits import Logits

T = TypeVar("T")

BATCH_SIZE = 32  # maximum number of prompts that are searched at the same time


@dataclass(slots=True)
class SearchStats:
    """Counts of a search: forward passes, the tokens in them, and the most slots of one sequence."""

    num_passes: int = 0
    num_rows: int = 0
    most_slots: int = 0


@dataclass(eq=False)
class BeamSearch:
    """Searches of a batch of prompts on one model; every prompt has its own parameters."""

    model: LanguageModel  # trees are used if it supports them, and one slot per beam otherwise
    _: KW_ONLY
    end_ids: Sequence[int] = ()
    # returns, for the tokens of a prompt, the function from generated tokens to the text that continues the prompt
    decode_after: Callable[[Sequence[int]], Decode] | None = None
    capacity: int | None = None  # maximum number of live nodes in one slot; None for a default by width
    batch_size: int = BATCH_SIZE  # maximum number of prompts that are searched at the same time
    hooks: Hooks | None = None  # further rules, called for each sequence in every step
    drafters: Sequence[BeamDrafter] = ()  # guess the next beams, so that one pass may serve several steps
    on_step: OnStep | None = None  # called with a search after each of its steps
    # whether there is memory for a number of slots of a length; searches wait for it, but never if no other search runs
    has_room: Callable[[int, int], bool] | None = None

    def __post_init__(self) -> None:
        self.stats = SearchStats()
        self.chunk_size = CHUNK  # maximum number of prompt tokens of a search in one pass
        self._waiting: deque[SequenceSearch] = deque()
        self._forests: dict[SequenceSearch, list[Forest]] = {}
        self._paces: dict[SequenceSearch, Pace] = {}
        self._logits: Logits  # those of the last pass of the model that is searched

    def run(
        self, prompts: Sequence[Sequence[int] | DecoderInput], params: Sequence[BeamSearchParams]
    ) -> list[BeamResult]:
        """Search all prompts. All slots are closed at the end, also after an error.

        `prompts`: token ids, each with at least one, or prompts with a source.
        """
        searches = [self._search_of(index, *pair) for index, pair in enumerate(zip(prompts, params, strict=True))]
        self._waiting += searches
        try:
            while not self.is_idle:
                for search in self.step():
                    if search.error is not None:
                        raise search.error
            return [search.result() for search in searches]
        finally:
            self.close()

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._forests)

    @property
    def num_running(self) -> int:
        """Number of searches that have slots."""
        return len(self._forests)

    @property
    def num_waiting(self) -> int:
        """Number of searches that wait for a place in the batch."""
        return len(self._waiting)

    def add(self, prompt: Sequence[int] | DecoderInput, params: BeamSearchParams) -> SequenceSearch:
        """Queue a search for `step`, which returns it when it has ended; arguments as for `run`, one of each."""
        search = self._search_of(0, prompt, params)
        self._waiting.append(search)
        return search

    def cancel(self, search: SequenceSearch) -> None:
        """Drop a search and close its slots; one that has ended is unchanged."""
        self._alone(lambda: self._cancel(search))

    def _cancel(self, search: SequenceSearch) -> None:
        if search in self._waiting:
            self._waiting.remove(search)
        for forest in self._forests.pop(search, ()):
            forest.close()
        self._paces.pop(search, None)
        for drafter in self.drafters:
            drafter.finish(search)

    def close(self) -> None:
        self._waiting.clear()
        for search in list(self._forests):
            self.cancel(search)

    def _search_of(self, index: int, tokens: Sequence[int] | DecoderInput, params: BeamSearchParams) -> SequenceSearch:
        prompt = tokens if isinstance(tokens, DecoderInput) else DecoderInput(tuple(tokens))
        require_models(self.model, prompt, params)
        if self.drafters:
            require_draftable(self.model, params)
        return SequenceSearch(
            index,
            prompt,
            params,
            end_ids=self.end_ids,
            vocab_size=self.model.vocab_size,
            max_length=min(model.max_length for model in self._models_of(params)),
            device=self.model.device,
            decode=None if self.decode_after is None else self.decode_after(prompt.tokens),
            hooks=self.hooks,
            on_step=self.on_step,
        )

    def slot_length(self, search: SequenceSearch) -> int:
        """Return the number of tokens that a slot of a search may hold."""
        return len(search.prompt) + search.limit + min(self._capacity_of(search), 16 * search.params.beam_width)

    def _capacity_of(self, search: SequenceSearch) -> int:
        if self.capacity is not None:
            return self.capacity
        return capacity_for(search.params.beam_width) + (MAX_NODES if self.drafters else 0)

    def _may_start(self, search: SequenceSearch) -> bool:
        if not self._forests or self.has_room is None or len(self._forests) >= self.batch_size:
            return len(self._forests) < self.batch_size
        open_slots = sum(len(forest.trunks) for forests in self._forests.values() for forest in forests)
        return self.has_room(open_slots + 1, max(map(self.slot_length, (*self._forests, search))))

    def _start(self, search: SequenceSearch) -> None:
        capacity = self._capacity_of(search)
        length = self.slot_length(search)
        forests = self._forests[search] = []
        for model in self._models_of(search.params):
            prompt = DecoderInput(search.prompt) if model is search.params.lm_model else search.opening
            forests.append(Forest(model, prompt, capacity=capacity, length=length))
        search.start([forest.root for forest in forests])
        self._paces[search] = Pace()
        for drafter in self.drafters:
            drafter.start(search, capacity=capacity, length=length)

    def _models_of(self, params: BeamSearchParams) -> list[LanguageModel]:
        """Return the model, the others of the ensemble, and the language model of shallow fusion."""
        return [self.model, *params.models, *([] if params.lm_model is None else [params.lm_model])]

    def _alone(self, use: Callable[[], T]) -> T:
        """Run a use of all models, which others may share."""
        searches = (*self._waiting, *self._forests)
        models = {self.model, *(model for search in searches for model in self._models_of(search.params))}
        models |= {drafter.model for drafter in self.drafters if drafter.model is not None}
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
        searches = list(self._forests)
        if self.drafters:
            self._draft([search for search in searches if search.num_steps])
        for model in dict.fromkeys(model for search in searches for model in self._models_of(search.params)):
            forests = [forest for search in searches for forest in self._forests[search] if forest.model is model]
            attends = model is self.model and any(search.params.reads_attention for search in searches)
            rows, logits = run_pass(model, forests, self.chunk_size, attends=attends)
            self.stats.num_rows += rows
            if model is self.model:
                self._logits = logits
            self.stats.num_passes += 1
        ready = [search for search in searches if all(forest.is_complete for forest in self._forests[search])]
        for search in searches:
            if search not in ready:
                for forest in self._forests[search]:
                    forest.settle([forest.root])
        before = {search: search.num_steps for search in ready}
        going = ready
        while going:
            going = self._advance(going)
        for search in ready:
            search.num_passes += 1
            self._paces[search].note(search.num_steps - before[search])
            self._settle(search)
        return [search for search in ready if search not in self._forests]

    def _draft(self, searches: Sequence[SequenceSearch]) -> None:
        """Append drafts to the trees of all models of each search."""
        depths = {}
        for search in searches:
            pace = self._paces[search]
            pace.is_drafting = False
            if (depth := min(pace.next_depth(), search.limit - search.num_steps - 1)) > 0:
                depths[search] = depth
        if not depths:
            return
        proposals = zip(*(drafter.propose(depths) for drafter in self.drafters), strict=True)
        for search, drafts in zip(depths, proposals, strict=True):
            for place, forest in enumerate(self._forests[search]):
                remaining = MAX_NODES
                for beam, tree in itertools.chain(*drafts):
                    remaining -= forest.graft(beam.tips[place], tree, remaining, search.ends)
                if place == 0:
                    search.num_drafted += MAX_NODES - remaining
                    self._paces[search].is_drafting = remaining < MAX_NODES

    def _advance(self, searches: Sequence[SequenceSearch]) -> list[SequenceSearch]:
        """Make one step of each search of which enough beams are scored; returns those that go on."""
        scored = {search: groups for search in searches if (groups := search.ready()) is not None}
        if not scored:
            return []
        going = []
        for search, columns in zip(scored, candidates_of(scored, self._logits, self.hooks), strict=True):
            try:
                if columns is None:
                    raise NonFiniteLogitsError(
                        "a model gave NaN as a logit, so beams cannot be ranked: check its weights"
                    )
                if search.advance(columns, self._logits.width, scored[search]) and not search.is_done:
                    self._extend(search)
                    going.append(search)
            except GenerationError as error:
                search.error = error
        return going

    def _draft_forests(self, search: SequenceSearch) -> list[Forest]:
        return [forest for drafter in self.drafters for forest in drafter.forests(search)]

    def _extend(self, search: SequenceSearch) -> None:
        """Append the newest token of every live beam to the trees."""
        beams = search.live
        for forests, name in ((self._forests[search], "tips"), (self._draft_forests(search), "draft_tips")):
            grown = [
                forest.extend([(getattr(beam, name)[place], beam.tokens[-1]) for beam in beams])
                for place, forest in enumerate(forests)
            ]
            for index, beam in enumerate(beams):
                setattr(beam, name, [tips[index] for tips in grown])

    def _settle(self, search: SequenceSearch) -> None:
        """Drop what the trees of a search no longer need, or close them."""
        forests = self._forests[search]
        search.num_used = forests[0].num_reused
        if search.is_done or search.error is not None:
            self._cancel(search)
            return
        beams = search.live
        for place, forest in enumerate(forests):
            forest.settle([beam.tips[place] for beam in beams])
        for place, forest in enumerate(self._draft_forests(search)):
            forest.settle([beam.draft_tips[place] for beam in beams])
        self.stats.most_slots = max(self.stats.most_slots, *(len(forest.trunks) for forest in forests))
