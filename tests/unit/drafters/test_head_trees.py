"""Trees that a head grows in one call, in C or as one static pass, are those of a call for each level."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.tree_builder.builder import TreeBuilder, parse_shape
from draftree.drafters.tree_builder.head_stepper import HeadStepper
from draftree.heads.calibration import Calibration
from draftree.heads.native_passes import NativePasses
from draftree.heads.passes import HeadPasses, TorchPasses
from draftree.models.torch.static import Shapes
from draftree.sampling.params import SamplingParams
from head_samples import head_config, random_head, random_parts
from head_texts import HeadText

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

SIZES: dict[str, Any] = {"hidden": 32, "target_hidden": 32, "head_dim": 16, "intermediate": 64, "max_length": 128}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [(7 * i + i // 5) % 40 for i in range(150)])
ROUNDS: tuple[tuple[int, ...], ...] = ((2, 0, 4), (0, 1, 1), (3, 4, 0), (1, 0, 2))
"""Accepted tokens of each text by round."""
CALIBRATION = Calibration(((1.3, 0.5), (0.8, -0.4)), ((0.6, 1.0), (1.1, -1.0)))
BUDGETS = [Budget(5, 5), Budget(3, 5), Budget(5, 1)]
WIDE = [Budget(20, 5), Budget(9, 3), Budget(2, 5)]
KINDS = ["float32", "bfloat16", "int8", "static"]
SAMPLED = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.6), SamplingParams())


class Drafts:
    """Three texts that draft together, with trees in one call or level by level."""

    def __init__(self, variant: str = "eagle3", kind: str = "float32", *, in_one_call: bool, **growth: Any) -> None:
        head = random_head(head_config(variant, **SIZES), scale=0.4)
        head.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        head.bind(random_parts(hidden=32))
        if kind == "static":
            self.passes: HeadPasses = TorchPasses(head, torch.device("cpu"), Shapes())
        else:
            self.passes = NativePasses(head, quantization="int8" if kind == "int8" else None)
        self.stepper = HeadStepper(self.passes)
        self.head, self.num_calls, self.in_one_call = head, 0, in_one_call
        shape = parse_shape(growth.pop("tree", "chain"), growth.pop("k", 5))
        options: dict[str, Any] = {"draw": Draw.FREE, "shares_noise": True, "calibration": CALIBRATION} | growth
        self.growth = TreeBuilder(self.stepper, shape=shape, **options)

    def grow(self, texts: list[HeadText], budgets: list[Budget]) -> list[TokenTree]:
        read_and_grow = HeadPasses.read_and_grow

        def counted(passes: HeadPasses, *args: Any) -> Any:
            self.num_calls += 1
            return read_and_grow(passes, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadPasses, "read_and_grow", counted)
            if not self.in_one_call:
                patch.setattr(type(self.passes), "grows", lambda *_: False)
            return self.growth.grow([text.state for text in texts], budgets)

    def run(self, params: tuple[SamplingParams, ...], budgets: list[Budget]) -> list[TokenTree]:
        """Return the trees of all rounds; one text is forked and one is drafted twice."""
        texts = [
            HeadText(self.stepper, self.head, list(tokens), params=own).read(len(tokens) // 2).read()
            for tokens, own in zip(PROMPTS, params, strict=True)
        ]
        found = []
        for accepted in ROUNDS:
            trees = self.grow(texts, budgets)
            found += trees
            for text, tree, count in zip(texts, trees, accepted, strict=True):
                path = range(min(count, len(tree)))
                text.write([*(tree.tokens[node] for node in path), 11], list(path))
            self.stepper.check_integrity([text.state for text in texts])
        found += self.grow(texts[:1], budgets[:1]) + self.grow(texts[:1], budgets[:1])
        self.stepper.keep([texts[0].state], [()])
        # it starts with a state that a call has stored
        other = [*texts[0].tokens[:-2], 9]
        read = len(other) - 1
        fork = HeadText(self.stepper, self.head, other, state=texts[0].state, read=read, params=params[0])
        return found + self.grow([fork], budgets[:1])


def both(
    params: tuple[SamplingParams, ...] = SAMPLED, budgets: list[Budget] | None = None, **options: Any
) -> tuple[list[TokenTree], int]:
    """Trees that are grown in one call as level by level, and the number of calls."""
    budgets = budgets or BUDGETS
    drafts = Drafts(in_one_call=True, **options)
    found = drafts.run(params, budgets)
    wanted = Drafts(in_one_call=False, **options).run(params, budgets)
    assert sum(map(len, wanted)) > 12, "something is drafted"
    one, other = ([(tree.tokens, tree.parents, tree.draw) for tree in trees] for trees in (found, wanted))
    assert one == other
    is_native = isinstance(drafts.passes, NativePasses)
    for tree, same in zip(found, wanted, strict=True):
        assert tree.scores == (same.scores if is_native else pytest.approx(same.scores, abs=1e-4))
    return found, drafts.num_calls


@pytest.mark.parametrize("shape", ["chain", "2-2-1"])
def test_sharper_drafts_are_those_of_a_lower_temperature(shape: str) -> None:
    budgets = [Budget(5, 3)] * 3
    options: dict[str, Any] = {"in_one_call": shape == "chain", "tree": shape, "k": 3 if shape == "chain" else None}
    sharp = Drafts(sharpness=1.25, **options).run(SAMPLED, budgets)
    own = tuple(SamplingParams(temperature=one.sampling.temperature / 1.25) for one in SAMPLED)
    assert sharp == Drafts(**options).run(own, budgets)
    assert sharp != Drafts(**options).run(SAMPLED, budgets)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["eagle3", "eagle3-full", "eagle3.1", "eagle3-before-fc"])
def test_chains_are_those_of_a_call_for_each_level(variant: str, kind: str) -> None:
    assert both(variant=variant, kind=kind)[1] == len(ROUNDS) + 3


def test_greedy_chains_without_shared_noise_or_calibration() -> None:
    params = (SamplingParams(temperature=0.0),) * 3
    for options in ({"shares_noise": False}, {"calibration": None}, {"shares_noise": False, "place": 2}):
        for own in (params, SAMPLED):
            assert both(own, **options)[1]


@pytest.mark.parametrize("kind", ["float32", "static"])
@pytest.mark.parametrize("least", [0.02, 0.3, 0.6, 0.99])
def test_a_minimum_confidence_ends_chains_at_the_same_tokens(least: float, kind: str) -> None:
    budgets = [Budget(5, 5, least), Budget(4, 4, least), Budget(5, 5)]
    trees, calls = both(budgets=budgets, kind=kind)
    assert calls
    lengths = {len(tree) for tree in trees[0::3]}
    assert least in (0.02, 0.99) or len(lengths) > 1, "some chains end early"


@pytest.mark.parametrize("kind", ["float32", "static"])
@pytest.mark.parametrize("least", [0.05, 0.3])
@pytest.mark.parametrize("tree", ["chain", "best-7", "3-2-1"])
def test_a_minimum_survival_of_measured_scores_ends_paths_at_the_same_nodes(tree: str, least: float, kind: str) -> None:
    budgets = [Budget(20, 5, min_survival=least), Budget(20, 5, 0.2, min_survival=least), Budget(20, 5)]
    assert both(budgets=budgets, tree=tree, kind=kind)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", ["best-1", "best-4", "best-12", "best-40", "1-2-1", "3-2-2", "4", "1-1-6-1"])
def test_trees_are_those_of_a_call_for_each_level(tree: str, kind: str) -> None:
    trees, calls = both(budgets=WIDE, tree=tree, kind=kind)
    assert calls == len(ROUNDS) + 3
    assert tree in ("best-1", "4") or any(len(set(one.parents)) < len(one.parents) for one in trees)


@pytest.mark.parametrize("kind", ["float32", "static"])
def test_trees_of_texts_without_noise_or_calibration(kind: str) -> None:
    params = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7), SamplingParams(temperature=0.0))
    for options in ({"shares_noise": False}, {"calibration": None}, {"variant": "eagle3-full"}):
        for tree in ("best-9", "2-2-2-1"):
            assert both(params, WIDE, tree=tree, kind=kind, **options)[1]


def test_trees_do_not_depend_on_those_beside_them() -> None:
    """One text alone, and with the others."""
    alone, beside = Drafts(in_one_call=True, tree="best-8"), Drafts(in_one_call=True, tree="best-8")
    texts = [HeadText(beside.stepper, beside.head, list(tokens)).read() for tokens in PROMPTS]
    own = HeadText(alone.stepper, alone.head, list(PROMPTS[2])).read()
    assert alone.grow([own], [Budget(8, 4)])[0] == beside.grow(texts, [Budget(8, 4)] * 3)[2]


def test_a_width_that_c_does_not_search_is_grown_level_by_level() -> None:
    assert not both(budgets=WIDE, tree="best-65")[1]


FALLBACKS: list[dict[str, Any]] = [
    {"params": (SamplingParams(top_k=7), *SAMPLED[1:])},
    {"params": (SamplingParams(temperature=0.9, top_p=0.6), *SAMPLED[1:])},
    {"params": (SamplingParams(repetition_penalty=1.3), *SAMPLED[1:])},
    {"params": (SamplingParams(logit_bias={7: 3.0}), *SAMPLED[1:])},
    {"params": (SamplingParams(allowed_token_ids=list(range(3, 30))), *SAMPLED[1:])},
    {"budgets": [Budget(5, 5, 0.1)] * 3, "calibration": None},
    {"draw": Draw.IID},
]


@pytest.mark.parametrize("options", FALLBACKS, ids=range(len(FALLBACKS)))
def test_what_c_does_not_cover_is_grown_level_by_level(options: dict[str, Any]) -> None:
    assert not both(**options)[1]


def test_a_small_tree_beside_a_large_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.models.kv.slots.MIN_LENGTH", 1)
    found = []
    for in_one_call in (True, False):
        drafts = Drafts(kind="static", tree="best-16", in_one_call=in_one_call)
        drafts.passes.pool.reserve(2, 132)  # exactly what the small tree needs
        texts = [HeadText(drafts.stepper, drafts.head, list(PROMPTS[2][:length])).read() for length in (5, 120)]
        found.append([(tree.tokens, tree.parents) for tree in drafts.grow(texts, [Budget(16, 5), Budget(4, 5)])])
    assert found[0] == found[1]


FILTERED = (
    SamplingParams(top_k=7),
    SamplingParams(temperature=0.9, top_p=0.6, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.8),
)


@pytest.mark.parametrize("tree", ["chain", "best-9", "2-2-1"])
@pytest.mark.parametrize("calibration", [None, CALIBRATION])
def test_static_trees_have_filters(tree: str, calibration: Calibration | None) -> None:
    for params in (FILTERED, (SamplingParams(temperature=0.0), FILTERED[1], SamplingParams())):
        assert both(params, WIDE, tree=tree, kind="static", calibration=calibration)[1] == len(ROUNDS) + 3


@pytest.mark.parametrize("kind", ["float32", "static"])
def test_no_token_follows_scores_that_are_not_numbers(kind: str) -> None:
    drafts = Drafts(in_one_call=True, kind=kind)
    text = HeadText(drafts.stepper, drafts.head, list(PROMPTS[0])).read()
    for piece in text.state.unread:
        piece.hidden.fill_(math.nan)
    assert [len(tree) for tree in drafts.grow([text], [Budget(5, 5)])] == [0]
    assert drafts.num_calls == 1
