"""A drafter whose tokens are not the target's: what it reads, in which tokens it answers, and which way suits a pair.

Either way the drafter reads the text in its own tokens. Its answers come back

* by `tokens`: its logits are carried over to the tokens that both vocabularies have; whatever looks at them, the
  request's noise and controls included, sees tokens of the target. Distributions are renormalised over the
  intersection.
* by `strings`: it grows its tree in its own tokens, and `drafters/strings.py` says each way down in the target's.

Source: Timor et al., arXiv 2502.05202, algorithms 4 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, MissingTokenizerError, VocabularyMismatchError, suggestion
from draftree.core.tree import Draw
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.drafters.growing.readers import Reader, Reading
from draftree.sampling.logits import Logits
from draftree.text.retokenize.lexicon import Lexicon, lexicon_of
from draftree.text.retokenize.rereading import Rereading
from draftree.text.retokenize.vocab_map import CommonTokens, common_tokens, read_specials
from draftree.text.vocab import compare_vocabularies

logger = logging.getLogger(__name__)

AUTO, TOKENS, STRINGS = "auto", "tokens", "strings"
MAPS = (AUTO, TOKENS, STRINGS)
LEAST_SHARE = 0.25
"""Of the drafter's tokens: with fewer in common it could seldom say what it means, and strings are taken."""


def require_map(name: str) -> None:
    """Refuses an unknown way.

    Raises:
        ConfigurationError: unknown.
    """
    if name not in MAPS:
        raise ConfigurationError(
            f"option map is '{name}', which is no way between vocabularies: {suggestion(name, MAPS)}"
        )


@dataclass(frozen=True, slots=True)
class Translation:
    """How one drafter's tokens become the target's.

    Attributes:
        way: `tokens` or `strings`.
        target: the target's vocabulary.
        own: the drafter's.
        common: what they share.
        target_size: width of the target's logits.
    """

    way: str
    target: Lexicon
    own: Lexicon
    common: CommonTokens
    target_size: int

    def __str__(self) -> str:
        return (
            f"map={self.way}: {self.own.name} has {len(self.common):,} tokens in common with {self.target.name} "
            f"({self.common.draft_share:.0%} of its own, {self.common.target_share:.0%} of the target's)"
        )


def translation_between(wanted: str, loaded: LoadedDraftModel, context: DraftContext) -> Translation | None:
    """How the drafter's tokens become the target's; None where they are the same.

    Raises:
        ConfigurationError: the vocabularies cannot be compared, or not be mapped in the way that was asked for.
    """
    target, own = context.tokenizer, loaded.tokenizer
    if target is None or own is None:
        _require_same_size(wanted, loaded, context)
        return None
    if wanted != STRINGS and compare_vocabularies(target.vocabulary(), own.vocabulary()).same:
        return None
    sizes = (context.target.vocab_size, loaded.model.vocab_size)
    return choose_translation(
        wanted, lexicon_of(target), lexicon_of(own), target_size=sizes[0], own_size=sizes[1], draw=context.draw
    )


def _require_same_size(wanted: str, loaded: LoadedDraftModel, context: DraftContext) -> None:
    own, target = loaded.model.vocab_size, context.target.vocab_size
    if wanted != AUTO or own != target:
        asked = "" if wanted == AUTO else f" with map={wanted}"
        raise MissingTokenizerError(
            f"drafter '{loaded.name}'{asked} has {own} tokens and the target {target}, and there are no tokenizers to "
            "compare or to map: take models that bring theirs, or a drafter of the same family"
        )


def choose_translation(
    wanted: str, target: Lexicon, own: Lexicon, *, target_size: int, own_size: int, draw: Draw
) -> Translation:
    """The way that was asked for, or for `auto` the one that suits the pair.

    Args:
        wanted: one of `MAPS`.
        target: the target's vocabulary.
        own: the drafter's.
        target_size: width of the target's logits.
        own_size: width of the drafter's.
        draw: how children are drawn; draws are of tokens, so only free ones can be said as strings.

    Raises:
        VocabularyMismatchError: tokens were asked for, or are needed, and there are none in common.
    """
    common = common_tokens(target, own, target_size=target_size, draft_size=own_size)
    way = wanted
    if wanted == AUTO:
        way = TOKENS if draw is not Draw.FREE or common.draft_share >= LEAST_SHARE else STRINGS
    if way == TOKENS and not len(common):
        raise VocabularyMismatchError(
            f"{own.name} was to draft for {target.name} by tokens, but their vocabularies have none in common: "
            "use map=strings with verifier 'coupled', or a drafter that was trained with the same tokenizer"
        )
    translation = Translation(way, target, own, common, target_size)
    logger.info("drafter %s", translation)
    return translation


@final
class CommonReader(Reader):
    """Trees in the target's tokens, of which the model knows some: `tokens`."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        common = translation.common
        self._own_ids = dict(zip(common.target_ids, common.draft_ids, strict=True))
        self._columns = torch.tensor(common.target_ids)
        self._sources = torch.tensor(common.draft_ids)

    def open(self, view: SequenceView) -> Reading:
        """The text in the model's own tokens."""
        return _Translated(view, self._translation)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The model's ids of the same tokens."""
        return [self._own_ids[token] for token in tokens]

    def answer(self, logits: Logits) -> Logits:
        """Over the target's vocabulary; what the model has no token for is impossible to it."""
        with logits.computing():
            return logits.replaced(self._carried(logits.tensor()))

    def _carried(self, logits: Tensor) -> Tensor:
        if self._columns.device != logits.device:
            self._columns, self._sources = self._columns.to(logits.device), self._sources.to(logits.device)
        answers = logits.new_full((logits.shape[0], self._translation.target_size), float("-inf"))
        return answers.index_copy_(1, self._columns, logits.index_select(1, self._sources))


@final
class OwnReader(Reader):
    """Trees in the model's own tokens: `strings`.

    Args:
        translation: between the vocabularies.
        own_size: width of the model's logits.
    """

    def __init__(self, translation: Translation, own_size: int) -> None:
        self._translation = translation
        own = translation.own
        silent = (i for i in range(own_size) if not own.token_bytes(i) and i != own.eos_id)
        self._silent = torch.tensor(list(silent), dtype=torch.long)

    def open(self, view: SequenceView) -> Reading:
        """The text in the model's own tokens."""
        return _Translated(view, self._translation)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """As they are."""
        return list(tokens)

    def answer(self, logits: Logits) -> Logits:
        """As they are, less tokens that say nothing."""
        with logits.computing():
            rows = logits.tensor()
            if self._silent.device != rows.device:
                self._silent = self._silent.to(rows.device)
            rows.index_fill_(1, self._silent, float("-inf"))
        return logits


class _Translated(Reading):
    """A text in the drafter's tokens, kept in step with the history."""

    def __init__(self, view: SequenceView, translation: Translation) -> None:
        self._history = view.history
        own = translation.own
        self._text = Rereading(translation.target, own, read_specials(translation.target, own))
        self._known = 0
        self._anything = next((i for i in (own.bos_id, own.eos_id) if i is not None), 0)

    def advance(self) -> int:
        new = self._history.tokens[self._known :].tolist()
        self._known += len(new)
        stands = self._text.push(new)
        if not self._text.tokens:
            # a text that says nothing yet: a model needs a token to stand behind
            self._text.tokens.append(self._anything)
        return stands

    def __len__(self) -> int:
        return len(self._text.tokens)

    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        return self._text.tokens[start:stop]
