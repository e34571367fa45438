"""Beam search of `LLM`: prompts and parameters to searches, tokens to texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from draftree.arguments import Messages, Prompt, prompt_list
from draftree.beam.loop import BeamSearch
from draftree.beam.opening import BeamPrompt
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.state import Decode, OnStep
from draftree.core.errors import InvalidRequestError
from draftree.engine.openings import DecoderPrompt, opening_of
from draftree.models.base import LanguageModel
from draftree.models.source import FeatureSource
from draftree.prompts import PromptEncoder
from draftree.requests import Requests
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer

AnyPrompt = Prompt | Messages | np.ndarray
BeamParams = BeamSearchParams | Sequence[BeamSearchParams] | None


class BeamSearching:
    """A class with a model, prompts and requests that can search with beams."""

    _prompts: PromptEncoder
    _requests: Requests
    _tokenizer: Tokenizer | None

    @property
    def model(self) -> LanguageModel:
        """The target model."""
        raise NotImplementedError

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamParams = None,
        *,
        decoder_prompt: Prompt | None = None,
        on_step: OnStep | None = None,
    ) -> list[BeamResult]:
        """Search the most likely texts of prompts, as one batch.

        Args:
            prompts: texts, lists of token ids or conversations, one or several; the sources of an encoder-decoder
                model. For models of speech, features as float arrays of shape (channels, frames).
            params: parameters, for all or one for each prompt.
            decoder_prompt: what the decoder of an encoder-decoder model continues, such as the token of a target
                language; it is no part of the hypotheses.
            on_step: called with the search of a prompt after each of its steps, such as a `BeamTrace` for one prompt.

        Returns:
            The best hypotheses of each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been computed then.
            GenerationError: the model gave NaN, no token is allowed, or required phrases are missing with `strict`.
        """
        start = self._prompts.encode_start({"decoder_prompt": decoder_prompt})
        openings = [self._opening(prompt, start) for prompt in _each(prompts)]
        tokenizer = self._tokenizer
        decode = None if tokenizer is None else lambda tokens: tokenizer.decode(tokens, True)
        search = BeamSearch(self.model, end_ids=self._requests.eos_ids, decode=decode, on_step=on_step)
        return search.run(openings, _params(params, len(openings)))

    def _opening(self, prompt: AnyPrompt, decoder_prompt: DecoderPrompt | None) -> BeamPrompt:
        given = FeatureSource(prompt) if _is_features(prompt) else self._prompts.encode(prompt)  # type: ignore[arg-type]
        return beam_opening(self.model, given, decoder_prompt)


def beam_opening(
    model: LanguageModel, given: Sequence[int] | FeatureSource, decoder_prompt: DecoderPrompt | None = None
) -> BeamPrompt:
    """Return the prompt of a search.

    Args:
        model: the model that is searched.
        given: token ids, or features; the source of an encoder-decoder model.
        decoder_prompt: what the decoder of such a model continues; None for its own start.

    Raises:
        InvalidRequestError: the model does not take such a prompt.
    """
    opening = opening_of(model, given, decoder_prompt)
    rules = opening.rules
    if rules is None:
        return BeamPrompt(opening.tokens)
    if decoder_prompt is not None:
        return BeamPrompt(tuple(opening.tokens), opening.source, opening.source_length, rules)
    forced = () if rules.forced_first is None else (rules.forced_first,)
    return BeamPrompt(rules.start_ids, opening.source, opening.source_length, rules, forced)


def decoder_of(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> Decode | None:
    """Return the function from the tokens of a text to the text that continues a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, prompt_ids=prompt)
        return "".join(detokenizer.push(tokens)) + detokenizer.finish()

    return decode


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
