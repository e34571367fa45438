"""Folders of captured data: continued after any interruption, damaged ones found, several read together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_samples import capture_of, contents, prompts, table
from draftree.core.errors import ConfigurationError
from draftree.engine.engine import Engine
from draftree.train.data.reading import TrainingData

SMALL: dict[str, Any] = {"shard_megabytes": 1, "max_tokens": 40}


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("limit", [None, 300])
def test_an_interrupted_capture_continues_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    settings: dict[str, Any] = {**SMALL, "limit_tokens": limit, "temperatures": (0.0, 0.7, 1.0)}
    rows = 95  # of a shard: several shards
    monkeypatch.setattr("draftree.train.data.settings.MEGABYTE", rows * capture_of(**settings).row_bytes)
    monkeypatch.setattr("draftree.train.data.capture.MEGABYTE", rows * capture_of(**settings).row_bytes)
    capture_of(**settings).run(tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    assert len(wanted) >= 4
    step, runs = Engine.step, 0
    cut = tmp_path / "cut"
    while not (cut / "manifest.json").exists() or not TrainingData(cut).folders[0].manifest.complete:
        runs += 1
        left = 10 + 7 * runs

        def dying(self: Engine) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return step(self)

        monkeypatch.setattr(Engine, "step", dying)
        try:
            capture_of(**settings).run(tmp_path / "cut")
        except KeyboardInterrupt:
            data = TrainingData(tmp_path / "cut")
            assert not data.folders[0].manifest.complete
            assert len(list(data)) == data.folders[0].manifest.num_texts
        assert runs < 30
    assert runs >= 4
    assert contents(tmp_path / "cut") == wanted


@pytest.mark.parametrize("victim", ["write_atomically", "sum_of", "save_file"])
def test_a_kill_while_a_file_is_written_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The process ends at every call of a step of writing: nothing after it runs."""
    import draftree.train.data.writing as writing

    monkeypatch.setattr("draftree.train.data.capture.MEGABYTE", 95 * capture_of().row_bytes)
    monkeypatch.setattr("draftree.train.data.capture.SAVE_SECONDS", 0.0)
    settings: dict[str, Any] = {"max_tokens": 30, "shard_megabytes": 1}
    capture_of(**settings).run(tmp_path / "whole")
    wanted, original = contents(tmp_path / "whole"), getattr(writing, victim)
    for when in (0, 1, 2, 5):
        folder, left = tmp_path / f"cut {when}", [None] * when

        def dying(*args: Any, left: list[None] = left) -> Any:
            if not left:
                raise Killed  # a process that has ended writes nothing
            left.pop()
            return original(*args)

        monkeypatch.setattr(writing, victim, dying)
        with pytest.raises(Killed):
            capture_of(**settings).run(folder)
        monkeypatch.setattr(writing, victim, original)
        (folder / "shard-00000.safetensors.part").write_bytes(b"left over")
        assert TrainingData(folder).folders[0].manifest.num_texts >= 0, "what is there is sound"
        capture_of(**settings).run(folder)
        assert contents(folder) == wanted


def test_a_complete_folder_grows_to_a_larger_limit(tmp_path: Path) -> None:
    capture_of(limit_tokens=60).run(tmp_path / "grown")
    first = TrainingData(tmp_path / "grown")
    assert 60 <= first.num_tokens < 60 + 40
    again = capture_of(limit_tokens=60).run(tmp_path / "grown")
    assert again == first.folders[0].manifest, "nothing is added to a complete folder"
    capture_of(limit_tokens=150).run(tmp_path / "grown")
    capture_of(limit_tokens=150).run(tmp_path / "whole")
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 13}, "max_tokens is 13, and was 12"),
        ({"seed": 1}, "seed is 1, and was 0"),
        ({"features": "1"}, r"features is \(1,\), and was \(0, 2, 1\)"),
        ({"model": table(6)}, "fingerprint is 'table 6', and was 'table 5'"),
        ({"sets": [prompts(11)]}, r"prompts is own \(11, \w+\), and was own \(12, \w+\)"),
    ],
)
def test_another_recipe_does_not_continue_a_folder(tmp_path: Path, changes: Any, message: str) -> None:
    capture_of(limit_tokens=30).run(tmp_path)
    with pytest.raises(ConfigurationError, match=f"cannot be continued: {message}; repeat the options"):
        capture_of(**changes).run(tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("own")
    with pytest.raises(ConfigurationError, match=r"holds other files \('notes.txt'\)"):
        capture_of().run(tmp_path)


def test_damaged_data_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no training data"):
        TrainingData(tmp_path)
    capture_of(limit_tokens=40).run(tmp_path / "data")
    shard = tmp_path / "data" / TrainingData(tmp_path / "data").folders[0].manifest.shards[0].file
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is damaged: its SHA-256 checksum is"):
        TrainingData(tmp_path / "data")
    assert len(TrainingData(tmp_path / "data", verify=False))
    shard.write_bytes(content[:50])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TrainingData(tmp_path / "data", verify=False)[0]
    shard.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        TrainingData(tmp_path / "data")
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigurationError, match="has version 2, and this program reads version 1"):
        TrainingData(tmp_path / "data")


def test_folders_are_read_together(tmp_path: Path) -> None:
    capture_of(features="0,1").run(tmp_path / "first")
    capture_of(features="0,1", seed=1, temperatures=(0.5,)).run(tmp_path / "second")
    one, other = (TrainingData(tmp_path / name) for name in ("first", "second"))
    both = TrainingData(tmp_path / "first", tmp_path / "second")
    assert len(both) == len(one) + len(other)
    assert both.num_tokens == one.num_tokens + other.num_tokens
    assert [folder.texts for folder in both.folders] == [range(len(one)), range(len(one), len(both))]
    for text, wanted in zip(both, [*one, *other], strict=True):
        assert torch.equal(text.tokens, wanted.tokens)
        assert torch.equal(text.features, wanted.features)
    assert both.prompt_ids() == one.prompt_ids() + other.prompt_ids()
    assert torch.equal(both.counts(), one.counts() + other.counts())
    assert both.recipe.prompts == one.recipe.prompts + other.recipe.prompts


def test_folders_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    capture_of(features="0,1", limit_tokens=40).run(tmp_path / "first")
    capture_of(features="1", limit_tokens=40).run(tmp_path / "second")
    with pytest.raises(ConfigurationError, match=r"second' does not fit '.*first': features is .*, and was .* there"):
        TrainingData(tmp_path / "first", tmp_path / "second")
    with pytest.raises(ConfigurationError, match=r"first/../first' is given twice"):
        TrainingData(tmp_path / "first", tmp_path / "first" / ".." / "first")
    with pytest.raises(ConfigurationError, match="no folder of training data was given"):
        TrainingData()


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    capture, refused = capture_of(), []

    def other(progress: object) -> None:
        with pytest.raises(ConfigurationError, match="another process writes data to"):
            capture_of().run(tmp_path / "data")
        refused.append(progress)

    manifest = capture.run(tmp_path / "data", on_progress=other)
    assert refused
    assert manifest.complete
    assert capture_of().run(tmp_path / "data") == manifest
