"""Times of trees: what is timed, and what is refused."""

from __future__ import annotations

import pytest

from bench_samples import write_model
from benchmark_scripts import script
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.passes import PassSettings
from draftree.lab.bench.records import read_results
from draftree.models.base import Extend, LanguageModel, Pass, PassResult
from draftree.models.table import TableLM, hashed
from draftree.options import ModelOptions
from private_cache import private_cache

trees = script("trees")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))


def test_trees_of_a_folder(tmp_path, capsys):
    folder, out = write_model(tmp_path / "tiny"), tmp_path / "trees.jsonl"
    given = {"trees": "2-1,3", "drafts": "best-3,wor-2", "prefix": 8, "repeats": 2, "dtype": "float32"}
    trees.main(str(folder), **given, output=out)
    results = read_results(out)
    assert (results.header["model"]["name"], results.is_complete) == ("tiny", True)
    assert "Scoring a tree" in capsys.readouterr().out
    found = results.trees
    scored = [(tree.shape, tree.how, tree.rows, tree.leaves) for tree in found[:8]]
    hows = ("tree", "chain", "batched", "one by one")
    assert scored == [("2-1", how, 4, 2) for how in hows] + [("3", how, 3, 3) for how in hows]
    assert len(found) == 8 + 2 * 2 * 2
    drafted, passes = found[8], found[9]
    assert (drafted.shape, drafted.how, passes.how) == (
        "best-3",
        "drafted, temperature 0",
        "passes of drafting, temperature 0",
    )
    assert all(whole > part > 0 for whole, part in zip(drafted.milliseconds, passes.milliseconds, strict=True))


def test_trees_are_scored_with_the_parents_of_their_shape(monkeypatch):
    model = TableLM(hashed(8, 0), order=2)
    seen: list[list[int]] = []
    run = TableLM.run

    def watched(self: LanguageModel, pass_: Pass) -> PassResult:
        seen.append(list(pass_.jobs[0].parents))
        return run(self, pass_)

    monkeypatch.setattr(TableLM, "run", watched)
    trees.time_scoring(model, ("2-2",), prefix=3, repeats=1)
    assert [-1, -1, 0, 0, 1, 1] in seen
    assert list(range(-1, 5)) in seen
    assert model.run(Pass([Extend(model.open(), [1], [-1])])).logits.tensor().shape == (1, 8)


def test_trees_that_only_a_drafter_can_place_are_refused():
    with pytest.raises(ConfigurationError, match="depend on a drafter"):
        trees.measure(PassSettings(ModelOptions("nothing")), ["best-8"], [])
