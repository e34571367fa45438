"""Draft models with another vocabulary than the target's.

The draft model reads the text in its own tokens. Its proposals are mapped

* by `tokens`: its logits are mapped to the tokens that both vocabularies have, so noise and controls apply to tokens of
  the target. Distributions are renormalized over the intersection.
* by `strings`: it grows a tree in its own tokens. Every path of this tree is a string, which is tokenized by the
  target's tokenizer as a continuation of the text, and the paths are merged into one tree. The draft model's children
  are its most likely tokens: its tokens and the target's are different events, so there is no shared noise and no
  distribution over the target's tokens.

Source: Timor et al., arXiv 2502.05202, algorithms 4 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from draftree.core.errors import MissingTokenizerError, VocabularyMismatchError
from draftree.core.node_map import merge, prune
from draftree.core.tree import EMPTY, Draw, TokenTree, chain, depths
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.drafters.tree_builder.builder import Shape, TreeBuilder
from draftree.drafters.tree_builder.model_stepper import ModelStepper, Reader, Reading, SteppedSequence
from draftree.models.base import LanguageModel
from draftree.sampling.controls import build_controls
from draftree.sampling.logits import Logits
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import (
    CONTEXT_TOKENS,
    CommonTokens,
    Lexicon,
    Rereading,
    common_tokens,
    compare_vocabularies,
    encode_continuation,
    lexicon_of,
    read_specials,
)

logger = logging.getLogger(__name__)

AUTO, TOKENS, STRINGS = "auto", "tokens", "strings"
MAPS = (AUTO, TOKENS, STRINGS)
LEAST_SHARE = 0.25
"""Minimum share of the draft model's tokens in common; below it, `auto` maps by strings."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Mapping of one draft model's tokens to the target's."""

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
    """Return the mapping of the draft model's tokens to the target's; None if the vocabularies are equal.

    Draws are of tokens, so strings require free choices.
    """
    target, draft = context.tokenizer, loaded.tokenizer
    own_size = loaded.model.vocab_size
    target_size = context.target.vocab_size
    if target is None or draft is None:
        if wanted != AUTO or own_size != target_size:
            mapped = "" if wanted == AUTO else f" with map={wanted}"
            raise MissingTokenizerError(
                f"drafter '{loaded.name}'{mapped} has {own_size} tokens and the target {target_size}, and there are no "
                "tokenizers to compare or to map: choose models with tokenizers, or a drafter of the same family"
            )
        return None
    if wanted != STRINGS and compare_vocabularies(target.vocabulary(), draft.vocabulary()).same:
        return None
    lexicons = lexicon_of(target), lexicon_of(draft)
    common = common_tokens(*lexicons, target_size=target_size, draft_size=own_size)
    way = wanted
    if wanted == AUTO:
        way = TOKENS if context.draw is not Draw.FREE or common.draft_share >= LEAST_SHARE else STRINGS
    if way == TOKENS and not len(common):
        raise VocabularyMismatchError(
            f"{lexicons[1].name} should draft for {lexicons[0].name} by tokens, but their vocabularies have none in "
            "common: use map=strings with verifier 'coupled', or a drafter that was trained with the same tokenizer"
        )
    translation = Translation(way, *lexicons, common, target_size)
    logger.info("drafter %s", translation)
    return translation


class TranslatingReader(Reader):
    """Reader for texts in the tokens of a draft model."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation

    def open(self, view: SequenceView) -> Reading:
        return _Translated(view, self._translation)


@final
class CommonReader(TranslatingReader):
    """Reader for trees in the target's tokens, of which the model has some: `tokens`."""

    def __init__(self, translation: Translation) -> None:
        super().__init__(translation)
        common = translation.common
        self._own_ids = dict(zip(common.target_ids, common.draft_ids, strict=True))
        self._columns = torch.tensor(common.target_ids)
        self._sources = torch.tensor(common.draft_ids)

    def read(self, tokens: Sequence[int]) -> list[int]:
        return [self._own_ids[token] for token in tokens]

    def answer(self, logits: Logits) -> Logits:
        """Convert logits to the target's vocabulary; tokens that the model lacks get -inf."""
        with logits.computing():
            rows = logits.tensor()
            self._columns, self._sources = self._columns.to(rows.device), self._sources.to(rows.device)
            answers = rows.new_full((rows.shape[0], self._translation.target_size), float("-inf"))
            return logits.replaced(answers.index_copy_(1, self._columns, rows.index_select(1, self._sources)))


@final
class OwnReader(TranslatingReader):
    """Reader for trees in the model's own tokens: `strings`."""

    def __init__(self, translation: Translation, own_size: int) -> None:
        super().__init__(translation)
        lexicon = translation.own
        self._silent = torch.tensor(
            [i for i in range(own_size) if not lexicon.token_bytes(i) and i != lexicon.eos_id]
        ).long()

    def answer(self, logits: Logits) -> Logits:
        with logits.computing():
            rows = logits.tensor()
            self._silent = self._silent.to(rows.device)
            rows.index_fill_(1, self._silent, float("-inf"))
        return logits


class _Translated(Reading):
    """Text in the draft model's tokens, updated with the history."""

    def __init__(self, view: SequenceView, translation: Translation) -> None:
        self._history = view.history
        lexicon = translation.own
        self._text = Rereading(translation.target, lexicon, read_specials(translation.target, lexicon))
        self._known = 0
        self._anything = next((i for i in (lexicon.bos_id, lexicon.eos_id) if i is not None), 0)

    def advance(self) -> int:
        new = self._history.tokens[self._known :].tolist()
        self._known += len(new)
        stands = self._text.push(new)
        if not self._text.tokens:
            # empty text so far: a model needs at least one token
            self._text.tokens.append(self._anything)
        return stands

    def __len__(self) -> int:
        return len(self._text.tokens)

    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        return self._text.tokens[start:stop]


@final
class StringTreeBuilder(TreeBuilder):
    """Grows trees in the draft model's own tokens, and returns them in the target's."""

    def __init__(self, model: LanguageModel, *, shape: Shape, translation: Translation) -> None:
        likeliest = build_controls(SamplingParams(temperature=0), vocab_size=model.vocab_size, seed=0)
        self._model_stepper = ModelStepper(model, OwnReader(translation, model.vocab_size), controls=likeliest)
        super().__init__(self._model_stepper, shape=shape, draw=Draw.FREE, shares_noise=False)
        self._translation = translation

    def observe(self, states: Sequence[Any], verdicts: Sequence[Verdict]) -> None:
        """Keep nodes that agree with the text; the accepted nodes of the target's tree do not determine them."""
        self._model_stepper.follow(states, [state.tree for state in states])
        for state in states:
            state.tree = EMPTY

    def grow(self, states: Sequence[Any], budgets: Sequence[Budget]) -> list[TokenTree]:
        spelled = []
        for state, tree, budget in zip(states, super().grow(states, budgets), budgets, strict=True):
            state.tree = tree
            spelled.append(self._spelled(state, tree, budget.within(self._shape.num_nodes, self._shape.depth)))
        return spelled

    def _spelled(self, state: SteppedSequence, tree: TokenTree, budget: Budget) -> TokenTree:
        """Return the best nodes of the tree of all paths; a node's score is the highest of its paths."""
        before = state.view.history.tokens[-CONTEXT_TOKENS:].tolist()
        inner = set(tree.parents)
        ways = [self._way(tree, tree.path(leaf), before) for leaf in range(len(tree)) if leaf not in inner]
        spelled = replace(merge(ways, [""] * len(ways)).tree, sources=())
        level = depths(spelled.parents)
        fitting = [node for node in range(len(spelled)) if level[node] <= budget.depth]
        fitting.sort(key=lambda node: (-spelled.scores[node], level[node], node))
        return prune(spelled, fitting[: budget.num_nodes])

    def _way(self, tree: TokenTree, nodes: Sequence[int], before: Sequence[int]) -> TokenTree:
        """Return one path in the target's tokens, each with the score of the node in which it ends."""
        lexicon, target = self._translation.own, self._translation.target
        data, ends = bytearray(), []
        eos_score = None
        for node in nodes:
            if tree.tokens[node] == lexicon.eos_id:
                eos_score = tree.scores[node]
                break
            data += lexicon.token_bytes(tree.tokens[node]) or b""
            ends.append((len(data), tree.scores[node]))
        ids: list[int] = []
        scores: list[float] = []
        place = 0
        for token_id in encode_continuation(target, before, bytes(data)):
            if token_id >= self._translation.target_size:
                return chain(ids, scores=scores)
            place += len(target.token_bytes(token_id) or b"")
            ids.append(token_id)
            scores.append(next((score for end, score in ends if end >= place), ends[-1][1]))
        if eos_score is not None and target.eos_id is not None and place == len(data):
            ids.append(target.eos_id)
            scores.append(eos_score)
        return chain(ids, scores=scores)
