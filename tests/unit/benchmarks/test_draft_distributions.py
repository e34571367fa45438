"""Distributions of a target and a drafter: the records, and the statistics derived from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from bench_samples import write_model
from benchmark_scripts import script
from draftree.core.errors import ConfigurationError
from draftree.lab.analysis.theory import kept_by_rule
from draftree.lab.bench.records import DistributionRecord, read_results
from draftree.lab.bench.tables import (
    distribution_grids,
    hit_rates,
    independent_tokens,
    replayed_tokens,
    surviving_tokens,
)
from private_cache import private_cache

closeness = script("closeness")
DistributionSettings, prepare = closeness.DistributionSettings, closeness.prepare


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "tiny"), write_model(root / "small", seed=1)


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": f"{name} fox"}) + "\n" for name in ("red", "brown")))
    return path


def distribution(ranks: tuple[int, ...], coupled: tuple[float, ...]) -> DistributionRecord:
    kept = {"coupled": [[value] for value in coupled]}
    return DistributionRecord("a", "story", 1.0, len(ranks), ranks, (float(ranks.count(1)),), kept)


def test_a_model_drafts_its_own_picks(folders, prompts):
    target, _ = folders
    settings = DistributionSettings(
        str(target), str(target), (0.0, 0.9), prompts, max_tokens=6, draws=3, dtype="float32"
    )
    records = [record for part in prepare(settings).run(kept_by_rule) for record in part]
    assert [(record.task, record.temperature) for record in records] == [
        ("red", 0.0),
        ("brown", 0.0),
        ("red", 0.9),
        ("brown", 0.9),
    ]
    for record in records:
        assert record.own_ranks == (1,) * 6
        assert record.shared_hits == (6.0, *[0.0] * 7)
        for rule in ("token", "coupled", "multistep", "recursive"):
            assert record.kept[rule] == [[pytest.approx(1)] * len(record.kept[rule][0])] * 6
    assert records[-1].kept["match"][0][0] < 0.9


def test_another_model_drafts_some_of_them_and_the_file_records_it(folders, prompts, tmp_path, capsys):
    target, small = folders
    out = tmp_path / "distributions.jsonl"
    command = typer.Typer(add_completion=False)
    command.command()(script("distributions").distributions)
    options = "--temperatures 0,1 --max-tokens 8 --draws 2 --dtype float32"
    files = ["--draft-model", str(small), "--prompts", str(prompts), "--output", str(out)]
    command([str(target), *options.split(), *files], standalone_mode=False)
    results = read_results(out)
    assert (results.header["job"], results.is_complete, len(results.distributions)) == ("distributions", True, 4)
    for record in results.distributions:
        assert record.num_positions == 8
        for one, two, four in record.kept["recursive"]:
            assert 0 <= one <= two <= four <= 1
        for (token,), (coupled,) in zip(record.kept["token"], record.kept["coupled"], strict=True):
            assert coupled <= token + 1e-9
    assert distribution_grids(results.distributions)[0].title in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_models_that_do_not_fit_are_refused(folders, prompts):
    target, small = folders
    with pytest.raises(ConfigurationError, match="at least 1"):
        DistributionSettings("a", "b", draws=0)
    with pytest.raises(ConfigurationError, match="no temperature"):
        DistributionSettings("a", "b", ())
    with pytest.raises(ConfigurationError, match="leaves room"):
        prepare(DistributionSettings(str(target), str(small), prompts=prompts, max_tokens=500))


def test_rules_on_a_pair_of_distributions_by_hand():
    target, draft = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])
    found = kept_by_rule(target, draft, [np.array([3, 0, 1, 2])])
    assert found["token"] == [pytest.approx(0.6)]
    # token 3 is refused, what is left of the target is (0.3, 0, 0.1, 0) / 0.4, of the drafter (1/3, 1/2, 1/6)
    assert found["recursive"][:2] == [pytest.approx(0.0), pytest.approx(1.0)]
    assert found["match"] == pytest.approx([0.0, 0.5, 1.0])
    assert found["likeliest"] == pytest.approx([0.0, 0.3, 1.0])


def test_tokens_per_round_by_hand():
    records = [distribution((1, 1, 0, 2, 1, 1), (0.5, 0.5, 0.5, 0.5, 0.5, 0.5))]
    assert hit_rates(records) == [pytest.approx(4 / 6)]
    assert independent_tokens(records, 2) == pytest.approx(1.75)
    assert surviving_tokens(records, 2) == pytest.approx(1.75)
    # two kept and the bonus, then a miss at 3, then one kept: the last token is a bonus
    assert replayed_tokens(records, (1, 1)) == pytest.approx(6 / 3)
    assert replayed_tokens(records, (2, 2, 2)) == pytest.approx(6 / 2)
    assert replayed_tokens(records, ()) == pytest.approx(1)
