"""How a text of a beam search begins: the tokens that the decoder reads, and the source of an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import InvalidRequestError
from draftree.models.base import LanguageModel, Slot
from draftree.models.source import EncoderDecoder, FeatureSource, HiddenSource, Source
from draftree.sampling.decoding_rules import DecodingRules


@dataclass(frozen=True, slots=True)
class BeamPrompt:
    """The beginning of a text.

    Attributes:
        tokens: the prompt of a causal model, or the decoder's prompt; at least one token.
        source: what the decoder decodes from; None for causal models.
        source_length: number of positions of the source.
        rules: settings of the generation configuration that hold for the text; None for none.
        forced: tokens with which every text begins, with a score of 0.
    """

    tokens: Sequence[int]
    source: Source | None = None
    source_length: int = 0
    rules: DecodingRules | None = None
    forced: tuple[int, ...] = ()

    @property
    def shown(self) -> tuple[int, ...]:
        """The tokens that were given: those of the source, or the prompt."""
        return tuple(self.tokens) if self.source is None else self.source.tokens

    @property
    def length(self) -> int:
        """Number of tokens to which the lengths of texts relate: those of the source, or of the prompt."""
        return len(self.tokens) if self.source is None else self.source_length


def beam_prompt(prompt: Sequence[int] | BeamPrompt) -> BeamPrompt:
    """Return token ids as the beginning of a causal model's text."""
    return prompt if isinstance(prompt, BeamPrompt) else BeamPrompt(tuple(prompt))


def open_slot(model: LanguageModel, prompt: BeamPrompt) -> Slot:
    """Return a slot of the target or of an ensemble's model, on the source if there is one."""
    if prompt.source is None:
        return model.open()
    assert isinstance(model, EncoderDecoder), "only encoder-decoder models are searched with a source"
    return model.open_on(prompt.source)


def require_source(model: LanguageModel, prompt: BeamPrompt, name: str) -> None:
    """Check that a model reads the prompt's source, or needs none.

    Args:
        model: the model.
        prompt: the prompt.
        name: parameter that gave the model.

    Raises:
        InvalidRequestError: the model needs a source and there is none, or the other way round.
    """
    if isinstance(model, EncoderDecoder) != (prompt.source is not None):
        reads, given = ("no source", "has one") if prompt.source is not None else ("a source", "has none")
        raise InvalidRequestError(
            f"{name}: {type(model).__name__} reads {reads}, and the prompt {given}; encoder-decoder models and causal "
            "models are searched separately",
            param=name,
        )
    if isinstance(model, EncoderDecoder) and prompt.source is not None and not isinstance(prompt.source, HiddenSource):
        wanted = model.feature_shape
        shape = prompt.source.features.shape if isinstance(prompt.source, FeatureSource) else None
        if wanted != shape:
            wanted_kind, kind = ("token ids" if one is None else f"features of shape {one}" for one in (wanted, shape))
            raise InvalidRequestError(f"{name}: the model reads {wanted_kind}, and the source is {kind}", param=name)
