"""Maps between trees: composition, inverses, twins, and picks of nodes that were not scored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.node_map import NodeMap, first_levels, join, merge
from draftree.core.tree import ROOT, TokenTree, chain, first_children, path
from draftree.core.types import Verdict

#        root ── 0 ── 1 ── 4
#          │      └── 2
#          └──── 3
PARENTS = (-1, 0, 0, -1, 1)


@st.composite
def trees(draw: st.DrawFn, max_size: int = 10) -> TokenTree:
    """Trees whose siblings may have one token."""
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, max_size))))
    return TokenTree(tuple(draw(st.integers(0, 2)) for _ in parents), parents)


def closed_nodes(draw: st.DrawFn, parents: tuple[int, ...]) -> list[int]:
    seeds = draw(st.sets(st.integers(0, len(parents) - 1))) if parents else set[int]()
    return sorted({node for seed in seeds for node in path(parents, seed)})


@st.composite
def prunes(draw: st.DrawFn) -> tuple[TokenTree, NodeMap]:
    tree = draw(trees())
    return tree, NodeMap.keeping(tree.parents, closed_nodes(draw, tree.parents))


def all_paths(parents: tuple[int, ...]) -> list[list[int]]:
    return [path(parents, node) for node in range(ROOT, len(parents))]


def tokens_of(tree: TokenTree, nodes: tuple[int, ...]) -> list[int]:
    return [tree.tokens[node] for node in nodes]


def assert_parents_kept(nodes: NodeMap, derived: TokenTree) -> None:
    assert nodes.num_targets == len(derived)
    for parent, target in zip(nodes.parents, nodes.targets, strict=True):
        if target is not None:
            assert derived.parents[target] == (ROOT if parent == nodes.root else nodes.targets[parent])


def test_a_prune_by_hand() -> None:
    nodes = NodeMap.keeping(PARENTS, [3, 0, 2])
    assert nodes.targets == (0, None, 1, 2, None)
    assert nodes.derived_parents == [-1, 0, -1]
    assert nodes.apply([0, 1, 4]) == (0,)
    assert nodes.apply([0, 2]) == (0, 1)
    assert nodes.verdict_on_source(Verdict((0, 1), 9, (5, 6, 7, 8))) == Verdict((0, 2), 9, (5, 6, None, 7, 8, None))
    assert nodes.verdict_on_source(Verdict((2,), 9)) == Verdict((3,), 9)


@pytest.mark.parametrize(("keep", "message"), [([4, 0], "node 4 is kept but its parent 1 is not"), ([5], "node 5")])
def test_a_kept_node_exists_and_has_its_parent_kept(keep: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeMap.keeping(PARENTS, keep)


def test_below_a_node_that_node_is_the_root() -> None:
    nodes = NodeMap.below(PARENTS, 0)
    assert nodes.targets == (None, 0, 1, None, 2)
    assert nodes.derived_parents == [-1, -1, 0]
    assert nodes.apply([0, 1, 4]) == (0, 2)
    assert nodes.apply([3]) == ()
    assert nodes.verdict_on_source(Verdict((0,), 9, (5, 6, 7, 8))) == Verdict((0, 1), 9, (None, 5, 6, 7, None, 8))
    with pytest.raises(ValueError, match="node 3 is kept"):
        NodeMap.keeping(PARENTS, [1, 3], root=0)


@given(prunes())
def test_a_verdict_on_a_prune_is_one_on_the_source(case: tuple[TokenTree, NodeMap]) -> None:
    tree, nodes = case
    cut = nodes.cut(tree)
    assert_parents_kept(nodes, cut)
    picks = tuple(range(100, 101 + len(cut)))
    for way in all_paths(cut.parents):
        verdict = nodes.verdict_on_source(Verdict(tuple(way), 7, picks))
        assert verdict.bonus == 7
        assert tokens_of(tree, verdict.path) == tokens_of(cut, tuple(way))
        assert nodes.apply(verdict.path) == tuple(way)
        assert len(verdict.picks) == len(tree) + 1
        assert verdict.picks[0] == 100
        for node, target in enumerate(nodes.targets):
            assert verdict.picks[1 + node] == (None if target is None else 101 + target)


@given(prunes())
def test_a_path_is_carried_up_to_the_first_node_that_is_gone(case: tuple[TokenTree, NodeMap]) -> None:
    tree, nodes = case
    for way in all_paths(tree.parents):
        kept = [node for node in way if node in nodes.kept]
        assert nodes.path_on_source(nodes.apply(way)) == tuple(kept)


@given(prunes(), st.data())
def test_maps_compose(case: tuple[TokenTree, NodeMap], data: st.DataObject) -> None:
    tree, first = case
    middle = first.cut(tree)
    second = NodeMap.keeping(middle.parents, closed_nodes(data.draw, middle.parents))
    both = first.compose(second)
    assert both.cut(tree) == second.cut(middle)
    picks = tuple(range(1 + second.num_targets))
    for way in all_paths(tuple(second.derived_parents)):
        verdict = Verdict(tuple(way), 3, picks)
        assert both.verdict_on_source(verdict) == first.verdict_on_source(second.verdict_on_source(verdict))
    for way in all_paths(tree.parents):
        assert both.apply(way) == second.apply(first.apply(way))
    assert first.compose(NodeMap.identity(middle.parents)) == first
    assert NodeMap.identity(tree.parents).compose(first) == first


@given(prunes(), st.data())
def test_maps_below_a_node_compose(case: tuple[TokenTree, NodeMap], data: st.DataObject) -> None:
    tree, first = case
    middle = first.cut(tree)
    root = data.draw(st.integers(ROOT, len(middle) - 1))
    second = NodeMap.below(middle.parents, root)
    both = first.compose(second)
    rest = second.cut(middle)
    assert_parents_kept(both, rest)
    above = [] if root == ROOT else path(tree.parents, both.root)
    for way in all_paths(rest.parents):
        on_source = both.path_on_source(way)
        assert on_source[: len(above)] == tuple(above)
        assert tokens_of(tree, on_source[len(above) :]) == tokens_of(rest, tuple(way))
        assert both.apply(on_source) == tuple(way)


@given(st.lists(trees(), min_size=1, max_size=3))
def test_every_node_is_in_a_merged_tree_with_its_tokens(parts: list[TokenTree]) -> None:
    merged = merge(parts, [str(part) for part in range(len(parts))])
    for part, nodes in zip(parts, merged.maps, strict=True):
        assert None not in nodes.targets
        assert_parents_kept(nodes, merged.tree)
        for way in all_paths(part.parents):
            assert tokens_of(merged.tree, nodes.apply(way)) == tokens_of(part, tuple(way))
        for way in all_paths(merged.tree.parents):
            own = nodes.path_on_source(way)
            assert list(own) == path(part.parents, own[-1] if own else ROOT)
            assert nodes.apply(own) == tuple(way[: len(own)])
            # no node of the part goes further along the path
            assert len(own) == len(way) or way[len(own)] not in nodes.targets


def test_the_children_of_twins_are_found_below_either() -> None:
    twins = TokenTree((5, 5, 6, 7), (-1, -1, 1, 0))
    merged = merge([chain([5]), twins], ["a", "b"])
    nodes = merged.maps[1]
    assert nodes.targets == (0, 0, 1, 2)
    assert nodes.path_on_source((0, 1)) == (1, 2)
    assert nodes.path_on_source((0, 2)) == (0, 3)
    assert nodes.path_on_source((0,)) == (0,)
    assert nodes.picks_on_source((9, 5, 6, 7)) == (9, 5, 5, 6, 7)


def test_a_part_of_a_merged_tree_that_is_cut_has_no_picks_there() -> None:
    merged = merge([chain([1, 2, 3]), chain([1, 4])], ["a", "b"])
    fitting = first_levels(merged.tree.parents, 2)
    nodes = merged.maps[0].compose(fitting)
    verdict = Verdict((0, 1), 8, (6, 7, 8))
    assert nodes.verdict_on_source(verdict) == Verdict((0, 1), 8, (6, 7, 8, None))
    assert merged.maps[1].compose(fitting).verdict_on_source(verdict) == Verdict((0,), 8, (6, 7, None))


def test_a_draw_that_another_part_drew_before_is_that_draw() -> None:
    joined = join([chain([1, 2]), chain([1, 3])], ["a", "b"], vocab_size=4)
    assert [nodes.targets for nodes in joined.maps] == [(0, 1), (0, 2)]


def test_nodes_that_were_added_have_no_source() -> None:
    nodes = NodeMap.identity((-1, 0)).widened(4)
    assert nodes.sources == [0, 1, None, None]
    assert nodes.verdict_on_source(Verdict((0, 2), 7, (1, 2, 3, 4, 5))) == Verdict((0,), 7, (1, 2, 3))


@given(trees(), trees())
def test_nodes_are_found_by_their_tokens(part: TokenTree, whole: TokenTree) -> None:
    shared = merge([whole], ["w"]).tree
    nodes = NodeMap.by_tokens(part.tokens, part.parents, first_children(shared), num_targets=len(shared))
    known = {tuple(tokens_of(shared, tuple(way))) for way in all_paths(shared.parents)}
    for node, target in enumerate(nodes.targets):
        way = tokens_of(part, tuple(part.path(node)))
        assert (target is not None) == (tuple(way) in known)
        if target is not None:
            assert tokens_of(shared, tuple(shared.path(target))) == way


@given(prunes())
def test_values_are_carried_with_their_nodes(case: tuple[TokenTree, NodeMap]) -> None:
    tree, nodes = case
    carried = nodes.carry({node: path(tree.parents, node) for node in range(len(tree))})
    assert sorted(carried) == list(range(nodes.num_targets))
    assert {target: list(nodes.path_on_source(path(tuple(nodes.derived_parents), target))) for target in carried} == (
        carried
    )
