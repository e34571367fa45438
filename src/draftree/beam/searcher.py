"""Beam search of `LLM`: prompts and parameters to searches, tokens to texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.core.errors import InvalidRequestError
from draftree.engine.prompts import PromptEncoder
from draftree.engine.sequence import DecoderInput, DecoderPrompt, SourceOrTokens, decoder_input
from draftree.loading.load import load_model
from draftree.models.base import LanguageModel
from draftree.models.images import refuse_images
from draftree.models.source import FeatureSource
from draftree.options import DecoderOptions, Messages, Prompt, RequestOptions, prompt_list, require_decoder_options
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from draftree.beam.sequence import Decode, OnStep

AnyPrompt = Prompt | Messages | np.ndarray
BeamParams = BeamSearchParams | Sequence[BeamSearchParams] | None


@final
@dataclass(eq=False)
class BeamSearcher:
    """Beam searches of one model, and the other models that they load."""

    model: LanguageModel
    prompts: PromptEncoder
    tokenizer: Tokenizer | None  # the model's; None if it has none
    _: KW_ONLY
    end_ids: Sequence[int]
    kernels: str
    _companions: dict[str, LanguageModel] = field(default_factory=dict)

    def search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamParams,
        *,
        draft: Any,
        on_step: OnStep | None,
        decoder: DecoderOptions,
    ) -> list[BeamResult]:
        """Search prompts as one batch; arguments as for `LLM.beam_search`."""
        # not imported by starts that search nothing
        from draftree.beam.drafting import beam_drafters
        from draftree.beam.search import BeamSearch

        require_decoder_options(decoder)
        start = self.prompts.encode_start(RequestOptions(**decoder))
        spoken = decoder.get("source_lang")
        openings = [self._opening(prompt, start, spoken) for prompt in _each(prompts)]
        search = BeamSearch(
            self.model,
            end_ids=self.end_ids,
            decode_after=decoder_of(self.tokenizer),
            drafters=beam_drafters(draft, target=self.model, tokenizer=self.tokenizer, load=self.companion),
            on_step=on_step,
        )
        return search.run(openings, _params(params, len(openings)))

    def companion(self, name: str) -> LanguageModel:
        """Load another model in the target's dtype, or return the one that was loaded before."""
        if name not in self._companions:
            kernels = "torch" if self.kernels == "torch" else "auto"
            dtype = str(self.model.dtype).removeprefix("torch.")
            loaded = load_model(name, dtype=dtype, device=str(self.model.device), kernels=kernels)
            self._companions[name] = loaded.model
        return self._companions[name]

    def _opening(self, prompt: AnyPrompt, start: DecoderPrompt | None, source_lang: str | None) -> DecoderInput:
        if _is_features(prompt):
            if source_lang is not None:
                raise InvalidRequestError(
                    "source_lang states the language of a text, and features were given: leave it out",
                    param="source_lang",
                )
            return beam_opening(self.model, FeatureSource(prompt), start)  # type: ignore[arg-type]
        tokens = self.prompts.encode(prompt, source_lang=source_lang)  # type: ignore[arg-type]
        return beam_opening(self.model, tokens, start)


def beam_opening(
    model: LanguageModel, prompt: SourceOrTokens, decoder_prompt: DecoderPrompt | None = None
) -> DecoderInput:
    """Return the prompt of a search.

    `prompt`: token ids, or features; the source of an encoder-decoder model. `decoder_prompt`: what the decoder of such
    a model continues; None for its own start.
    """
    refuse_images(prompt, "a beam search")
    opening = decoder_input(model, prompt, decoder_prompt)
    rules = opening.rules
    if rules is None or decoder_prompt is not None:
        return opening
    return replace(opening, tokens=rules.start_ids, forced=() if rules.forced_first is None else (rules.forced_first,))


def decoder_of(tokenizer: Tokenizer | None) -> Callable[[Sequence[int]], Decode] | None:
    """Return the function from a prompt to the function from tokens to the text that continues it, as `generate` does.

    None without a tokenizer.
    """
    if tokenizer is None:
        return None

    def text_after(prompt: Sequence[int], tokens: Sequence[int]) -> str:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, prompt_ids=prompt)
        return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()

    return lambda prompt: partial(text_after, prompt)


def _is_features(prompt: object) -> bool:
    return isinstance(prompt, np.ndarray) and prompt.ndim == 2 and np.issubdtype(prompt.dtype, np.floating)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _each(prompts: Any) -> Sequence[AnyPrompt]:
    if _is_features(prompts) or _is_chat(prompts):
        return [prompts]
    has_items = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str) and len(prompts) > 0
    if has_items and (all(map(_is_features, prompts)) or any(map(_is_chat, prompts))):
        return list(prompts)
    return prompt_list(prompts)


def _params(params: BeamParams, count: int) -> list[BeamSearchParams]:
    each = [params or BeamSearchParams()] * count if isinstance(params, BeamSearchParams | None) else list(params)
    if len(each) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(each)} parameters: give one for each, or one", param="params"
        )
    if wrong := [item for item in each if not isinstance(item, BeamSearchParams)]:
        raise InvalidRequestError(f"params is a {type(wrong[0]).__name__}: give BeamSearchParams", param="params")
    return each
