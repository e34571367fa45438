"""Loop of the beam search: one pass and one read from the device per step, for a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftree.beam.drafting.base import MAX_NODES, BeamDrafter, Pace, require_draftable
from draftree.beam.forest import Forest, capacity_for
from draftree.beam.hooks import Decode, Hooks
from draftree.beam.opening import BeamPrompt, beam_prompt, require_source
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.scoring import SearchStats, combined_logprobs, logprobs_of, read, run_pass
from draftree.beam.shaping import shape
from draftree.beam.state import TextSearch
from draftree.core.errors import InvalidRequestError, NonFiniteLogitsError
from draftree.models.base import LanguageModel

BATCH_SIZE = 32
"""Maximum number of prompts that are searched at the same time."""


class BeamSearch:
    """Searches of a batch of prompts on one model; every prompt has its own parameters.

    Args:
        model: the model; trees are used if it supports them, and one slot per beam otherwise.
        end_ids: the model's end-of-text tokens.
        decode: function from generated tokens to text; None without a tokenizer.
        capacity: maximum number of live nodes in one slot; None for a default by width.
        batch_size: maximum number of prompts that are searched at the same time.
        hooks: further rules, called for each text in every step; None for none.
        drafter: guesses the next beams, so that one pass may serve several steps; None for one step a pass.
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
        drafter: BeamDrafter | None = None,
    ) -> None:
        self._model, self._end_ids, self._decode = model, tuple(end_ids), decode
        self._capacity, self._batch_size, self._hooks = capacity, batch_size, hooks
        self._drafter = drafter
        self.stats = SearchStats()
        self._forests: dict[TextSearch, list[Forest]] = {}
        self._paces: dict[TextSearch, Pace] = {}

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
            for text, forests in self._forests.items():
                for forest in forests:
                    forest.close()
                if self._drafter is not None:
                    self._drafter.finish(text)
            self._forests.clear()
            self._paces.clear()

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
        if params.reads_attention and prompt.source is None:
            name = "coverage_penalty" if params.coverage_penalty else "return_attention"
            raise InvalidRequestError(
                f"{name} needs cross-attention, which encoder-decoder models have: leave it out", param=name
            )
        if self._drafter is not None:
            require_draftable(self._model, params)
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
        if self._drafter is not None and self._capacity is None:
            capacity += MAX_NODES
        length = len(text.prompt) + text.limit + min(capacity, 16 * text.params.beam_width)
        forests = self._forests[text] = []
        for model in self._models_of(text):
            prompt = BeamPrompt(text.prompt) if model is text.params.lm_model else text.opening
            forests.append(Forest(model, prompt, capacity=capacity, length=length))
        text.start([forest.root for forest in forests])
        if self._drafter is not None:
            self._paces[text] = Pace()
            self._drafter.start(text, capacity=capacity, length=length)

    def _models_of(self, text: TextSearch) -> list[LanguageModel]:
        """The model, the others of the ensemble, and the language model of shallow fusion."""
        fused = [] if text.params.lm_model is None else [text.params.lm_model]
        return [self._model, *text.params.models, *fused]

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass of each model over all live texts, and make the steps of which all beams are scored."""
        texts = list(self._forests)
        if self._drafter is not None:
            self._draft(self._drafter, [text for text in texts if text.num_steps])
        for model in dict.fromkeys(model for text in texts for model in self._models_of(text)):
            forests = [forest for text in texts for forest in self._forests[text] if forest.model is model]
            attends = model is self._model and any(text.params.reads_attention for text in texts)
            self.stats.num_rows += run_pass(model, forests, attends=attends)
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

    def _draft(self, drafter: BeamDrafter, texts: Sequence[TextSearch]) -> None:
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

    def _advance(self, texts: Sequence[TextSearch]) -> list[TextSearch]:
        """Make one step of each text of which enough beams are scored; returns those that go on."""
        scored = {text: groups for text in texts if (groups := text.ready()) is not None}
        if not scored:
            return []
        flat = [[beam for group in own_groups for beam in group] for own_groups in scored.values()]
        logprobs = logprobs_of(flat, 0, [text.params.temperature for text in scored])
        vocab, row, found = logprobs.shape[-1], 0, []
        is_nan = logprobs.amax(dim=-1).isnan().any()  # the maximum of a row with NaN is NaN
        for text, beams in zip(scored, flat, strict=True):
            own = logprobs[row : row + len(beams)]
            row += len(own)
            if len(self._forests[text]) > 1:
                own = combined_logprobs(text, own, beams)
                is_nan = is_nan | own.amax(dim=-1).isnan().any()
            if self._hooks is not None:
                own = self._hooks.process(text, own)
            shape(own, text, beams)
            found.append(text.select(own, scored[text]))
        columns, nan = read(found, is_nan)
        if nan:
            raise NonFiniteLogitsError("a model gave NaN as a logit, so beams cannot be ranked: check its weights")
        going = []
        for text, own_columns in zip(scored, columns, strict=True):
            if text.advance(own_columns, vocab, scored[text]) and not text.is_done:
                self._extend(text)
                going.append(text)
        return going

    def _extend(self, text: TextSearch) -> None:
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

    def _settle(self, text: TextSearch) -> None:
        """Drop what the trees of a text no longer need, or close them."""
        forests = self._forests[text]
        text.num_used = forests[0].num_reused
        if text.is_done:
            for forest in forests:
                forest.close()
            del self._forests[text]
            if self._drafter is not None:
                del self._paces[text]
                self._drafter.finish(text)
            return
        beams = text.live
        for place, forest in enumerate(forests):
            forest.settle([beam.tips[place] for beam in beams])
        if self._drafter is not None:
            for place, forest in enumerate(self._drafter.forests(text)):
                forest.settle([beam.draft_tips[place] for beam in beams])
        self.stats.most_live = max(self.stats.most_live, *(forest.num_live for forest in forests))
        self.stats.most_slots = max(self.stats.most_slots, *(len(forest.trunks) for forest in forests))
