"""Drafts of a beam search change the number of passes only: tokens, scores, ranks and steps are equal."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from beam_oracles import target
from draftree import LLM
from draftree.beam.drafting import MAX_DEPTH, BeamDrafter, Draft, ModelBeams, Pace, RunnersUp
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.beam.sequence import SequenceSearch
from draftree.beam.trie import TokenTrie
from draftree.core.errors import InvalidRequestError, NonFiniteLogitsError
from draftree.core.tree import TokenTree
from draftree.models.base import LanguageModel
from draftree.models.table import Table, TableLM, hashed, near

VOCAB = 9
PROMPTS = [[1, 3], [2, 5, 2, 5, 2], [4]]
ENDS = [0]


class RandomDrafts(BeamDrafter):
    """Random trees, with end tokens among them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
        return [[(beam, self._tree(depth)) for beam in text.live] for text, depth in depths.items()]

    def _tree(self, depth: int) -> TokenTree:
        count = self._random.randrange(0, 3 * depth)
        parents = [self._random.randrange(-1, node) if node else -1 for node in range(count)]
        return TokenTree(tuple(self._random.randrange(VOCAB) for _ in range(count)), tuple(parents))


def drafters(table: Any) -> dict[str, list[BeamDrafter]]:
    return {
        "oracle": [ModelBeams(TableLM(table))],
        "near": [ModelBeams(TableLM(near(table, 7, distance=0.3)))],
        "random": [RandomDrafts(5)],
        "runners-up": [RunnersUp()],
        "several": [RandomDrafts(6), RunnersUp(), ModelBeams(TableLM(near(table, 8, distance=0.1)))],
    }


def run(
    model: LanguageModel, params: BeamSearchParams, *drafters: BeamDrafter, **given: Any
) -> tuple[list[BeamResult], BeamSearch]:
    searcher = BeamSearch(model, end_ids=ENDS, drafters=drafters, **given)
    found = searcher.run(PROMPTS, [params] * len(PROMPTS))
    assert model.num_open == 0
    return found, searcher


def same(found: Sequence[BeamResult], expected: Sequence[BeamResult]) -> None:
    assert [one.hypotheses for one in found] == [one.hypotheses for one in expected]
    assert [one.num_steps for one in found] == [one.num_steps for one in expected]


STRATEGIES: dict[str, dict[str, Any]] = {
    "beam": {"beam_width": 4},
    "wide": {"beam_width": 12},
    "greedy": {"beam_width": 1},
    "walk": {"beam_width": 3, "eos_rule": "walk"},
    "any": {"beam_width": 3, "eos_rule": "any", "early_stopping": "never"},
    "fcfs": {"beam_width": 3, "early_stopping": "fcfs", "force_eos": "model_score"},
    "groups": {"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.4},
    "discounted groups": {
        "beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 0.4, "diversity_discount": 0.5,
    },
    "siblings": {"beam_width": 4, "sibling_penalty": 0.3},
    "phrases": {"beam_width": 5, "force_words_ids": [[4, 5], [7]]},
    "ordered phrases": {"beam_width": 5, "force_words_ids": [[4, 5], [7]], "ordered": True},
    "beam sampling": {"beam_width": 3, "sampling": "beam", "seed": 3},
    "independent": {"beam_width": 3, "sampling": "independent", "seed": 3, "top_k": 4},
    "trie": {"beam_width": 3, "allowed_trie": TokenTrie([[1, 2, 0], [1, 3, 4, 5], [6, 6, 6, 6, 0], [6, 6, 2]])},
    "function": {"beam_width": 3, "prefix_allowed_tokens_fn": lambda _, ids: [0, *range(ids[-1] % 3, VOCAB, 2)]},
    "ngrams": {"beam_width": 4, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "prefix": {"beam_width": 3, "prefix_token_ids": [4, 4, 2]},
    "soft prefix": {"beam_width": 3, "prefix_token_ids": [4, 4, 2], "prefix_bias_beta": 0.4},
    "unknown": {"beam_width": 3, "unk_token_id": 4, "unk_penalty": 0.7, "temperature": 0.6},
    "ensemble": {"beam_width": 3, "models": [TableLM(hashed(VOCAB, 31))]},
    "fusion": {"beam_width": 3, "lm_model": TableLM(hashed(VOCAB, 32)), "lm_weight": 0.4},
}  # fmt: skip


LENGTHS = [(0.0, 12), (1.0, 15), (2.0, 9)]
"""Penalties and limits of the length."""


@functools.cache
def undrafted(strategy: str, seed: int) -> tuple[Table, BeamSearchParams, list[BeamResult]]:
    """A table, and the results of a search in it without drafts."""
    table = functools.cache(hashed(VOCAB, seed, scale=1.5 + seed))
    penalty, limit = LENGTHS[seed]
    given = {"max_new_tokens": limit, "length_penalty": penalty, **STRATEGIES[strategy]}
    params = BeamSearchParams(num_return_sequences=given["beam_width"], **given)
    return table, params, run(TableLM(table), params)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["oracle", "near", "random", "runners-up", "several"])
def test_drafts_are_invisible(strategy: str, name: str) -> None:
    saved = 0
    for seed in range(len(LENGTHS)):
        table, params, expected = undrafted(strategy, seed)
        found, _ = run(TableLM(table), params, *drafters(table)[name])
        same(found, expected)
        saved += sum(one.num_steps - one.num_passes for one in found)
        assert all(one.num_passes <= one.num_steps for one in found)
        assert all(one.num_passes == one.num_steps and not one.num_drafted for one in expected)
        assert all(one.num_used <= one.num_drafted for one in found)
    if name in ("oracle", "near", "several") and strategy in ("beam", "wide", "greedy", "fcfs", "siblings", "fusion"):
        assert saved > 0


@pytest.mark.parametrize("early_stopping", [True, False, "never", "fcfs"])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_drafts_are_invisible_for_every_stop_rule_and_capacity(early_stopping: bool | str, width: int) -> None:
    for seed in range(2):
        table = functools.cache(hashed(VOCAB, 40 + seed, scale=2.0))
        params = BeamSearchParams(
            beam_width=width, num_return_sequences=width, max_new_tokens=25, early_stopping=early_stopping
        )
        expected, _ = run(TableLM(table), params)
        for capacity in (None, 1, 3, 20):
            drafter = ModelBeams(TableLM(near(table, 9, distance=0.2)))
            found, searcher = run(TableLM(table), params, drafter, capacity=capacity)
            same(found, expected)
            assert drafter.model.num_open == 0
            assert capacity != 1 or width == 1 or searcher.stats.most_slots > 1


def test_an_oracle_needs_few_passes() -> None:
    table = hashed(VOCAB, 3, scale=2.0)
    params = BeamSearchParams(beam_width=4, max_new_tokens=48)
    ignoring = BeamSearchParams(beam_width=4, max_new_tokens=48, ignore_eos=True)
    found, _ = run(TableLM(table), ignoring, ModelBeams(TableLM(table)))
    for one in found:
        assert one.num_steps == params.max_new_tokens
        assert one.passes_per_step < 0.3
        assert one.num_used <= one.num_drafted


def test_what_was_scored_is_kept() -> None:
    """Blocked by one missing beam, the next pass scores it and uses what the last one scored."""
    table = hashed(VOCAB, 5, scale=2.0)

    class Partly(BeamDrafter):
        """The two best beams of an oracle are drafted, in every second pass."""

        def __init__(self) -> None:
            self.inner, self.calls = ModelBeams(TableLM(table)), 0

        def start(self, text: SequenceSearch, **given: Any) -> None:
            self.inner.start(text, **given)

        def forests(self, text: SequenceSearch) -> Any:
            return self.inner.forests(text)

        def finish(self, text: SequenceSearch) -> None:
            self.inner.finish(text)

        def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
            self.calls += 1
            found = self.inner.propose(depths)
            return [own[:2] if self.calls % 2 else [] for own in found]

    params = BeamSearchParams(beam_width=4, num_return_sequences=4, max_new_tokens=40)
    model = TableLM(table)
    expected, _ = run(model, params)
    found, _ = run(model, params, Partly())
    same(found, expected)
    assert sum(one.num_passes for one in found) < sum(one.num_steps for one in found)


@pytest.mark.parametrize("name", ["unk_penalty", "lm_weight", "sibling_penalty", "diversity_penalty"])
def test_options_without_a_bound_are_refused(name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "unk_penalty": {"unk_token_id": 3},
        "lm_weight": {"lm_model": TableLM(hashed(VOCAB, 1))},
        "sibling_penalty": {},
        "diversity_penalty": {"num_beam_groups": 2},
    }
    params = BeamSearchParams(**{name: -0.5}, **needed[name])
    model = TableLM(hashed(VOCAB, 0))
    with pytest.raises(InvalidRequestError, match=name) as caught:
        BeamSearch(model, drafters=[RunnersUp()]).run([[1]], [params])
    assert caught.value.param == name
    BeamSearch(model).run([[1]], [params])
    assert model.num_open == 0


def test_models_with_chains_only_are_refused() -> None:
    for model, given in (
        (TableLM(hashed(VOCAB, 0), supports_trees=False), {}),
        (TableLM(hashed(VOCAB, 0)), {"models": [TableLM(hashed(VOCAB, 0), supports_trees=False)]}),
    ):
        with pytest.raises(InvalidRequestError, match="chains only"):
            BeamSearch(model, drafters=[RunnersUp()]).run([[1]], [BeamSearchParams(**given)])


def test_errors_close_the_slots_of_the_drafter() -> None:
    table = hashed(VOCAB, 0)
    model, drafter = TableLM(lambda ids: table(ids) * (float("nan") if len(ids) > 6 else 1.0)), TableLM(table)
    with pytest.raises(NonFiniteLogitsError):
        BeamSearch(model, drafters=[ModelBeams(drafter)]).run(PROMPTS, [BeamSearchParams(max_new_tokens=20)] * 3)
    assert model.num_open == 0 == drafter.num_open


def test_the_pace_grows_with_success_and_pauses_after_failures() -> None:
    pace = Pace()
    for _ in range(4):
        depth, pace.is_drafting = pace.next_depth(), True
        pace.note(depth + 1)
    assert pace.depth == MAX_DEPTH
    drafted = 0
    for _ in range(100):
        pace.is_drafting = pace.next_depth() > 0
        drafted += pace.is_drafting
        pace.note(1)
    assert pace.depth == 1
    assert 5 < drafted < 15
    pace.is_drafting = True
    pace.note(3)
    assert pace.next_depth() in (0, 3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_equal_on_models_through_torch(family: str, width: int) -> None:
    """Rows of trees of other sizes round in their last bits, so scores are close and not always equal."""
    model = target(family)
    params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=16, length_penalty=0.7)
    expected, _ = run(model, params)
    for drafter in (ModelBeams(target(family)), ModelBeams(target(family, 1)), RunnersUp()):
        found, _ = run(model, params, drafter)
        for one, two in zip(found, expected, strict=True):
            assert [text.tokens for text in one.hypotheses] == [text.tokens for text in two.hypotheses]
            assert [text.score for text in one.hypotheses] == pytest.approx(
                [text.score for text in two.hypotheses], abs=1e-4
            )
            assert one.num_steps == two.num_steps


@pytest.mark.parametrize("spec", ["ngram,min=1", "suffix", "suffix+ngram", "ngram+runners-up"])
def test_drafters_of_texts_serve_every_beam(spec: str) -> None:
    """A text that repeats itself is copied, so passes are saved."""

    def table(ids: tuple[int, ...]) -> Any:
        row = hashed(VOCAB, len(ids) % 4, scale=3.0)(())
        return row + hashed(VOCAB, 77, scale=0.2)(ids[-2:])

    llm = LLM(TableLM(table), "none")
    params = BeamSearchParams(beam_width=3, num_return_sequences=3, max_new_tokens=40)
    expected = llm.beam_search(PROMPTS, params)
    found = llm.beam_search(PROMPTS, params, draft=spec)
    same(found, expected)
    assert sum(one.num_passes for one in found) < 0.9 * sum(one.num_steps for one in found)
    assert sum(one.num_used for one in found) > 0


def test_loaded_models_draft() -> None:
    table = hashed(VOCAB, 4, scale=2.0)
    llm, small = LLM(TableLM(table), "none"), LLM(TableLM(near(table, 1, distance=0.1)), "none")
    params = BeamSearchParams(beam_width=3, num_return_sequences=3, max_new_tokens=30)
    expected = llm.beam_search(PROMPTS, params)
    for draft in (small, small.model):
        found = llm.beam_search(PROMPTS, params, draft=draft)
        same(found, expected)
        assert sum(one.num_passes for one in found) < sum(one.num_steps for one in found)
    same(llm.beam_search(PROMPTS, params, draft="none"), expected)


@pytest.mark.parametrize(
    ("draft", "part"),
    [
        ("nonsense", "nonsense"),
        ("prediction", "prediction"),
        ("lookahead,window=3", "target tokens"),
        ("early-exit,layers=1", "part of the model"),
        ("ngram,size=3", "size"),
        (TableLM(hashed(VOCAB + 1, 0)), "same vocabulary"),
        (TableLM(hashed(VOCAB, 0), supports_trees=False), "chains only"),
        (7, "int"),
    ],
)
def test_what_cannot_draft_for_beams_is_refused(draft: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        LLM(TableLM(hashed(VOCAB, 0)), "none").beam_search([1], draft=draft)
    assert caught.value.param == "draft"
