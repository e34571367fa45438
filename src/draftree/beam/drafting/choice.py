"""Choice of the drafter of a beam search by its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftree.beam.drafting.base import BeamDrafter
from draftree.beam.drafting.model_beams import ModelBeams
from draftree.beam.drafting.runners_up import RunnersUp
from draftree.beam.drafting.several import SeveralDrafters
from draftree.beam.drafting.texts import TextDrafts
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.core.tree import Draw
from draftree.drafters import DRAFTERS, NO_DRAFT
from draftree.drafters.base import DraftContext, Drafter
from draftree.drafters.model import ModelDrafter
from draftree.models.base import LanguageModel
from draftree.text.tokenizer import Tokenizer

RUNNERS_UP = "runners-up"
LoadModel = Callable[[str], LanguageModel]


def beam_drafter(
    draft: Any, *, target: LanguageModel, tokenizer: Tokenizer | None, load: LoadModel
) -> BeamDrafter | None:
    """Return the drafter of a spec.

    Args:
        draft: `runners-up`, `ngram`, `suffix`, `model:NAME`, several joined by "+", or a loaded model; None or "none"
            for none.
        target: the model that is searched.
        tokenizer: its tokenizer; None if it has none.
        load: loads the model that a spec names.

    Raises:
        InvalidRequestError: an unknown drafter, or one that cannot draft for beams.
    """
    if draft is None or draft == NO_DRAFT:
        return None
    if not isinstance(draft, str):
        return ModelBeams(_fitting(getattr(draft, "model", draft), target))
    try:
        found = [_one(part.strip(), target, tokenizer, load) for part in draft.split("+")]
    except ConfigurationError as error:
        raise InvalidRequestError(f"draft: {error}", param="draft") from error
    if sum(isinstance(one, ModelBeams) for one in found) > 1:
        raise InvalidRequestError(f"draft '{draft}' names two models: name one", param="draft")
    return found[0] if len(found) == 1 else SeveralDrafters(found)


def _one(spec: str, target: LanguageModel, tokenizer: Tokenizer | None, load: LoadModel) -> BeamDrafter:
    if spec == RUNNERS_UP:
        return RunnersUp()
    kind, config = DRAFTERS.configure(DRAFTERS.parse(spec)[0])
    if issubclass(kind, ModelDrafter):
        if config != kind.Config(config.name):
            raise ConfigurationError(f"'{spec}' has options, and the beams of a draft model have none: leave them out")
        return ModelBeams(_fitting(load(config.name), target))
    return TextDrafts(_reader(spec, kind, config, target, tokenizer), target.vocab_size)


def _reader(
    spec: str, kind: type[Drafter[Any]], config: Any, target: LanguageModel, tokenizer: Tokenizer | None
) -> Drafter[Any]:
    """Build a drafter that reads texts only."""
    traits = kind.describe(config)
    for needed, what in (
        (traits.features, "hidden states of the model"),
        (traits.runs_model, "a part of the model, or a model that drafts for one text"),
        (traits.wants_picks or traits.works_ahead, "the picks of earlier passes"),
        (traits.reads_predictions, "the prediction of a request"),
        (traits.reads_grammars, "the grammar of a request"),
    ):
        if needed:
            raise ConfigurationError(
                f"'{spec}' needs {what}, which a beam search does not have: use ngram, suffix, {RUNNERS_UP} or "
                "model:NAME"
            )

    def refuse(name: str) -> Any:
        raise ConfigurationError(f"'{spec}' loads the model '{name}': use model:NAME")

    draw = next(draw for draw in (Draw.FREE, Draw.POINT, *traits.draws) if draw in traits.draws)
    return kind(config, DraftContext(target, tokenizer, draw, shares_noise=False, load_model=refuse))


def _fitting(model: object, target: LanguageModel) -> LanguageModel:
    if not isinstance(model, LanguageModel):
        raise InvalidRequestError(
            f"draft is a {type(model).__name__}: give a spec, an LLM or a LanguageModel", param="draft"
        )
    if model.vocab_size != target.vocab_size:
        raise InvalidRequestError(
            f"draft: the draft model has {model.vocab_size} tokens, and the model that is searched has "
            f"{target.vocab_size}: its beams need the same vocabulary",
            param="draft",
        )
    if not model.supports_trees:
        raise InvalidRequestError(
            "draft: the draft model accepts chains only, and several beams are a tree: choose another", param="draft"
        )
    return model
