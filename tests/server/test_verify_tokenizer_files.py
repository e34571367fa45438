"""Tokenizer files of a verify server: a device fetches them once, and again if they have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ModelLoadError
from draftree.remote import transport
from draftree.remote.tokenizers import files_digest, install_files, kept_digests
from draftree.serve.verify.settings import VerifySettings
from serving import NAME, Running, running_server

FILES = {"tokenizer.json": json.dumps({"version": "1.0"}), "chat_template.jinja": "{{ messages }}"}


def sent(model: str, files: dict[str, str]) -> bytes:
    return json.dumps({"model": model, "files": files}).encode()


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Bodies of the tokenizer's files that were received; the cache is empty."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)
    found, fetch = list[bytes](), transport.fetch

    def counted(*given: Any, **options: Any) -> bytes:
        found.append(fetch(*given, **options))
        return found[-1]

    monkeypatch.setattr(transport, "fetch", counted)
    return found


def text_of(server: Running) -> str:
    llm = LLM(f"remote:{server.url}", None)
    try:
        return llm.generate("The quick brown", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0].text
    finally:
        llm.model.disconnect()


def test_files_are_sent_once(bodies: list[bytes], tmp_path: Path) -> None:
    with running_server(verify=VerifySettings()) as server:
        first, second = text_of(server), text_of(server)
        assert first == second
        assert len(bodies[0]) > 1000 > len(bodies[1])
        (folder,) = (tmp_path / "cache" / "remote").iterdir()
        (folder / "complete").unlink()
        assert text_of(server) == first
        assert bodies[2] == bodies[0], "a folder that was not completed does not count"
        folder.rename(folder.with_name(f"{NAME}-{'0' * 32}"))
        assert text_of(server) == first
        assert bodies[3] == bodies[0], "other files do not count"


def test_folders_of_other_models_do_not_count(tmp_path: Path) -> None:
    changed = FILES | {"chat_template.jinja": "{{ messages[0] }}"}
    for model, files in (("tiny", FILES), ("tiny", changed), ("tiny-b", FILES), ("a/b", FILES)):
        folder = install_files(sent(model, files), tmp_path)
        assert (folder / "chat_template.jinja").read_text() == files["chat_template.jinja"]
    assert set(kept_digests("tiny", tmp_path)) == {files_digest(FILES), files_digest(changed)}
    assert kept_digests("tiny-b", tmp_path) == kept_digests("a/b", tmp_path) == [files_digest(FILES)]
    assert kept_digests("other", tmp_path) == []
    known = json.dumps({"model": "tiny", "known": files_digest(FILES)}).encode()
    assert install_files(known, tmp_path) == install_files(sent("tiny", FILES), tmp_path)


@pytest.mark.parametrize("known", ["0" * 32, "../../etc", 7, "", None])
def test_digests_of_files_that_are_not_there_are_refused(tmp_path: Path, known: Any) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer=FOLDER"):
        install_files(json.dumps({"model": "tiny", "known": known}).encode(), tmp_path)
