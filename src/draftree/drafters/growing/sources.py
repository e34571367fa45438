"""Sources of encoder-decoder targets in draft models.

An encoder-decoder draft model encodes the source itself, once for all slots on it. A causal one reads the tokens of the
source before the text.
"""

from __future__ import annotations

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import LoadedDraftModel, SequenceView
from draftree.models.base import LanguageModel, Slot
from draftree.models.source import EncoderDecoder, TokenSource


def open_slot(model: LanguageModel, view: SequenceView) -> Slot:
    """Return an empty slot of a draft model for a sequence, on the sequence's source if the model has an encoder."""
    if not isinstance(model, EncoderDecoder):
        return model.open()
    assert view.encoded is not None, "the target has an encoder"
    source = view.encoded
    if isinstance(source, TokenSource) and len(source.tokens) > model.max_source_length:
        # a draft from the end of the source may be wrong, but is never written unless the target agrees
        source = TokenSource(source.tokens[-model.max_source_length :])
    return model.open_on(source)


def require_same_source(loaded: LoadedDraftModel, target: LanguageModel) -> None:
    """Check that a draft model reads what the target reads.

    Raises:
        ConfigurationError: it has an encoder and the target has none, or their sources differ.
    """
    model = loaded.model
    if not isinstance(model, EncoderDecoder):
        return
    if not isinstance(target, EncoderDecoder):
        raise ConfigurationError(
            f"drafter '{loaded.name}' is an encoder-decoder model, and the target is causal: choose a causal model"
        )
    if model.feature_shape != target.feature_shape:
        own, wanted = ("tokens" if one is None else f"features of shape {one}" for one in _shapes(model, target))
        raise ConfigurationError(
            f"drafter '{loaded.name}' reads {own}, and the target reads {wanted}: choose a drafter of the same family"
        )


def _shapes(*models: EncoderDecoder) -> list[tuple[int, int] | None]:
    return [model.feature_shape for model in models]
