"""Window and pool of lookahead, round by round, compared with a plain reference with access to the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftree.core.tree import TokenTree, path
from draftree.core.types import Verdict
from draftree.drafters.base import SequenceView
from draftree.models.table import TableLM, hashed
from lookahead_samples import PLENTY, VOCAB, drafter_of, heads, view_of, ways
from observed import observed


class Reference:
    """Lookahead as the paper has it, plainly: lanes by the absolute position of their first token.

    Has access to the model. A lane's context is the text, the first tokens of all lanes up to its own, and its own
    rest.
    """

    def __init__(self, model: TableLM, view: SequenceView, *, window: int, n: int, candidates: int) -> None:
        self.model, self.view = model, view
        self.window, self.n, self.candidates = window, n, candidates
        self.lanes: dict[int, list[int]] = {}
        self.seen: list[tuple[int, ...]] = []
        self.read(0)

    def read(self, start: int) -> None:
        text = self.view.history.tokens.tolist()
        self.seen += [tuple(text[i : i + self.n]) for i in range(max(0, start), len(text) - self.n + 1)]

    def after(self, key: int) -> list[tuple[int, ...]]:
        found = [gram[1:] for gram in reversed(self.seen) if gram[0] == key]
        return list(dict.fromkeys(found))[: self.candidates]

    def pick(self, behind: Sequence[int]) -> int:
        context = [*self.view.history.tokens.tolist(), *behind]
        scores, temperature = self.model.logits(context), self.view.controls.temperature
        if temperature:
            scores = scores / temperature + self.view.controls.noise.gumbel(len(context), torch.arange(VOCAB))
        return int(scores.argmax())

    def paths(self) -> list[list[int]]:
        root = len(self.view.history) - 1
        stems = [self.lanes[root + 1 + i][0] for i in range(self.window)]
        return [[*stems[:i], *self.lanes[root + 1 + i]] for i in range(self.window)]

    def step(self, written: Sequence[int]) -> None:
        root = len(self.view.history) - 1
        picks = [self.pick(way) for way in self.paths()]
        lanes = {}
        for start, pick in zip(range(root + 1, root + 1 + self.window), picks, strict=True):
            lane = [*self.lanes[start], pick]
            if len(lane) == self.n:
                self.seen.append(tuple(lane))
                lanes[start + 1] = lane[1:]
            else:
                lanes[start] = lane
        before = len(self.view.history)
        self.view.history.append(written)
        self.read(before - self.n + 1)
        root = len(self.view.history) - 1
        self.lanes = {start: lane for start, lane in lanes.items() if root < start <= root + self.window}


def picks_of(model: TableLM, reference: Reference, tree: TokenTree) -> list[int]:
    nodes = range(-1, len(tree))
    return [reference.pick([tree.tokens[n] for n in path(tree.parents, node)]) for node in nodes]


def walked(tree: TokenTree, picks: Sequence[int]) -> Verdict:
    way: list[int] = []
    node: int | None = -1
    while node is not None:
        end = node
        node = next((c for c in tree.children()[end + 1] if tree.tokens[c] == picks[end + 1]), None)
        way += [] if node is None else [node]
    return Verdict(tuple(way), picks[end + 1], tuple(picks))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("window", "n", "candidates"), [(1, 2, 1), (4, 2, 2), (3, 3, 2), (5, 4, 3), (8, 5, 1)])
def test_window_and_pool_are_the_plain_references(window: int, n: int, candidates: int, temperature: float) -> None:
    model = TableLM(hashed(VOCAB, seed=4, scale=2.0), order=1)
    drafter = drafter_of(window=window, n=n, candidates=candidates)
    view = view_of([1, 5, 2, 5, 3], temperature=temperature)
    state = drafter.open(view)
    reference = Reference(model, view, window=window, n=n, candidates=candidates)
    num_checked = num_ahead = 0
    for _ in range(40):
        tree = drafter.draft_one(state, PLENTY)
        root = len(view.history) - 1
        for column, lane in enumerate(zip(*state.rows, strict=True)):
            start = root + 1 + column
            num_checked += start in reference.lanes
            # places that the text has overrun are filled by chance: the reference takes them as they are
            assert reference.lanes.setdefault(start, list(lane)) == list(lane)
        last = int(view.history.tokens[-1])
        assert state.pool.after(last) == reference.after(last)
        assert ways(tree) == heads([*reference.after(last), *reference.paths()])
        verdict = walked(tree, picks_of(model, reference, tree))
        num_ahead += len(verdict.path)
        reference.step([*(tree.tokens[node] for node in verdict.path), verdict.bonus])
        drafter.observe(observed([state], [tree], [verdict]))
    assert num_checked > 10 or window == 1, "a window of one is overrun in every round"
    assert num_ahead, "a window that is never right tests little"
