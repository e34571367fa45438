"""Drafters without a model as proposers of vLLM: `method="custom_class"` of its speculative configuration.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
        "model": "draftree.dropin.vllm_proposer.SuffixProposer"}'

vLLM verifies chains, so the best path of a drafted tree is proposed. It passes rows of token ids without the ids of
requests, and moves rows between steps. A row is therefore recognized by its tokens: it continues the text that was seen
in the same row, or in another one, or it begins a new text. This module does not import vLLM; its interface is
documented there as experimental.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch

from draftree.build import build_parts, choose_methods
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.core.tree import EMPTY, TokenTree, depths, follow
from draftree.core.types import Budget, Verdict
from draftree.drafters import drafts
from draftree.drafters.base import Observation, SequenceView
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

DRAFT_VARIABLE = "DRAFTREE_VLLM_DRAFT"
"""Environment variable with the spec of `Proposer`, such as `suffix,max=32+ngram`."""
MOST_UNSEEN = 64  # steps after which a text that is in no row has ended; a preempted one that returns begins anew


@dataclass(slots=True)
class _Text:
    """A text in a row. Mutated by `Proposer`."""

    history: History
    state: Any
    tree: TokenTree = EMPTY
    unseen: int = 0


class Proposer:
    """Proposer with the drafter that the environment variable `DRAFTREE_VLLM_DRAFT` names; `suffix` without it."""

    DRAFT: ClassVar[str | None] = None

    def __init__(self, vllm_config: Any) -> None:
        spec = self.DRAFT or os.environ.get(DRAFT_VARIABLE) or "suffix"
        methods = choose_methods(spec, "coupled", "fixed" if drafts(spec) else None)
        traits = methods.traits
        if traits.runs_model or traits.features or traits.wants_picks or not methods.drafters:
            raise ConfigurationError(
                f"drafter '{spec}' cannot draft in vLLM: choose drafters without a model, such as suffix+ngram"
            )
        self._depth = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)
        self._nodes = traits.nodes
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        target = LoadedModel(_Vocabulary(self._vocab_size, self._longest), None, (), "vLLM")
        self._drafter = build_parts(methods, target, None).drafters[0].drafter
        self._texts: dict[int, _Text] = {}  # texts by the row in which they were last
        self._unseen: list[_Text] = []

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafted tokens of every row; none for rows whose prompt is not read yet.

        Args:
            sampled_token_ids: for each row the tokens that the last step wrote.
            num_tokens_no_spec: for each row the number of its tokens, without drafted ones.
            token_ids_cpu: token ids of shape (rows, longest text).
            slot_mappings: not used.
        """
        known = [*self._texts.values(), *self._unseen]
        texts: dict[int, _Text] = {}
        for row, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[row])
            if len(sampled) and count < self._longest:
                tokens = np.asarray(token_ids_cpu[row, :count], dtype=np.int64)
                texts[row] = self._text_of(row, tokens, len(sampled), known)
        self._keep_unseen(known)
        self._texts = texts
        budgets = [self._budget(text) for text in texts.values()]
        trees = self._drafter.draft([text.state for text in texts.values()], budgets)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for (row, text), tree in zip(texts.items(), trees, strict=True):
            text.tree = tree
            drafts[row] = best_path(tree, self._depth)
        return drafts

    def _budget(self, text: _Text) -> Budget:
        room = max(0, min(self._depth, self._longest - len(text.history) - 1))
        return Budget(self._nodes if room else 0, room)

    def _text_of(self, row: int, tokens: np.ndarray, num_new: int, known: list[_Text]) -> _Text:
        """Return the text of a row with all of its tokens, and take it from the known ones."""
        last = self._texts.get(row)
        candidates = [last, *known] if last is not None and last in known else known
        text = next(
            (each for each in candidates if np.array_equal(each.history.tokens, tokens[: len(each.history)])), None
        )
        if text is None:
            history = History(tokens[: max(1, len(tokens) - num_new)].tolist())
            controls = build_controls(SamplingParams(temperature=0.0), vocab_size=self._vocab_size, seed=0)
            text = _Text(history, self._drafter.open(SequenceView(history, controls)))
        else:
            known[:] = [other for other in known if other is not text]
        text.unseen = 0
        written = tokens[len(text.history) :].tolist()
        if written:
            text.history.append(written)
            path = follow(text.tree, written[:-1])
            verdict = Verdict(tuple(path), written[len(path)])
            self._drafter.observe([Observation(text.state, len(written), text.tree, verdict)])
        return text

    def _keep_unseen(self, known: Sequence[_Text]) -> None:
        """Close texts that were in no row for many steps; drafters learn from them."""
        self._unseen = []
        for text in known:
            text.unseen += 1
            if text.unseen > MOST_UNSEEN:
                self._drafter.close(text.state)
            else:
                self._unseen.append(text)


@final
class SuffixProposer(Proposer):
    """Proposer with the drafter `suffix`: earlier text of the request and earlier answers."""

    DRAFT = "suffix"


@final
class MergedProposer(Proposer):
    """Proposer with `suffix` and `ngram`, merged."""

    DRAFT = "suffix+ngram"


def best_path(tree: TokenTree, depth: int) -> list[int]:
    """Return the tokens on the way from the root along the best children, at most `depth`."""
    if not tree.scores:
        last = max(range(len(tree)), key=lambda node: depths(tree.parents)[node], default=-1)
        return [tree.tokens[node] for node in tree.path(last)][:depth]
    children = tree.children()
    tokens = list[int]()
    node = -1
    while children[node + 1] and len(tokens) < depth:
        node = max(children[node + 1], key=lambda child: (tree.scores[child], -child))
        tokens.append(tree.tokens[node])
    return tokens


@final
class _Vocabulary(LanguageModel):
    """The vocabulary of vLLM's model, which runs elsewhere."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        self.vocab_size, self.max_length, self.supports_trees = vocab_size, max_length, True
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing: there are no slots."""

    def open(self) -> Slot:
        raise UnsupportedModelError("the model runs in vLLM: choose a drafter without a model")

    def run(self, pass_: Pass) -> PassResult:
        raise UnsupportedModelError("the model runs in vLLM: choose a drafter without a model")

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        raise UnsupportedModelError("the model runs in vLLM: choose a drafter without a model")
