"""Beam search of `LLM`: prompts and parameters to searches, tokens to texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from draftree.beam.forest import BeamPrompt
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.core.errors import InvalidRequestError
from draftree.engine.prompts import DecoderOptions, PromptEncoder
from draftree.engine.requests import SequenceFactory
from draftree.engine.sequence import DecoderPrompt, decoder_input
from draftree.engine.sequence import SourceOrTokens as SourceOrTokens
from draftree.loading.load import load_model
from draftree.models.base import LanguageModel
from draftree.models.source import FeatureSource
from draftree.options import Messages, Prompt, prompt_list
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from draftree.beam.sequence import Decode, OnStep

AnyPrompt = Prompt | Messages | np.ndarray
BeamParams = BeamSearchParams | Sequence[BeamSearchParams] | None


class BeamSearching:
    """A class with a model, prompts and requests that can search with beams."""

    _prompts: PromptEncoder
    _requests: SequenceFactory
    _tokenizer: Tokenizer | None
    kernels: str

    @property
    def model(self) -> LanguageModel:
        """The target model."""
        raise NotImplementedError

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamParams = None,
        *,
        draft: Any = None,
        on_step: OnStep | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> list[BeamResult]:
        """Search the most likely texts of prompts, as one batch.

        Args:
            prompts: texts, lists of token ids or conversations, one or several; the sources of an encoder-decoder
                model. For models of speech, features as float arrays of shape (channels, frames).
            params: parameters, for all or one for each prompt.
            draft: drafter of the next beams, which changes the number of passes and not the result: `ngram`, `suffix`,
                `runners-up`, `model:NAME`, several joined by "+", or a loaded model; None for none. A model that a spec
                names is loaded once.
            on_step: called with the search of a prompt after each of its steps, such as a `BeamTrace` for one prompt.
            **decoder: of encoder-decoder models, as for `generate`: `decoder_prompt`, `source_lang`, `target_lang`.
                What the decoder continues is no part of the hypotheses.

        Returns:
            The best hypotheses of each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been computed then.
            NonFiniteLogitsError: the model gave NaN.
            UnsatisfiableError: no token is allowed, or required phrases are missing with `strict`.
        """
        # not imported by starts that search nothing
        from draftree.beam.drafting import beam_drafter
        from draftree.beam.search import BeamSearch

        start, spoken = self._prompts.encode_start(decoder), decoder.get("source_lang")
        openings = [self._opening(prompt, start, spoken) for prompt in _each(prompts)]
        tokenizer = self._tokenizer
        drafter = beam_drafter(draft, target=self.model, tokenizer=tokenizer, load=self.companion)
        search = BeamSearch(
            self.model,
            end_ids=self._requests.eos_ids,
            decode_after=decoder_of(tokenizer),
            drafter=drafter,
            on_step=on_step,
        )
        return search.run(openings, _params(params, len(openings)))

    def companion(self, name: str) -> LanguageModel:
        """Load another model of a search in the target's dtype, or return the one that was loaded before.

        Args:
            name: a model of the catalogue, or a folder.

        Raises:
            DraftreeError: there is no such model, or it cannot be loaded.
        """
        known: dict[str, LanguageModel] = self.__dict__.setdefault("_companions", {})
        if name not in known:
            kernels = "torch" if self.kernels == "torch" else "auto"
            dtype = str(self.model.dtype).removeprefix("torch.")
            known[name] = load_model(name, dtype=dtype, device=str(self.model.device), kernels=kernels).model
        return known[name]

    def _opening(self, prompt: AnyPrompt, decoder_prompt: DecoderPrompt | None, source_lang: str | None) -> BeamPrompt:
        if _is_features(prompt):
            if source_lang is not None:
                raise InvalidRequestError(
                    "source_lang states the language of a text, and features were given: leave it out",
                    param="source_lang",
                )
            given: SourceOrTokens = FeatureSource(prompt)  # type: ignore[arg-type]
        else:
            given = self._prompts.encode(prompt, source_lang=source_lang)  # type: ignore[arg-type]
        return beam_opening(self.model, given, decoder_prompt)


def beam_opening(
    model: LanguageModel, given: SourceOrTokens, decoder_prompt: DecoderPrompt | None = None
) -> BeamPrompt:
    """Return the prompt of a search.

    Args:
        model: the model that is searched.
        given: token ids, or features; the source of an encoder-decoder model.
        decoder_prompt: what the decoder of such a model continues; None for its own start.

    Raises:
        InvalidRequestError: the model does not take such a prompt.
    """
    opening = decoder_input(model, given, decoder_prompt)
    rules = opening.rules
    if rules is None:
        return BeamPrompt(opening.tokens)
    if decoder_prompt is not None:
        return BeamPrompt(tuple(opening.tokens), opening.source, opening.source_length, rules)
    forced = () if rules.forced_first is None else (rules.forced_first,)
    return BeamPrompt(rules.start_ids, opening.source, opening.source_length, rules, forced)


def decoder_of(tokenizer: Tokenizer | None) -> Callable[[Sequence[int]], Decode] | None:
    """Return the function from a prompt to the function from tokens to the text that continues it, as `generate` does.

    None without a tokenizer.
    """
    if tokenizer is None:
        return None

    def text_after(prompt: Sequence[int], tokens: Sequence[int]) -> str:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, prompt_ids=prompt)
        return "".join(detokenizer.push(tokens)) + detokenizer.finish()

    return lambda prompt: partial(text_after, prompt)


def _is_features(prompt: object) -> bool:
    return isinstance(prompt, np.ndarray) and prompt.ndim == 2 and np.issubdtype(prompt.dtype, np.floating)


def _each(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    if _is_features(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Sequence | np.ndarray) and len(prompts) and all(map(_is_features, prompts)):
        return list(prompts)
    if isinstance(prompts, Sequence) and len(prompts) and isinstance(prompts[0], Mapping):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Sequence) and not isinstance(prompts, str) and any(_is_chat(prompt) for prompt in prompts):
        return prompts  # type: ignore[return-value]
    return prompt_list(prompts)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _params(params: BeamParams, count: int) -> list[BeamSearchParams]:
    each = [params or BeamSearchParams()] * count if isinstance(params, BeamSearchParams | None) else list(params)
    if len(each) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(each)} parameters: give one for each, or one", param="params"
        )
    for given in each:
        if not isinstance(given, BeamSearchParams):
            raise InvalidRequestError(f"params is a {type(given).__name__}: give BeamSearchParams", param="params")
    return each
