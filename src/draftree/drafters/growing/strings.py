"""Trees grown in the draft model's tokens and converted to the target's through strings: `map=strings`.

Every path of the draft model's tree is a string. It is tokenized by the target's tokenizer as a continuation of the
text, and the paths are merged into one tree. The draft model's children are its most likely tokens: its tokens and the
target's are different events, so there is no shared noise and no distribution over the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.node_map import prune
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, depths
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.shapes import Shape
from draftree.drafters.growing.stepping import ModelStepper, SteppedSequence
from draftree.drafters.growing.translation import OwnReader, Translation
from draftree.drafters.growing.tree_growth import Growth
from draftree.models.base import LanguageModel
from draftree.sampling.controls import build_controls
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize.vocab_map import CONTEXT_TOKENS, encode_continuation


@dataclass(slots=True)
class SpelledSequence:
    """State of a sequence with drafts in other tokens. Mutated by `StringGrowth` only."""

    view: SequenceView
    stepped: SteppedSequence
    tree: TokenTree = EMPTY
    """Last tree, in the model's tokens."""


@dataclass(slots=True)
class _Trie:
    """Tree in the target's tokens, into which paths are merged."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], scores: Sequence[float]) -> None:
        node = ROOT
        for token, score in zip(tokens, scores, strict=True):
            found = self.known.get((node, token))
            if found is None:
                found = self.known[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(score)
            else:
                self.scores[found] = max(self.scores[found], score)
            node = found

    def tree(self, budget: Budget) -> TokenTree:
        """Return the best nodes; a node's score is at most its parent's."""
        tree = TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.scores))
        level = depths(tree.parents)
        order = sorted(
            (n for n in range(len(tree)) if level[n] <= budget.depth), key=lambda n: (-tree.scores[n], level[n], n)
        )
        return prune(tree, order[: budget.num_nodes])


class StringGrowth:
    """Variant of `Growth` for a model whose drafts are converted as strings.

    Args:
        model: the draft model.
        shape: shape of its trees.
        translation: mapping between the vocabularies.
    """

    def __init__(self, model: LanguageModel, *, shape: Shape, translation: Translation) -> None:
        reader = OwnReader(translation, model.vocab_size)
        self._growth = Growth(ModelStepper(model, reader), shape=shape, draw=Draw.FREE, shares_noise=False)
        self._shape = shape
        self._translation = translation
        self._likeliest = build_controls(SamplingParams(temperature=0), vocab_size=model.vocab_size, seed=0)

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the draft model's slots."""
        self._growth.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> SpelledSequence:
        """Return the state of a new sequence."""
        return SpelledSequence(view, self._growth.open(self._unsampled(view)))

    def close(self, state: SpelledSequence) -> None:
        """Free the slot."""
        self._growth.close(state.stepped)

    def fork(self, state: SpelledSequence, view: SequenceView) -> SpelledSequence:
        """Return the state of a new sequence with the common prefix of an open one."""
        return SpelledSequence(view, self._growth.fork(state.stepped, self._unsampled(view)))

    def detach(self, state: SpelledSequence) -> SpelledSequence | None:
        """Return the state to keep of a finished sequence; None if it was closed."""
        stepped = self._growth.detach(state.stepped)
        return None if stepped is None else SpelledSequence(state.view, stepped)

    def attach(self, state: SpelledSequence, view: SequenceView) -> SpelledSequence:
        """Do as `fork`, and consume the detached state."""
        return SpelledSequence(view, self._growth.attach(state.stepped, self._unsampled(view)))

    def _unsampled(self, view: SequenceView) -> SequenceView:
        return SequenceView(view.history, self._likeliest)

    def check_integrity(self, states: Sequence[SpelledSequence]) -> None:
        """Raise AssertionError if the slots of all open states contradict them."""
        self._growth.check_integrity([state.stepped for state in states])

    def read(self, states: Sequence[SpelledSequence], counts: Sequence[int]) -> None:
        """Prefill prompts along with the target, which has just read `counts` tokens of each."""
        self._growth.read([state.stepped for state in states], counts)

    def observe(self, states: Sequence[SpelledSequence], verdicts: Sequence[Verdict]) -> None:
        """Keep nodes that agree with the text; the accepted nodes of the target's tree do not determine them."""
        self._growth.follow([state.stepped for state in states], [state.tree for state in states])
        for state in states:
            state.tree = EMPTY

    def grow(self, states: Sequence[SpelledSequence], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Return a tree for every sequence, within its budget and the shape."""
        trees = self._growth.grow([state.stepped for state in states], budgets)
        said = []
        for state, tree, budget in zip(states, trees, budgets, strict=True):
            state.tree = tree
            said.append(self._said(state, tree, budget.within(self._shape.num_nodes, self._shape.depth)))
        return said

    def _said(self, state: SpelledSequence, tree: TokenTree, budget: Budget) -> TokenTree:
        before = state.view.history.tokens[-CONTEXT_TOKENS:].tolist()
        trie = _Trie()
        inner = set(tree.parents)
        for leaf in range(len(tree)):
            if leaf not in inner:
                trie.add(*self._way(tree, tree.path(leaf), before))
        return trie.tree(budget)

    def _way(self, tree: TokenTree, nodes: Sequence[int], before: Sequence[int]) -> tuple[list[int], list[float]]:
        """Return the target's tokens of one path, each with the score of the node in which it ends."""
        own, target = self._translation.own, self._translation.target
        data, ends = bytearray(), []
        eos_score = None
        for node in nodes:
            if tree.tokens[node] == own.eos_id:
                eos_score = tree.scores[node]
                break
            data += own.token_bytes(tree.tokens[node]) or b""
            ends.append((len(data), tree.scores[node]))
        ids: list[int] = []
        scores: list[float] = []
        place = 0
        for token_id in encode_continuation(target, before, bytes(data)):
            if token_id >= self._translation.target_size:
                return ids, scores
            place += len(target.token_bytes(token_id) or b"")
            ids.append(token_id)
            scores.append(next((score for end, score in ends if end >= place), ends[-1][1]))
        if eos_score is not None and target.eos_id is not None and place == len(data):
            ids.append(target.eos_id)
            scores.append(eos_score)
        return ids, scores
