"""The cache: folders appear complete or not at all."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from draftree.core.errors import WeightsError
from draftree.weights import cache as cache_module
from draftree.weights.cache import Cache, require_space


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def fill(cache: Cache, name: str, text: str = "content", **origin: object) -> None:
    with cache.locked(name), cache.publish(name, origin) as folder:
        (folder / "file").write_text(text)


def unfinished(cache: Cache) -> list[str]:
    return [path.name for path in cache.work.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DRAFTREE_CACHE": "/own", "XDG_CACHE_HOME": "/shared"}, Path("/own")),
        ({"DRAFTREE_CACHE": "", "XDG_CACHE_HOME": "/shared"}, Path("/shared/draftree")),
        ({}, Path("/home/of/user/.cache/draftree")),
    ],
)
def test_the_root_comes_from_the_environment(
    environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DRAFTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/of/user")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Cache().root == expected


def test_a_published_folder_holds_its_files_and_its_origin(cache: Cache) -> None:
    fill(cache, "one", sha256="abc")
    assert (cache.folder("one") / "file").read_text() == "content"
    assert cache.names() == ["one"]
    assert cache.holds("one", {"sha256": "abc"})
    assert not cache.holds("one", {"sha256": "other"})
    assert not cache.holds("two", {})
    assert unfinished(cache) == []


def test_publishing_again_replaces_the_whole_folder(cache: Cache) -> None:
    fill(cache, "one", "old", version=1)
    (cache.folder("one") / "stray").write_text("of the old one")
    fill(cache, "one", "new", version=2)
    assert (cache.folder("one") / "file").read_text() == "new"
    assert not (cache.folder("one") / "stray").exists()
    assert unfinished(cache) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ValueError("a fault"), OSError(errno.EACCES, "denied")])
def test_an_interrupted_publication_leaves_nothing_and_keeps_the_old(cache: Cache, interruption: BaseException) -> None:
    fill(cache, "one", "old")
    with pytest.raises(type(interruption)), cache.locked("one"), cache.publish("one", {}) as folder:
        (folder / "file").write_text("half")
        raise interruption
    assert (cache.folder("one") / "file").read_text() == "old"
    assert unfinished(cache) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_and_leaves_nothing(cache: Cache, code: int) -> None:
    with pytest.raises(WeightsError, match=r"became full while 'one' was being built \(\d+ MB free\)"):  # noqa: SIM117
        with cache.locked("one"), cache.publish("one", {}) as folder:
            (folder / "file").write_text("half")
            raise OSError(code, "full")
    assert cache.names() == []
    assert unfinished(cache) == []


def test_work_that_does_not_fit_is_refused_before_its_start(tmp_path: Path) -> None:
    require_space("small", tmp_path, 1)
    with pytest.raises(WeightsError, match=rf"'huge' needs 1000000000000 MB .*'{tmp_path}' has \d+ MB free"):
        require_space("huge", tmp_path, 10**18)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(WeightsError, match=r"cannot be written .*set DRAFTREE_CACHE"),
        Cache(tmp_path / "file").locked("x"),
    ):
        pytest.fail("locked a folder that cannot exist")


def test_leftovers_of_a_dead_process_are_removed_under_the_lock(cache: Cache) -> None:
    leftover = cache.work / "one.part-dead"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("half")
    with cache.locked("one"):
        assert not leftover.exists()


def test_a_sweep_spares_the_work_of_the_living(cache: Cache) -> None:
    (cache.work / "dead.part-1").mkdir(parents=True)
    with cache.locked("alive"), cache.scratch("alive") as scratch:
        sweeper = threading.Thread(target=cache.sweep)
        sweeper.start()
        sweeper.join()
        assert scratch.exists()
        assert not (cache.work / "dead.part-1").exists()


def test_of_several_workers_on_one_name_one_works_and_the_others_wait(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    deadline = time.monotonic() + 600

    def work() -> None:
        with cache.locked("one"):
            if not cache.holds("one", {}):
                with cache.publish("one", {}) as folder:
                    while caplog.text.count("waiting for it") < 2 and time.monotonic() < deadline:
                        time.sleep(0.01)
                    (folder / "file").write_text("content")
                    done.append("made")
            else:
                done.append("found")

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert done == ["made", "found", "found"]
    assert caplog.text.count("waiting for it") == 2


def test_removing_returns_whether_there_was_a_folder(cache: Cache) -> None:
    fill(cache, "one")
    assert cache.remove("one")
    assert not cache.remove("one")
    assert cache.names() == []
    assert unfinished(cache) == []


def test_a_folder_is_on_the_disk_before_it_appears(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    appeared_before: list[bool] = []

    def record(path: Path) -> None:
        synced.append(path.name)
        appeared_before.append(cache.folder("one").exists())

    monkeypatch.setattr(cache_module, "sync", record)
    fill(cache, "one")
    assert {"file", "draftree.json", "fresh"} <= set(synced)
    assert appeared_before == [False] * (len(synced) - 1) + [True]


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_folder_with_a_damaged_manifest_counts_as_absent(cache: Cache, text: str) -> None:
    fill(cache, "one")
    (cache.folder("one") / "draftree.json").write_text(text)
    assert cache.manifest("one") is None
    assert not cache.holds("one", {})
