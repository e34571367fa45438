from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.node_map import first_levels, join, merge
from draftree.core.tree import EMPTY, Draw, TokenTree, chain, depths, follow, path

SMALL_TOKENS = st.integers(0, 3)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(0, 8))
    tokens = draw(st.lists(SMALL_TOKENS, min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return TokenTree(tuple(tokens), tuple(parents))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in path(tree.parents, node)) for node in range(len(tree))}


def test_common_prefixes_are_shared_and_remember_all_sources() -> None:
    merged = merge([chain([5, 6, 7]), chain([5, 6, 8]), EMPTY], ["a", "b", "c"]).tree
    assert merged.tokens == (5, 6, 7, 8)
    assert merged.parents == (-1, 0, 1, 1)
    assert merged.sources == (("a", "b"), ("a", "b"), ("a",), ("b",))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_a_merged_tree_has_every_path_of_all_once(parts: list[TokenTree]) -> None:
    merged = merge(parts, [str(i) for i in range(len(parts))]).tree
    assert paths(merged) == set().union(*(paths(part) for part in parts))
    assert len(paths(merged)) == len(merged)
    for index, part in enumerate(parts):
        own = {
            tuple(merged.tokens[n] for n in path(merged.parents, v))
            for v in range(len(merged))
            if str(index) in merged.sources[v]
        }
        assert own == paths(part)


def test_sources_of_one_drafter_follow_its_name() -> None:
    own = TokenTree((5, 6), (-1, 0), sources=(("near", "far"), ("far",)))
    merged = merge([chain([5]), own], ["a", "b"]).tree
    assert merged.sources == (("a", "b/near", "b/far"), ("b/far",))


@given(trees(), st.lists(SMALL_TOKENS, max_size=6))
def test_follow_goes_as_far_as_any_path(tree: TokenTree, tokens: list[int]) -> None:
    found = follow(tree, tokens)
    assert [tree.tokens[n] for n in found] == tokens[: len(found)]
    assert found == path(tree.parents, found[-1] if found else -1)
    known = paths(tree)
    assert len(found) == max((n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in known), default=0)


@given(trees(), st.integers(0, 8))
def test_first_levels_keeps_the_highest_nodes(tree: TokenTree, count: int) -> None:
    cut = first_levels(tree.parents, count).cut(tree)
    assert len(cut) == min(count, len(tree))
    assert sorted(depths(cut.parents)) == sorted(depths(tree.parents))[: len(cut)]


DISTRIBUTIONS = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])


def test_joined_draws_come_before_points_which_get_their_distribution() -> None:
    drawn = TokenTree((1, 0), (-1, 0), draw=Draw.IID, distributions=DISTRIBUTIONS)
    joined = join([chain([2, 0], draw=Draw.POINT), drawn], ["a", "b"], vocab_size=3).tree
    assert joined.tokens == (1, 0, 2, 0)
    assert joined.parents == (-1, 0, -1, 2)
    assert joined.draw is Draw.IID
    assert joined.distributions is not None
    assert joined.distributions.tolist() == [[0.25, 0.75, 0], [0.5, 0.5, 0], [0, 0, 1], [1, 0, 0]]
    assert joined.sources == (("b",), ("b",), ("a",), ("a",))


def test_a_point_equal_to_a_draw_continues_after_the_draw() -> None:
    drawn = TokenTree((1, 0), (-1, 0), scores=(-0.5, -1.5), draw=Draw.IID, distributions=DISTRIBUTIONS)
    copied = chain([1, 2], scores=[-0.1, -0.3], draw=Draw.POINT)
    joined = join([copied, drawn], ["a", "b"], vocab_size=3).tree
    assert joined.tokens == (1, 0, 2)
    assert joined.parents == (-1, 0, 0)
    assert joined.sources == (("b", "a"), ("b",), ("a",))
    assert joined.scores == pytest.approx((-0.5, -1.5, -0.7))


def test_a_token_drawn_by_two_parts_is_two_draws_that_both_continue_after_the_first() -> None:
    drawn = TokenTree((1, 0), (-1, 0), draw=Draw.IID, distributions=DISTRIBUTIONS)
    other = TokenTree((1, 1), (-1, 0), draw=Draw.IID, distributions=DISTRIBUTIONS.flip(0))
    joined = join([drawn, other], ["a", "b"], vocab_size=3).tree
    assert joined.tokens == (1, 0, 1, 1)
    assert joined.parents == (-1, 0, -1, 0)
    assert joined.distributions is not None
    assert torch.equal(joined.distributions, torch.cat([DISTRIBUTIONS, DISTRIBUTIONS.flip(0)]))


def test_draws_of_nothing_join_to_nothing() -> None:
    assert join([EMPTY, EMPTY], ["a", "b"], vocab_size=3).tree == TokenTree((), (), draw=Draw.IID)
