"""The parts of lookahead, by hand: the pool, the window and the comb."""

from __future__ import annotations

import pytest

from draftree.core.types import Budget
from draftree.drafters.lookup.window import Comb, Pool, filled, grams, moved
from lookahead_samples import PLENTY


class TestPool:
    def test_the_latest_come_first_and_the_oldest_goes(self) -> None:
        pool = Pool(3, 2)
        for gram in ([1, 2, 3], [1, 4, 5], [2, 2, 2], [1, 6, 7]):
            pool.add(gram)
        assert pool.after(1) == [(6, 7), (4, 5)]
        assert pool.after(2) == [(2, 2)]
        assert pool.after(3) == []

    def test_repeated_ngrams_count_as_latest_and_once(self) -> None:
        pool = Pool(2, 3)
        for gram in ([1, 2], [1, 3], [1, 2]):
            pool.add(gram)
        assert pool.after(1) == [(2,), (3,)]

    @pytest.mark.parametrize(("tokens", "keys"), [([1, 2, 3, 4], {1: [(2, 3)], 2: [(3, 4)]}), ([1, 2], {}), ([], {})])
    def test_a_text_gives_all_its_ngrams(self, tokens: list[int], keys: dict[int, list[tuple[int, ...]]]) -> None:
        pool = Pool(3, 4)
        pool.read(tokens)
        assert {token: pool.after(token) for token in range(9) if pool.after(token)} == keys


class TestWindow:
    # columns are lanes; row l, column i guesses position 1 + i + l
    ROWS = ([10, 20, 30], [11, 21, 31])

    def test_lanes_and_their_picks_are_ngrams(self) -> None:
        assert grams([*self.ROWS], [12, None, 32]) == [(10, 11, 12), (30, 31, 32)]

    @pytest.mark.parametrize(
        ("ends", "written", "depth", "expected"),
        [
            # one row more until it is full: columns move with the text
            ([12, 22, 32], 1, 3, [[20, 30], [21, 31], [22, 32]]),
            # full: the first row goes, which is the step of one position
            ([12, 22, 32], 1, 2, [[11, 21, 31], [12, 22, 32]]),
            ([12, None, 32], 1, 2, [[11, 21, 31], [12, None, 32]]),
            ([12, 22, 32], 3, 2, [[31], [32]]),
            ([12, 22, 32], 4, 2, [[], []]),
            ([12, 22, 32], 9, 2, [[], []]),
            # no lane was scored: what was guessed for a position stays where it is
            ([], 1, 2, [[20, 30], [21, 31]]),
            ([], 2, 3, [[30], [31]]),
        ],
    )
    def test_it_moves_as_far_as_the_text(
        self, ends: list[int | None], written: int, depth: int, expected: list[list[int]]
    ) -> None:
        assert moved([*self.ROWS], ends, written=written, depth=depth) == expected

    def test_gaps_are_filled_by_the_pool_and_else_by_guesses(self) -> None:
        pool = Pool(3, 2)
        pool.add([5, 6, 7])
        pool.add([1, 8, 9])
        rows: list[list[int | None]] = [[1, 2], [None, 3], [None, None]]
        # lane 0 continues from the pool, lane 1 has no known continuation, lanes 2 and 3 are all new
        lanes = [[1, 8, 9], [2, 3, 70], [5, 6, 7], [71, 72, 73]]
        guesses = iter([70, 5, 71, 72, 73])
        assert filled(rows, 4, pool=pool, guesses=guesses) == [list(row) for row in zip(*lanes, strict=True)]


class TestComb:
    def test_equal_prefixes_are_one_node_with_both_names(self) -> None:
        comb = Comb(PLENTY)
        comb.add(-1, (1, 2), "pool")
        assert comb.hang([[1, 5], [2, 6]], "window") == [1, 3]
        tree = comb.tree()
        assert (tree.tokens, tree.parents) == ((1, 2, 5, 6), (-1, 0, 0, 2))
        assert tree.sources == (("pool", "window"), ("pool", "window"), ("window",), ("window",))

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
    def test_lanes_are_complete_or_absent(self, budget: Budget, ends: list[int | None], size: int) -> None:
        comb = Comb(budget)
        assert comb.hang([[1, 2, 3], [4, 5, 6]], "window") == ends
        assert len(comb.tree()) == size
