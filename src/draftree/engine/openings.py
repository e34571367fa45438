"""How a text begins: the tokens that the target reads, and the source of an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import InvalidRequestError, PromptTooLongError
from draftree.models.base import LanguageModel
from draftree.models.source import EncoderDecoder, FeatureSource, Source, TokenSource
from draftree.sampling.decoding_rules import DecodingRules

Prompt = Sequence[int] | FeatureSource
"""A request's prompt: token ids, or features for models that read features."""


@dataclass(frozen=True, slots=True)
class WholeStart:
    """A decoder's prompt that is complete: the model's start token is not put before it.

    Attributes:
        tokens: token ids.
    """

    tokens: Sequence[int]


DecoderPrompt = Sequence[int] | WholeStart


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a text.

    Attributes:
        tokens: the prompt of a causal model, or the decoder's prompt.
        source: what the decoder decodes from; None for causal models.
        source_length: number of positions of the source.
        rules: settings of an encoder-decoder model; None for causal models.
    """

    tokens: Sequence[int]
    source: Source | None = None
    source_length: int = 0
    rules: DecodingRules | None = None


def opening_of(target: LanguageModel, prompt: Prompt, decoder_prompt: DecoderPrompt | None = None) -> Opening:
    """Return the beginning of a request's text.

    Args:
        target: the model.
        prompt: token ids or features; the source of an encoder-decoder model.
        decoder_prompt: tokens that the decoder continues, after its start token, which may be left out, or a whole
            start; None for the model's forced first token, if it has one.

    Raises:
        InvalidRequestError: the prompt is not what the model reads, or is too long.
    """
    if not isinstance(target, EncoderDecoder):
        if decoder_prompt is not None or isinstance(prompt, FeatureSource):
            name = "decoder_prompt" if decoder_prompt is not None else "prompt"
            raise InvalidRequestError(
                f"{name} is for encoder-decoder models, and this model is causal: give the whole text as prompt",
                param=name,
            )
        return Opening(prompt)
    source = prompt if isinstance(prompt, FeatureSource) else TokenSource(tuple(prompt))
    if isinstance(source, TokenSource) != (target.feature_shape is None):
        wanted = "token ids" if target.feature_shape is None else "features; use transcribe"
        raise InvalidRequestError(f"the prompt is of the wrong kind: this model reads {wanted}", param="prompt")
    length = target.source_length(source)
    if length > target.max_source_length:
        raise PromptTooLongError(
            f"the prompt has {length} tokens, but the model's encoder reads {target.max_source_length} at most: "
            "shorten the prompt",
            param="prompt",
        )
    rules = target.rules
    return Opening(decoder_tokens(target, decoder_prompt), source, length, rules)


def decoder_tokens(target: EncoderDecoder, prompt: DecoderPrompt | None) -> Sequence[int]:
    """Return the tokens that the decoder continues; arguments as for `opening_of`."""
    start = target.rules.start_ids
    if prompt is None:
        return target.rules.prompt
    given = prompt.tokens if isinstance(prompt, WholeStart) else prompt
    outside = [token for token in given if not 0 <= token < target.vocab_size]
    if outside:
        raise InvalidRequestError(
            f"decoder_prompt holds token {outside[0]}, but the vocabulary ends at {target.vocab_size - 1}",
            param="decoder_prompt",
        )
    is_whole = isinstance(prompt, WholeStart) or tuple(given[: len(start)]) == start
    return given if is_whole else (*start, *given)
