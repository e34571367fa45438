"""Lookahead: drafts as those of a plain reference, budgets, options, statistics, unchanged texts, and learning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree, path
from draftree.core.types import Budget, RoundRecord, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.lookahead import Comb, LookaheadDrafter
from draftree.models.table import TableLM, hashed
from draftree.verifiers import VERIFIERS
from observed import observed
from views import context_of, view_of

PLENTY = Budget(256, 64)
VOCAB = 12


def sequence_view(tokens: Sequence[int], *, temperature: float = 0.0) -> SequenceView:
    return view_of(tokens, vocab_size=VOCAB, temperature=temperature)


def drafter_of(**options: int) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadDrafter.Config(**options), context_of(VOCAB, shares_noise=True))


def ways(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in path(tree.parents, node)) for node in range(len(tree))}


def heads(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(way[:length]) for way in paths for length in range(1, len(way) + 1)}


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
    view = sequence_view([1, 5, 2, 5, 3], temperature=temperature)
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


def test_unobserved_rounds_are_caught_up() -> None:
    told, untold = drafter_of(window=0, n=3), drafter_of(window=0, n=3)
    views = [sequence_view([1, 2, 3, 1, 2]) for _ in range(2)]
    one, other = told.open(views[0]), untold.open(views[1])
    for token in (4, 1, 2):
        for view in views:
            view.history.append([token])
        told.observe(observed([one], [TokenTree((), ())], [Verdict((), token)]))
    assert told.draft_one(one, PLENTY) == untold.draft_one(other, PLENTY)
    assert ways(told.draft_one(one, PLENTY)) == heads([(4, 1), (3, 1)])


def test_a_small_budget_cuts_the_window_first() -> None:
    drafter = drafter_of(window=4, n=3, candidates=2)
    state = drafter.open(sequence_view([1, 2, 3, 1, 4, 5, 1]))
    for count in range(5):
        tree = drafter.draft_one(state, Budget(count, 9))
        assert tree.tokens == (4, 5, 2, 3)[:count]
        assert tree.parents == (-1, 0, -1, 2)[:count]
    assert len(drafter.draft_one(state, PLENTY)) > 4


@pytest.mark.parametrize(
    ("budget", "ends", "size"),
    [
        (Budget(6, 4), [1, 3, 5], 6),
        (Budget(5, 4), [1, 3, None], 4),
        (Budget(3, 9), [1, None, None], 2),
        (Budget(1, 9), [None, None, None], 0),
        (Budget(9, 3), [1, 3, None], 4),
        (Budget(9, 1), [None, None, None], 0),
    ],
)
def test_lanes_are_complete_or_absent(budget: Budget, ends: list[int | None], size: int) -> None:
    comb = Comb(budget)
    assert comb.hang([[1, 2, 3], [4, 5, 6]], "window") == ends
    assert len(comb.tree()) == size


def test_random_tokens_of_the_text_are_guessed_only_where_the_pool_has_nothing() -> None:
    drafter = drafter_of(window=0, n=3, candidates=2, random=4)
    tree = drafter.draft_one(drafter.open(sequence_view([1, 2, 3, 1, 4, 5])), PLENTY)
    assert set(tree.parents) == {-1}
    assert set(tree.tokens) <= {1, 2, 3, 4, 5}
    assert 1 < len(set(tree.tokens)) == len(tree) <= 4
    assert set(tree.sources) == {("random",)}
    known = drafter.draft_one(drafter.open(sequence_view([1, 2, 3, 1])), PLENTY)
    assert set(known.sources) == {("pool",)}
    assert not len(drafter_of(window=0).draft_one(drafter_of(window=0).open(sequence_view([1, 2])), PLENTY))


def test_its_size_matches_the_docstring() -> None:
    config = LookaheadDrafter.Config(window=7, n=5, candidates=6)
    assert LookaheadDrafter.describe(config).nodes == 7 + 7 * 3 + 6 * 4
    assert LookaheadDrafter.describe(config).depth == 7 + 3
    assert LookaheadDrafter.describe(LookaheadDrafter.Config(window=1)).wants_picks
    alone = LookaheadDrafter.describe(LookaheadDrafter.Config(window=0))
    assert not alone.wants_picks, "the pool alone needs none"


CYCLE = 40


def cyclic() -> TableLM:
    """The token after x is x + 1, independent of the context."""

    def table(context: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(CYCLE, dtype=torch.float64)
        logits[((context[-1] if context else 0) + 1) % CYCLE] = 50.0
        return logits

    return TableLM(table, order=1)


SHUFFLED = [7 * i % CYCLE for i in range(CYCLE)]
"""Every token once, none before its successor: a prompt that shows no step of the cycle."""


def cycle_rounds(spec: str | None, temperature: float) -> list[RoundRecord]:
    records: list[RoundRecord] = []
    llm = LLM(cyclic(), spec, plan="fixed", on_round=records.append)
    (done,) = llm.generate([SHUFFLED], SamplingParams(max_tokens=4 * CYCLE, temperature=temperature, seed=2))
    assert list(done.token_ids) == [(SHUFFLED[-1] + 1 + i) % CYCLE for i in range(4 * CYCLE)]
    return records


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_cycle_the_window_learns_ahead_of_the_text(temperature: float) -> None:
    """The pool alone must wait until the text has gone round once; a lane's n-grams are true after n - 1 rounds."""
    n = 4
    pool = cycle_rounds(f"lookahead,window=0,n={n}", temperature)
    window = cycle_rounds(f"lookahead,window=16,n={n}", temperature)
    written = [[row.num_written for record in records for row in record.sequences] for records in (pool, window)]
    first_lap = list(itertools.takewhile(lambda total: total < CYCLE, itertools.accumulate(written[0])))
    assert len(first_lap) >= CYCLE - n, "nothing was to be known in the first lap"
    assert min(written[0][CYCLE + n : -1]) >= n
    assert len(pool) <= CYCLE + n + 3 * CYCLE / n + 1
    # sixteen lanes cover the cycle in less than a lap; from then on every round writes a whole n-gram
    assert len(window) < 0.8 * len(pool)
    assert min(written[1][CYCLE // 2 : -1]) >= n


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("verify", ["coupled", "match"])
@pytest.mark.parametrize(
    "spec",
    [
        "lookahead,window=0",
        "lookahead,window=0,random=3",
        "lookahead,window=6,n=4",
        "lookahead,window=9,n=2,candidates=1",
        "ngram,min=1+lookahead,window=4,n=3",
        "lookahead,window=4,n=3+ngram,min=1",
    ],
)
def test_the_text_is_plain_decodings_alone_and_in_a_batch(spec: str, verify: str, temperature: float) -> None:
    model = TableLM(hashed(VOCAB, seed=6, scale=3.0), order=1)
    prompts = [[1, 2, 3, 1], [4], [5, 5, 5, 5, 5, 5], [7, 8, 9, 7, 8]]
    params = [SamplingParams(max_tokens=m, temperature=temperature, seed=i) for i, m in enumerate((30, 12, 45, 3))]
    plain = [done.token_ids for done in LLM(model, "none").generate(prompts, params)]
    llm = LLM(model, spec, verify=verify, plan="fixed")
    done = llm.generate(prompts, params)
    assert [one.token_ids for one in done] == plain
    assert sum(one.stats.accepted_tokens for one in done) > 10
    alone = [llm.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in alone] == plain
    assert [one.stats.rounds for one in alone] == [one.stats.rounds for one in done], "company costs no acceptance"


def test_statistics_distinguish_pool_window_and_random() -> None:
    model = TableLM(hashed(VOCAB, seed=6, scale=3.0), order=1)

    def stats(spec: str) -> Any:
        return (
            LLM(model, spec, plan="fixed")
            .generate([[1, 2]], SamplingParams(max_tokens=60, temperature=0.5, seed=3))[0]
            .stats
        )

    both = stats("lookahead,window=5,n=3")
    assert set(both.drafted_by_source) == {"pool", "window"}
    assert both.accepted_by_source["pool"] > 0
    assert sum(both.accepted_by_source.values()) >= both.accepted_tokens
    assert both.acceptance_length == pytest.approx(60 / both.rounds)
    assert set(stats("lookahead,window=0,random=2").drafted_by_source) == {"pool", "random"}
    merged = stats("ngram,min=1+lookahead,window=0")
    assert set(merged.drafted_by_source) == {"ngram,min=1", "lookahead,window=0/pool"}


@pytest.mark.parametrize("verify", sorted(set(VERIFIERS.names()) - {"coupled", "match", "soft", "typical"}))
def test_rules_that_rely_on_draws_refuse_it(verify: str) -> None:
    with pytest.raises(ConfigurationError, match=verify):
        LLM("no-such-model", "lookahead", verify=verify)


def test_a_target_that_scores_chains_only_takes_one_candidate() -> None:
    model = TableLM(hashed(VOCAB, seed=6), order=1, supports_trees=False)
    with pytest.raises(ConfigurationError, match="chains only"):
        LLM(model, "lookahead,window=4")
    params = SamplingParams(max_tokens=20, temperature=0)
    chains = LLM(model, "lookahead,window=0,candidates=1").generate([[1, 2]], params)[0]
    assert chains.token_ids == LLM(model, "none").generate([[1, 2]], params)[0].token_ids
