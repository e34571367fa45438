"""Token trees: hand-made cases and properties of every pure function."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.node_map import prune
from draftree.core.tree import (
    EMPTY,
    ROOT,
    Draw,
    TokenTree,
    ancestor_bits,
    ancestor_mask,
    chain,
    depths,
    is_chain,
    is_rooted,
    path,
)
from draftree.core.types import DraftCondition

#        root ── 0 ── 1 ── 4
#          │      └── 2
#          └──── 3
PARENTS = (-1, 0, 0, -1, 1)


@st.composite
def parent_lists(draw: st.DrawFn, max_size: int = 16) -> tuple[int, ...]:
    size = draw(st.integers(0, max_size))
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))


def test_path_and_depths_by_hand() -> None:
    assert path(PARENTS, 4) == [0, 1, 4]
    assert path(PARENTS, 3) == [3]
    assert path(PARENTS, ROOT) == []
    assert depths(PARENTS) == [1, 2, 2, 1, 3]


def test_token_paths_begin_with_the_roots_and_share_prefixes() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, -1, 1))
    assert tree.token_paths() == [(), (5,), (5, 6), (5, 7), (8,), (5, 6, 9)]
    assert EMPTY.token_paths() == [()]


def test_chain_is_a_tree_without_branches() -> None:
    tree = chain([7, 8, 9], scores=[0.0, -1.0, -2.0], draw=Draw.IID, distributions=torch.ones(3, 4))
    assert tree.parents == (-1, 0, 1)
    assert tree.draw is Draw.IID
    assert is_chain(tree.parents)
    assert chain(np.array([3, 4])).tokens == (3, 4)


@pytest.mark.parametrize(("parents", "answer"), [((), True), ((-1,), True), ((-1, -1), False), ((-1, 0, 0), False)])
def test_is_chain(parents: tuple[int, ...], answer: bool) -> None:
    assert is_chain(parents) is answer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((1, 2), (-1,)), "2 tokens has 1 parents"),
        (((1,), (0,)), "parent of node 0 is 0"),
        (((1, 2), (-1, -2)), "parent of node 1 is -2"),
        (((1, 2), (-1, 0), (0.5,)), "2 tokens has 1 scores"),
        (((1,), (-1,), (), Draw.FREE, None, (("a",), ("b",))), "1 tokens has 2 sources"),
    ],
)
def test_malformed_trees_are_refused(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TokenTree(*arguments)  # type: ignore[arg-type]


def test_prune_keeps_every_column() -> None:
    tree = TokenTree(
        (5, 6, 7, 8, 9),
        PARENTS,
        (0.0, 0.1, 0.2, 0.3, 0.4),
        Draw.IID,
        torch.arange(5.0)[:, None].expand(5, 3),
        (("a",), ("a", "b"), ("b",), ("a",), ("b",)),
    )
    cut = prune(tree, [4, 0, 1])
    assert cut.tokens == (5, 6, 9)
    assert cut.parents == (-1, 0, 1)
    assert cut.scores == (0.0, 0.1, 0.4)
    assert cut.draw is Draw.IID
    assert cut.distributions is not None
    assert cut.distributions[:, 0].tolist() == [0.0, 1.0, 4.0]
    assert cut.sources == (("a",), ("a", "b"), ("b",))


@given(parent_lists())
def test_depth_is_the_length_of_the_path(parents: tuple[int, ...]) -> None:
    assert depths(parents) == [len(path(parents, node)) for node in range(len(parents))]


@given(parent_lists())
def test_mask_rows_are_paths(parents: tuple[int, ...]) -> None:
    mask = ancestor_mask(parents)
    for node in range(len(parents)):
        assert np.flatnonzero(mask[node]).tolist() == path(parents, node)


@given(parent_lists(max_size=70), st.integers(0, 3))
def test_bits_are_the_mask(parents: tuple[int, ...], more: int) -> None:
    bits = ancestor_bits(parents, num_bytes=-(-len(parents) // 8) + more)
    for node in range(len(parents)):
        assert int.from_bytes(bits[node].tobytes(), "little") == sum(1 << above for above in path(parents, node))


@given(parent_lists(), st.sets(st.integers(-2, 17)))
def test_a_rooted_set_has_every_parent(parents: tuple[int, ...], nodes: set[int]) -> None:
    is_closed = all(0 <= node < len(parents) and {*path(parents, node)} <= nodes for node in nodes)
    assert is_rooted(parents, sorted(nodes)) is is_closed
    assert len(nodes) < 2 or not is_rooted(parents, sorted(nodes, reverse=True))


@given(parent_lists())
def test_children_and_parents_agree(parents: tuple[int, ...]) -> None:
    lists = TokenTree(tuple(range(len(parents))), parents).children()
    assert sorted(node for nodes in lists for node in nodes) == list(range(len(parents)))
    assert all(nodes == sorted(nodes) for nodes in lists)
    assert all(parents[node] + 1 == row for row, nodes in enumerate(lists) for node in nodes)


def sure(*survivals: float) -> TokenTree:
    return chain(range(len(survivals)), scores=[math.log(value) for value in survivals])


@pytest.mark.parametrize(
    ("trees", "gain"),
    [
        ([], 0.9),
        ([EMPTY], 0.9),
        ([sure(0.5)], 0.6),
        ([sure(0.5, 0.5)], 0.45),
        ([sure(0.5), sure(1.0)], 0.3),
        ([sure(1.0, 1.0, 1.0)], 0.0),
        ([chain([1, 2])], 0.9),
    ],
)
def test_tokens_that_others_draft_are_no_gain(trees: list[TokenTree], gain: float) -> None:
    assert DraftCondition((0.6, 0.3), gain - 1e-9).is_met(trees)
    assert not DraftCondition((0.6, 0.3), gain + 1e-9).is_met(trees)


def test_of_siblings_the_likeliest_counts_and_scores_are_corrected_by_the_trust() -> None:
    tree = TokenTree((1, 2), (-1, -1), (math.log(0.2), math.log(0.8)))
    assert DraftCondition((1.0,), 0.2 - 1e-9).is_met([tree])
    assert not DraftCondition((1.0,), 0.2 + 1e-9).is_met([tree])
    assert DraftCondition((1.0,), 0.6 - 1e-9, trust=0.5).is_met([tree])
    assert not DraftCondition((1.0,), 0.6 + 1e-9, trust=0.5).is_met([tree])
