"""Beam search of `LLM`: prompts and parameters to searches, tokens to texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftree.arguments import Messages, Prompt, prompt_list
from draftree.beam.loop import BeamSearch
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.state import Decode, OnStep
from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.models.base import LanguageModel
from draftree.models.source import EncoderDecoder
from draftree.prompts import PromptEncoder
from draftree.requests import Requests
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer

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
        prompts: Prompt | Messages | Sequence[Prompt | Messages],
        params: BeamParams = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[BeamResult]:
        """Search the most likely texts of prompts, as one batch. No drafter takes part.

        Args:
            prompts: texts, lists of token ids or conversations, one or several.
            params: parameters, for all or one for each prompt.
            on_step: called with the search of a prompt after each of its steps, such as a `BeamTrace` for one prompt.

        Returns:
            The best hypotheses of each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been computed then.
            UnsupportedModelError: the model is an encoder-decoder.
            GenerationError: the model gave NaN, no token is allowed, or required phrases are missing with `strict`.
        """
        require_causal(self.model)
        ids = [self._prompts.encode(prompt) for prompt in _each(prompts)]
        tokenizer = self._tokenizer
        decode = None if tokenizer is None else lambda tokens: tokenizer.decode(tokens, True)
        search = BeamSearch(self.model, end_ids=self._requests.eos_ids, decode=decode, on_step=on_step)
        return search.run(ids, _params(params, len(ids)))


def require_causal(model: LanguageModel) -> None:
    """Refuse a model that beam search cannot decode.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
    """
    if isinstance(model, EncoderDecoder):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder, and beam search decodes causal models only: use generate"
        )


def decoder_of(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> Decode | None:
    """Return the function from the tokens of a text to the text that continues a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, prompt_ids=prompt)
        return "".join(detokenizer.push(tokens)) + detokenizer.finish()

    return decode


def _each(prompts: Prompt | Messages | Sequence[Prompt | Messages]) -> Sequence[Prompt | Messages]:
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
