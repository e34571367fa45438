"""Bookkeeping of the trees: live nodes, compaction, splits, prompts in chunks, and closed slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from beam_oracles import search
from draftree.beam import search as beam_search
from draftree.beam.params import BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.models.base import Commit, Edit, Pass, PassResult, Slot
from draftree.models.table import TableLM, hashed


class Counted(TableLM):
    """Table model that counts edits and remembers the largest tree."""

    def __init__(self, *args: object, **given: object) -> None:
        super().__init__(*args, **given)  # type: ignore[arg-type]
        self.commits = self.passes = self.most_tentative = self.most_open = 0

    def run(self, pass_: Pass) -> PassResult:
        result = super().run(pass_)
        self.passes += 1
        self.most_tentative = max(self.most_tentative, *(job.slot.num_tentative for job in pass_.jobs))
        self.most_open = max(self.most_open, self.num_open)
        return result

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        self.commits += sum(isinstance(edit, Commit) for edit in edits)
        return super().apply(edits)


@pytest.mark.parametrize("supports_trees", [True, False])
@pytest.mark.parametrize("capacity", [None, 1, 3, 9])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_capacity_changes_no_result(supports_trees: bool, capacity: int | None, width: int) -> None:
    table = hashed(11, 4, scale=0.7)
    params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=60, early_stopping="never")
    expected = BeamSearch(TableLM(table, order=3), end_ids=[0]).run([[1, 2]], [params])
    model = TableLM(table, order=3, supports_trees=supports_trees)
    assert BeamSearch(model, end_ids=[0], capacity=capacity).run([[1, 2]], [params]) == expected
    assert model.num_open == 0


def test_small_capacity_bounds_trees_by_splitting() -> None:
    model = Counted(hashed(11, 4, scale=0.1), order=3)
    searcher = BeamSearch(model, capacity=12)
    searcher.run([[1, 2]], [BeamSearchParams(beam_width=6, max_new_tokens=40)])
    assert 1 < searcher.stats.most_slots <= 6
    assert model.most_open == searcher.stats.most_slots


def test_one_pass_per_step_and_few_commits() -> None:
    model = Counted(hashed(50, 4, scale=2.0), order=3)
    searcher = BeamSearch(model)
    searcher.run([[1, 2]], [BeamSearchParams(beam_width=4, max_new_tokens=64)])
    assert model.passes == 64
    assert model.commits < 32
    assert searcher.stats.num_rows == 2 + 4 * 63


def test_long_prompts_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [token % 7 for token in range(50)]
    table = hashed(7, 1)
    expected = search(TableLM(table), prompt, beam_width=3, max_new_tokens=6)
    monkeypatch.setattr(beam_search, "CHUNK", 8)
    model = Counted(table)
    assert search(model, prompt, beam_width=3, max_new_tokens=6) == expected
    assert model.passes == 7 + 5
