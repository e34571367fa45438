"""Trees grown by draft models: shapes, windows of a short context, fitted widths, calibrated scores, forks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw, depths, path
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.builder import Shape, TreeBuilder, parse_shape
from draftree.drafters.tree_builder.model_stepper import ModelStepper, SameReader
from draftree.heads.calibration import Calibration
from draftree.models.base import LanguageModel, Pass, PassResult
from draftree.models.table import TableLM, hashed, listed
from families import VOCAB_SIZE, drafter_folder, fresh, prompts, target
from spelling import backend, tokenizer
from views import view_of


@pytest.mark.parametrize(
    ("text", "k", "widths", "num_nodes"),
    [
        ("chain", None, (1, 1, 1, 1, 1), 5),
        ("chain", 3, (1, 1, 1), 3),
        ("1-1-3-1-1-1-1-1", None, (1, 1, 3, 1, 1, 1, 1, 1), 20),
        ("2-2-1", 2, (2, 2), 6),
        ("iid-2-2-1", None, (2, 2, 1), 10),
        ("best-32", None, (32,) * 6, 32),
        ("best-2", 1, (2,), 2),
        ("best-64-8", 3, (64,) * 3, 64),
    ],
)
def test_widths_and_nodes(text: str, k: int | None, widths: tuple[int, ...], num_nodes: int) -> None:
    shape = parse_shape(text, k)
    assert (shape.widths, shape.num_nodes, shape.depth) == (widths, num_nodes, len(widths))


def test_a_limit_of_extended_nodes_shortens_passes() -> None:
    shape = parse_shape("best-64-8", 3)
    assert (shape.num_best, shape.num_extended, shape.num_fed) == (64, 8, 16)
    assert parse_shape("best-64", 3).num_fed == 128


def test_draws() -> None:
    assert parse_shape("chain", None).draws == {Draw.FREE, Draw.IID}
    assert parse_shape("2-2", None).draws == {Draw.FREE}
    assert parse_shape("iid-2", None).draws == {Draw.IID}
    assert parse_shape("wor-2", None).draws == {Draw.WITHOUT_REPLACEMENT}


@pytest.mark.parametrize(
    "text", ["", "tree", "2-", "0-1", "best", "best-0", "best-3-4-5", "iid-", "wor-x", "1--2", "1999"]
)
def test_malformed_shapes_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="best-32"):
        parse_shape(text, None)


def test_no_levels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 1024"):
        parse_shape("chain", 0)


VOCAB = 12


def view(tokens: list[int], *, temperature: float = 0.0) -> SequenceView:
    return view_of(tokens, vocab_size=VOCAB, temperature=temperature)


def growth(model: LanguageModel, shape: str = "chain", *, draw: Draw = Draw.FREE) -> TreeBuilder:
    stepper = ModelStepper(model, SameReader(model.vocab_size, VOCAB))
    return TreeBuilder(stepper, shape=parse_shape(shape, None), draw=draw, shares_noise=True)


def greedy(table: Any, context: list[int], count: int) -> list[int]:
    found = list(context)
    for _ in range(count):
        found.append(int(table(tuple(found)).argmax()))
    return found[len(context) :]


def test_a_chain_is_what_the_model_would_write() -> None:
    table = hashed(VOCAB, seed=1)
    one = growth(TableLM(table))
    state = one.stepper.open(view([3, 4]))
    (tree,) = one.grow([state], [Budget(5, 5)])
    assert list(tree.tokens) == greedy(table, [3, 4], 5)
    assert tree.parents == (-1, 0, 1, 2, 3)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_accepted_tokens_are_not_read_again(kept: tuple[int, ...]) -> None:
    table = hashed(VOCAB, seed=1)
    one = growth(TableLM(table))
    seen = view([3, 4])
    state = one.stepper.open(seen)
    (tree,) = one.grow([state], [Budget(5, 5)])
    seen.history.append([*(tree.tokens[node] for node in kept), 7])
    one.observe([state], [Verdict(kept, 7)])
    # the deepest node was never fed: its children were not needed
    assert state.covered == state.slot.length == 2 + min(len(kept), 4)
    (tree,) = one.grow([state], [Budget(3, 3)])
    assert list(tree.tokens) == greedy(table, seen.history.tokens.tolist(), 3)


def test_a_full_window_starts_again_from_its_younger_half() -> None:
    asked: list[int] = []
    table = hashed(VOCAB, seed=1)

    def noting(context: tuple[int, ...]) -> Tensor:
        asked.append(len(context))
        return table(context)

    one = growth(TableLM(noting, max_length=20))
    seen = view(list(range(8)))
    state = one.stepper.open(seen)
    lengths = []
    for _ in range(60):
        text = seen.history.tokens.tolist()
        (tree,) = one.grow([state], [Budget(4, 4)])
        known = state.slot.length
        window = text if known == len(text) else [text[0], *text[-(known - 1) :]]
        assert list(tree.tokens) == greedy(table, window, 4)
        lengths.append(known)
        seen.history.append([int(tree.tokens[0]), 5])
        one.observe([state], [Verdict((0,), 5)])
    assert max(asked) <= 20
    assert min(lengths[10:]) == 11
    one.stepper.close(state)


def test_a_prompt_longer_than_the_window_and_the_deepest_tree_that_fits() -> None:
    model = TableLM(hashed(VOCAB, seed=1), max_length=16)
    one = growth(model, "chain")
    state = one.stepper.open(view([1, 2, 3] * 40))
    (tree,) = one.grow([state], [Budget(100, 100)])
    assert len(tree) == 5
    deep = TreeBuilder(ModelStepper(model), shape=parse_shape("chain", 50), draw=Draw.FREE, shares_noise=True)
    (tree,) = deep.grow([deep.stepper.open(view([1, 2, 3] * 40))], [Budget(100, 100)])
    assert len(tree) == 16 - 8 - 2


def test_a_long_prompt_is_read_in_pieces() -> None:
    table = hashed(VOCAB, seed=1)
    text = [i % VOCAB for i in range(1300)]
    one = growth(TableLM(table))
    states = [one.stepper.open(view(tokens)) for tokens in (text, text[:3], text[:513])]
    trees = one.grow(states, [Budget(2, 2)] * 3)
    for tree, tokens in zip(trees, (text, text[:3], text[:513]), strict=True):
        assert list(tree.tokens) == greedy(table, tokens, 2)


@pytest.mark.parametrize("width", [VOCAB - 3, VOCAB + 5])
@pytest.mark.parametrize(("shape", "draw"), [("chain", Draw.FREE), ("chain", Draw.IID), ("best-6", Draw.FREE)])
def test_logits_of_another_width_are_fitted_to_the_target(width: int, shape: str, draw: Draw) -> None:
    # a wide model that prefers its surplus ids, a narrow one that reads ids it does not have
    base = hashed(width, seed=2)

    def table(context: tuple[int, ...]) -> Tensor:
        assert all(token < width for token in context)
        found = base(context).clone()
        found[VOCAB:] += 50.0
        return found

    one = growth(TableLM(table), shape, draw=draw)
    states = [one.stepper.open(view([3, VOCAB - 1, 4], temperature=t)) for t in (0.0, 1.0)]
    for tree in one.grow(states, [Budget(6, 6)] * 2):
        assert len(tree) >= 5
        assert max(tree.tokens) < min(width, VOCAB)
        if draw is Draw.IID:
            assert tree.distributions is not None
            assert tree.distributions.shape == (len(tree), VOCAB)
            assert torch.allclose(tree.distributions.sum(-1), torch.ones(len(tree), dtype=tree.distributions.dtype))


@pytest.mark.parametrize(("shape", "draw"), [("chain", Draw.FREE), ("2-2-2", Draw.FREE), ("iid-2-2", Draw.IID)])
def test_nan_scores_give_no_children(shape: str, draw: Draw) -> None:
    base = hashed(VOCAB, seed=1)

    def table(context: tuple[int, ...]) -> Tensor:
        return base(context) * (float("nan") if len(context) == 4 or context[:1] == (9,) else 1.0)

    one = growth(TableLM(table), shape, draw=draw)
    trees = one.grow([one.stepper.open(view(tokens)) for tokens in ([3, 4], [9, 4], [3])], [Budget(20, 5)] * 3)
    deepest = [max((len(tree.path(node)) for node in range(len(tree))), default=0) for tree in trees]
    assert deepest == [2, 0, min(3, len(parse_shape(shape, None).widths))]


def test_tokens_that_controls_forbid_are_not_drafted() -> None:
    table = hashed(VOCAB, seed=1)
    bias = {token: float("-inf") for token in range(2, VOCAB)}
    forbidding = view_of([0], vocab_size=VOCAB, temperature=0, logit_bias=bias)
    one = growth(TableLM(table), "best-8")
    (tree,) = one.grow([one.stepper.open(forbidding)], [Budget(8, 6)])
    assert set(tree.tokens) <= {0, 1}
    assert len(tree) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_best_tree_is_the_best_of_the_whole_tree(count: int, temperature: float) -> None:
    table = hashed(VOCAB, seed=6, scale=2.0)
    trees = []
    # the whole tree has more nodes than fit in a pass of the target, so no spec may name it
    for shape in (parse_shape(f"best-{count}", 3), Shape((VOCAB,) * 3, frozenset({Draw.FREE}))):
        one = TreeBuilder(ModelStepper(TableLM(table)), shape=shape, draw=Draw.FREE, shares_noise=True)
        trees.extend(one.grow([one.stepper.open(view([3, 4], temperature=temperature))], [Budget(2000, 3)]))
    found, whole = trees
    best = sorted(whole.scores, reverse=True)[:count]
    assert sorted(found.scores, reverse=True) == pytest.approx(best, abs=1e-6)


class Counted(TableLM):
    """A model that notes the rows of its passes."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.rows: list[int] = []

    def run(self, pass_: Pass) -> PassResult:
        self.rows.append(sum(len(job.tokens) for job in pass_.jobs))
        return super().run(pass_)


@pytest.mark.parametrize("extended", [1, 3])
def test_only_the_best_nodes_of_a_level_are_extended(extended: int) -> None:
    model = Counted(hashed(VOCAB, seed=6, scale=2.0))
    one = growth(model, f"best-20-{extended}")
    (tree,) = one.grow([one.stepper.open(view([3, 4]))], [Budget(20, 6)])
    assert model.rows == [2, *[extended] * 5]
    assert len(tree) == 20
    levels = depths(tree.parents)
    for level in range(1, 6):
        here = [node for node in range(len(tree)) if levels[node] == level]
        parents = {parent for parent in tree.parents if parent in here}
        assert len(parents) <= extended


@pytest.mark.parametrize(("draft", "temperature"), [("k=3", 0.0), ("tree=best-6", 1.0), ("tree=2-1-2,k=3", 1.0)])
def test_a_context_shorter_than_the_text_changes_nothing(tmp_path: Path, draft: str, temperature: float) -> None:
    folder = drafter_folder("llama", tmp_path, max_position_embeddings=32)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    batch = prompts(40, 2)
    plain = LLM(target("llama"), "none").generate(batch, params)
    done = LLM(target("llama"), f"model:{folder},{draft}", plan="fixed").generate(batch, params)
    assert [d.token_ids for d in done] == [d.token_ids for d in plain]
    assert all(0 < d.stats.accepted_tokens < d.stats.draft_tokens for d in done)


@pytest.mark.parametrize("verify", ["coupled", "token"])
@pytest.mark.parametrize("width", [VOCAB_SIZE - 8, VOCAB_SIZE + 32])
def test_models_of_one_tokenizer_may_differ_in_width(tmp_path: Path, width: int, verify: str) -> None:
    fresh("llama", vocab_size=width).save_pretrained(tmp_path)
    backend().save_pretrained(tmp_path)
    batch = [[90, 91, 92, 95], [3, 4, 5]]
    params = SamplingParams(max_tokens=16, temperature=0.0 if verify == "token" else 1.0, seed=2)
    plain = LLM(target("llama"), "none", tokenizer=tokenizer()).generate(batch, params)
    done = LLM(target("llama"), f"model:{tmp_path},k=3", verify=verify, plan="fixed", tokenizer=tokenizer()).generate(
        batch, params
    )
    assert [d.token_ids for d in done] == [d.token_ids for d in plain]
    assert sum(d.stats.draft_tokens for d in done) > 0


def test_without_tokenizers_another_width_is_refused(tmp_path: Path) -> None:
    fresh("llama", vocab_size=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"64 tokens and the target {VOCAB_SIZE}"):
        LLM(target("llama"), f"model:{tmp_path}")


def test_a_distribution_all_on_one_token_is_drafted_as_such() -> None:
    distribution = [0.0] * VOCAB
    distribution[5] = 1.0
    one = growth(TableLM(listed({}, distribution)), "2-2")
    (tree,) = one.grow([one.stepper.open(view([3], temperature=1.0))], [Budget(6, 2)])
    assert (tree.tokens, tree.parents) == ((5, 5), (-1, 0))


OWN = Calibration(((0.5, -0.3), (0.7, 0.2)), ((0.4, 0.1), (0.9, -0.5)))


def grown(
    calibration: Calibration | None,
    *,
    shape: str = "chain",
    temperature: float = 0.0,
    budget: Budget | None = None,
    shares_noise: bool = True,
    draw: Draw = Draw.FREE,
):  # type: ignore[no-untyped-def]
    stepper = ModelStepper(TableLM(hashed(VOCAB, seed=2)), SameReader(VOCAB, VOCAB))
    own = TreeBuilder(
        stepper, shape=parse_shape(shape, None), draw=draw, shares_noise=shares_noise, calibration=calibration
    )
    state = own.stepper.open(view([3, 4], temperature=temperature))
    (tree,) = own.grow([state], [Budget(6, 4) if budget is None else budget])
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "2-2-1"])
def test_scores_are_sums_of_mapped_scores(shape: str, temperature: float) -> None:
    raw, mapped = (grown(one, shape=shape, temperature=temperature) for one in (None, OWN))
    assert (raw.tokens, raw.parents) == (mapped.tokens, mapped.parents)
    for node, parent in enumerate(raw.parents):
        level = len(path(raw.parents, parent))
        share = raw.scores[node] - (raw.scores[parent] if parent >= 0 else 0.0)
        before = mapped.scores[parent] if parent >= 0 else 0.0
        wanted = OWN.log_probability(share, level, is_sampled=temperature > 0)
        assert mapped.scores[node] - before == pytest.approx(wanted, abs=1e-9)


def test_a_minimum_confidence_is_compared_with_the_mapped_probability() -> None:
    """A map that is never sure ends the chain after its first node."""
    unsure = Calibration(((0.01, -3.0),), ((0.01, -3.0),))
    budget = Budget(4, 4, min_confidence=0.2)
    assert len(grown(unsure, budget=budget)) == 1
    sure = Calibration(((0.01, 3.0),), ((0.01, 3.0),))
    assert len(grown(sure, budget=budget)) == 4


STEADY = Calibration(((0.0001, 1.0),), ((0.0001, 1.0),))
"""Every node has a probability of 0.73."""


@pytest.mark.parametrize("shape", ["chain", "2-1-1-1"])
@pytest.mark.parametrize(("least", "depth"), [(0.0, 4), (0.3, 4), (0.45, 3), (0.6, 2), (0.8, 1)])
def test_nodes_below_a_minimum_survival_have_no_children(shape: str, least: float, depth: int) -> None:
    tree = grown(STEADY, shape=shape, budget=Budget(30, 4, min_survival=least))
    assert max(depths(tree.parents)) == depth


def test_scores_that_are_not_calibrated_are_not_compared_with_a_minimum_survival() -> None:
    assert len(grown(None, budget=Budget(4, 4, min_survival=0.9))) == 4
    assert len(grown(STEADY, budget=Budget(4, 4, min_survival=0.9), shares_noise=False)) == 4


def test_draws_that_are_inspected_keep_their_scores() -> None:
    raw, mapped = (grown(one, shape="wor-2-1", temperature=0.8, draw=Draw.WITHOUT_REPLACEMENT) for one in (None, OWN))
    assert raw.scores == mapped.scores
    raw, mapped = (grown(one, temperature=0.8, shares_noise=False) for one in (None, OWN))
    assert raw.scores == mapped.scores


def test_the_best_nodes_are_those_of_the_mapped_scores() -> None:
    found = grown(OWN, shape="best-5")
    assert len(found) == 5
    assert all(math.isfinite(score) for score in found.scores)
    for node, parent in enumerate(found.parents):
        assert parent < 0 or found.scores[node] < found.scores[parent]


WINDOW = 24


def written(length: int) -> list[int]:
    return [(i * i + i // 5) % VOCAB for i in range(length)]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("rounds", [0, 7])
@pytest.mark.parametrize("length", [5, 20, 23, 24, 25, 60])
@pytest.mark.parametrize("added", [0, 1, 30])
def test_windows_are_those_of_the_text(length: int, added: int, rounds: int, is_cached: bool) -> None:
    model = TableLM(hashed(VOCAB, seed=1, scale=2.0), max_length=WINDOW)
    growth = TreeBuilder(ModelStepper(model), shape=parse_shape("chain", 3), draw=Draw.FREE, shares_noise=True)
    source_view = view(written(length))
    source = growth.stepper.open(source_view)
    growth.grow([source], [Budget(3, 3)])
    for token in range(rounds):
        source_view.history.append([token])
        growth.observe([source], [Verdict((), token)])
        growth.grow([source], [Budget(3, 3)])
    tokens = written(length) + [7] * added
    one, other = view(tokens), view(tokens)
    fresh = growth.stepper.open(other)
    if is_cached:
        source = growth.stepper.detach(source)
        state = growth.stepper.attach(source, one)
    else:
        state = growth.stepper.fork(source, one)
    growth.stepper.check_integrity([state, fresh, *([] if is_cached else [source])])
    for token in range(12):
        (tree,), (wanted,) = growth.grow([state], [Budget(3, 3)]), growth.grow([fresh], [Budget(3, 3)])
        assert tree == wanted
        for state_view, own in ((one, state), (other, fresh)):
            state_view.history.append([token % VOCAB])
            growth.observe([own], [Verdict((), token % VOCAB)])
