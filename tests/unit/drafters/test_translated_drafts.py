"""Drafters with another tokenizer, over tables that depend on the text and not on its split into tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, VocabularyMismatchError
from draftree.core.tree import Draw, TokenTree, depths, is_chain
from draftree.core.types import Budget, Verdict
from draftree.drafters import DRAFTERS
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.drafters.tree_builder.vocabularies import translation_between
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import Lexicon, lexicon_of
from draftree.text.tokenizer import Tokenizer
from families import VOCAB_SIZE
from observed import observed
from spelling import tokenizer as spelled
from text_backends import byte_fallback, word_piece

LIKING = hashed(VOCAB_SIZE, seed=1, scale=2.0)
BUDGETS = [Budget(0, 0), Budget(1, 1), Budget(3, 2), Budget(60, 60)]
SPECS = ["model:any,map=tokens", "model:any,map=strings", "model:any,map=tokens,tree=best-9,k=4"]
SPECS += ["model:any,map=strings,tree=best-9,k=4", "model:any,map=strings,tree=2-2-1", "model:any,map=auto"]


@functools.cache
def other() -> Tokenizer:
    return Tokenizer(byte_fallback(), name="other")


@functools.cache
def lexicons() -> tuple[Lexicon, Lexicon]:
    return lexicon_of(spelled()), lexicon_of(other())


def said_distribution(said: bytes) -> Tensor:
    """The distribution after a text, over the target's tokens; depends only on its last bytes."""
    return LIKING(tuple(said[-3:]))


def target_table(context: tuple[int, ...]) -> Tensor:
    return said_distribution(lexicons()[0].text_of(context))


def draft_table(context: tuple[int, ...]) -> Tensor:
    """The same preferences in the drafter's tokens; tokens without a counterpart get none."""
    target, own = lexicons()
    distribution, found = (
        said_distribution(own.text_of(context)),
        torch.full((len(own.bytes_of),), -30.0, dtype=torch.float64),
    )
    for data, token in own.ids_of.items():
        if data in target.ids_of:
            found[token] = distribution[target.ids_of[data]]
    found[own.eos_id] = distribution[target.eos_id]
    return found


class Rig:
    def __init__(self, spec: str, draw: Draw = Draw.FREE, *, shares_noise: bool = True, max_length: int = 4096) -> None:
        cls, config = DRAFTERS.configure(DRAFTERS.parse(spec)[0])
        self.model = TableLM(draft_table, max_length=max_length)
        self.target = TableLM(target_table)
        load = lambda name: LoadedDraftModel(self.model, other(), name)  # noqa: E731
        self.drafter = cls(config, DraftContext(self.target, spelled(), draw, shares_noise, load))
        self.views: list[SequenceView] = []
        self.states: list[object] = []

    def open(self, texts: Sequence[str | list[int]], temperature: float) -> Rig:
        for seed, text in enumerate(texts):
            ids = spelled().encode(text) if isinstance(text, str) else text
            controls = build_controls(SamplingParams(temperature=temperature), vocab_size=VOCAB_SIZE, seed=seed)
            self.views.append(SequenceView(History(ids), controls))
            self.states.append(self.drafter.open(self.views[-1]))
        return self

    def picks(self, view: SequenceView, path: list[int]) -> int:
        row = target_table((*view.history.tokens.tolist(), *path))[None]
        return Distributions(TensorLogits(row), [DistributionRows(view.history, view.controls, [path])]).picks()[0]

    def write(self, trees: Sequence[TokenTree], picks: Sequence[int]) -> None:
        """Every text continues with its pick, drafted or not."""
        verdicts = []
        for view, tree, pick in zip(self.views, trees, picks, strict=True):
            right = len(tree) > 0 and tree.tokens[0] == pick
            view.history.append([pick, 7] if right else [pick])
            verdicts.append(Verdict((0,) if right else (), 7 if right else pick))
        self.drafter.observe(observed(self.states, trees, verdicts))

    def round(self, budget: Budget) -> tuple[int, int]:
        """Draft, walk as the target picks, write; returns accepted and drafted nodes."""
        trees = self.drafter.draft(self.states, [budget] * len(self.states))
        verdicts = []
        for view, tree in zip(self.views, trees, strict=True):
            way: list[int] = []
            node, path = -1, []
            while True:
                pick = self.picks(view, path)
                node = next((c for c in tree.children()[node + 1] if tree.tokens[c] == pick), -1)
                if node == -1:
                    break
                way.append(node)
                path.append(pick)
            verdicts.append(Verdict(tuple(way), pick))
            view.history.append([*path, pick])
        self.drafter.observe(observed(self.states, trees, verdicts))
        return sum(len(v.path) for v in verdicts), sum(map(len, trees))


TEXTS = ["the cab and a bank", "日本 in é", "a 😀", [2], [1, 5]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_trees_keep_to_their_budgets_and_slots_are_freed(spec: str, temperature: float) -> None:
    cls, config = DRAFTERS.configure(DRAFTERS.parse(spec)[0])
    for budget in BUDGETS:
        rig = Rig(spec).open(TEXTS, temperature)
        for tree in rig.drafter.draft(rig.states, [budget] * len(TEXTS)):
            assert len(tree) <= min(budget.num_nodes, cls.describe(config).nodes)
            assert max(depths(tree.parents), default=0) <= min(budget.depth, cls.describe(config).depth)
            assert all(0 <= token < VOCAB_SIZE for token in tree.tokens)
            assert cls.describe(config).branches or is_chain(tree.parents)
            children = [[tree.tokens[child] for child in siblings] for siblings in tree.children()]
            assert all(len(set(tokens)) == len(tokens) for tokens in children)
        for state in rig.states:
            rig.drafter.close(state)
        assert rig.model.num_open == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_by_tokens_an_identical_drafter_is_right_wherever_it_has_the_token(temperature: float) -> None:
    """Noise goes by the target's ids: at temperature 1 independent guesses would fail in most rounds."""
    target, own = lexicons()
    sayable = {target.ids_of[data] for data in own.ids_of if data in target.ids_of}
    rates = []
    for shares_noise in (True, False):
        rig = Rig("model:any,map=tokens", shares_noise=shares_noise).open(TEXTS[:3], temperature)
        hits = []
        for _ in range(20):
            trees = rig.drafter.draft(rig.states, [Budget(5, 5)] * 3)
            picks = [rig.picks(view, []) for view in rig.views]
            hits += [t.tokens[0] == pick for t, pick in zip(trees, picks, strict=True) if pick in sayable]
            rig.write(trees, picks)
        rates.append(sum(hits) / len(hits))
        assert len(hits) > 20
    assert rates[0] > 0.9
    assert temperature == 0 or rates[1] < 0.6


@pytest.mark.parametrize("tree", ["chain", "best-12"])
def test_by_strings_an_identical_drafter_is_often_right(tree: str) -> None:
    rig = Rig(f"model:any,map=strings,tree={tree}").open(TEXTS, 0.0)
    counts = [rig.round(Budget(12, 5)) for _ in range(12)]
    assert sum(a for a, _ in counts) > 40


@pytest.mark.parametrize("spec", SPECS)
def test_drafts_depend_on_what_is_written_alone(spec: str) -> None:
    """A slot that was rewound, in a batch, drafts as one that reads the text for the first time."""
    rig = Rig(spec).open(TEXTS, 1.0)
    for budget in (Budget(6, 4), Budget(2, 2), Budget(0, 0), Budget(9, 3)):
        rig.round(budget)
    trees = rig.drafter.draft(rig.states, [Budget(9, 4)] * len(TEXTS))
    for seed, (view, tree) in enumerate(zip(rig.views, trees, strict=True)):
        fresh = Rig(spec)
        alone = SequenceView(History(view.history.tokens.tolist()), rig.views[seed].controls)
        (again,) = fresh.drafter.draft([fresh.drafter.open(alone)], [Budget(9, 4)])
        assert (again.tokens, again.parents) == (tree.tokens, tree.parents)


@pytest.mark.parametrize("spec", SPECS)
def test_a_short_context_slides(spec: str) -> None:
    rig = Rig(spec, max_length=24).open([TEXTS[0], [2] * 30, [1, 5] * 11], 1.0)
    for _ in range(10):
        rig.round(Budget(4, 4))
    assert all(len(view.history) > 24 for view in rig.views)


@pytest.mark.parametrize(("spec", "draw"), [("chain", Draw.IID), ("iid-2-2", Draw.IID)])
def test_by_tokens_a_draft_has_a_distribution_over_what_is_common(spec: str, draw: Draw) -> None:
    rig = Rig(f"model:any,map=tokens,tree={spec}", draw).open(TEXTS, 1.0)
    for tree in rig.drafter.draft(rig.states, [Budget(6, 2)] * len(TEXTS)):
        assert tree.distributions is not None
        assert tree.distributions.shape == (len(tree), VOCAB_SIZE)
        assert torch.allclose(tree.distributions.sum(-1), torch.ones(len(tree), dtype=tree.distributions.dtype))
        assert all(tree.distributions[node, token] > 0 for node, token in enumerate(tree.tokens))


def test_a_merged_tree_takes_either_way() -> None:
    for way in ("tokens", "strings"):
        rig = Rig(f"model:any,map={way}").open(TEXTS, 0.0)
        empty = [TokenTree((), ())] * len(TEXTS)
        for view in rig.views:
            view.history.append([5, 6])
        rig.drafter.observe(observed(rig.states, empty, [Verdict((), 6)] * len(TEXTS)))
        assert any(len(tree) for tree in rig.drafter.draft(rig.states, [Budget(5, 5)] * len(TEXTS)))


def test_the_choice_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="draftree"):
        rig = Rig("model:any")
    assert rig.drafter.note.startswith("map=strings: other has 82 tokens in common"), "a quarter is the least"
    assert rig.drafter.note in caplog.text
    assert "map=tokens" in Rig("model:any,map=tokens").drafter.note
    assert "map=tokens" in Rig("model:any", Draw.IID).drafter.note, "a distribution is over tokens"


def test_an_equal_vocabulary_needs_no_map_unless_strings_are_requested() -> None:
    same = LoadedDraftModel(TableLM(target_table), spelled(), "twin")
    context = DraftContext(TableLM(target_table), spelled(), Draw.FREE, True, lambda name: same)
    assert translation_between("auto", same, context) is None
    assert translation_between("tokens", same, context) is None
    strings = translation_between("strings", same, context)
    assert strings is not None
    assert strings.way == "strings"


@pytest.mark.parametrize("way", ["tokens", "strings"])
def test_without_tokenizers_nothing_can_be_mapped(way: str) -> None:
    bare = LoadedDraftModel(TableLM(target_table), None, "bare")
    context = DraftContext(TableLM(target_table), spelled(), Draw.FREE, True, lambda name: bare)
    with pytest.raises(ConfigurationError, match=f"map={way}"):
        translation_between(way, bare, context)


def test_a_tokenizer_that_cannot_be_mapped_is_refused_by_name() -> None:
    strange = LoadedDraftModel(TableLM(target_table), Tokenizer(word_piece(), name="strange"), "strange")
    context = DraftContext(TableLM(target_table), spelled(), Draw.FREE, True, lambda name: strange)
    with pytest.raises(VocabularyMismatchError, match="strange"):
        translation_between("auto", strange, context)
