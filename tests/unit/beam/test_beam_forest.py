"""Bookkeeping of the trees: live nodes, compaction, splits, prompts in chunks, and closed slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from beam_oracles import search
from draftree.beam import forest as forests
from draftree.beam import loop
from draftree.beam.forest import Forest
from draftree.beam.loop import BeamSearch
from draftree.beam.params import BeamSearchParams
from draftree.beam.state import TextSearch
from draftree.beam.trunk import Tip
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


class Watched(BeamSearch):
    """Search that checks after every step that the forests hold the live prefixes and no others."""

    def step(self) -> list[TextSearch]:
        ended = super().step()
        for text, (forest,) in self._forests.items():
            if not text.num_steps:
                continue
            distinct = {beam.tokens[:size] for beam in text.live for size in range(1, len(beam.tokens) + 1)}
            held, committed = 0, []
            for trunk in forest.trunks:
                own = [beam for beam in text.live if beam.tips[0].trunk is trunk]
                live = trunk.live([beam.tips[0].node for beam in own])
                dead = len(trunk.tokens) - len(live)
                assert dead <= max(forests.FEW, forests.DEAD_SHARE * len(trunk.tokens)) + 1
                assert trunk.slot.num_tentative == trunk.num_stored
                held += len(live)
                committed.append(trunk.slot.length - len(text.prompt))
                for beam in own:
                    path, node = [], beam.tips[0].node
                    while node >= 0:
                        path.append(trunk.tokens[node])
                        node = trunk.parents[node]
                    shown = text.prompt + list(beam.tokens)
                    assert path[::-1] == shown[len(shown) - len(path) :]
                    assert trunk.slot.length + len(path) == len(shown)
            if len(forest.trunks) == 1 and committed[0] >= 0:
                assert held + committed[0] == len(distinct)
        return ended


@pytest.mark.parametrize("supports_trees", [True, False])
@pytest.mark.parametrize("capacity", [None, 1, 3, 9])
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_capacity_changes_no_result(supports_trees: bool, capacity: int | None, width: int) -> None:
    table = hashed(11, 4, scale=0.7)
    params = BeamSearchParams(beam_width=width, num_return_sequences=width, max_new_tokens=60, early_stopping="never")
    expected = BeamSearch(TableLM(table, order=3), end_ids=[0]).run([[1, 2]], [params])
    model = TableLM(table, order=3, supports_trees=supports_trees)
    assert Watched(model, end_ids=[0], capacity=capacity).run([[1, 2]], [params]) == expected
    assert model.num_open == 0


def test_small_capacity_bounds_trees_by_splitting() -> None:
    model = Counted(hashed(11, 4, scale=0.1), order=3)
    searcher = Watched(model, capacity=12)
    searcher.run([[1, 2]], [BeamSearchParams(beam_width=6, max_new_tokens=40)])
    assert 1 < searcher.stats.most_slots <= 6
    assert model.most_open == searcher.stats.most_slots


def test_one_pass_per_step_and_few_commits() -> None:
    model = Counted(hashed(50, 4, scale=2.0), order=3)
    searcher = Watched(model)
    searcher.run([[1, 2]], [BeamSearchParams(beam_width=4, max_new_tokens=64)])
    assert model.passes == 64
    assert model.commits < 32
    assert searcher.stats.num_rows == 2 + 4 * 63


def test_long_prompts_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [token % 7 for token in range(50)]
    table = hashed(7, 1)
    expected = search(TableLM(table), prompt, beam_width=3, max_new_tokens=6)
    monkeypatch.setattr(loop, "CHUNK", 8)
    model = Counted(table)
    assert search(model, prompt, beam_width=3, max_new_tokens=6) == expected
    assert model.passes == 7 + 5


def test_equal_continuations_share_a_node() -> None:
    model = TableLM(hashed(5, 0))
    forest = Forest(model, [1, 2], capacity=9, length=20)
    jobs = forest.jobs()
    logits = model.run(Pass([job for _, job in jobs])).logits.tensor()
    assert forest.note(jobs, logits, 0) == 1
    root = forest.root
    first, second, third = forest.advance([(root, 3), (root, 3), (root, 4)])
    assert isinstance(first, Tip)
    assert first.node == second.node != third.node
    assert [len(job.tokens) for _, job in forest.jobs()] == [2]
    forest.close()
    assert model.num_open == 0
