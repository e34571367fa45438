"""The provenance of the numbers, without a host name or a folder of this machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import draftree
from bench_samples import write_model
from draftree.core.files import shown_name
from draftree.loading.provenance import OF_A_HOOK, checkout, load_average, machine, model_facts, now, versions
from private_cache import private_cache


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=t", "-c", "user.email=t@t"]
    own = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # no signing, no hooks
    subprocess.run(["git", *author, *arguments], cwd=folder, env=own | settings, check=True, capture_output=True)


def test_facts_name_no_host_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    for name, value in {"HOME": "/home/of-somebody", "USER": "of-somebody", "HOSTNAME": "of-somebody"}.items():
        monkeypatch.setenv(name, value)
    for module, name in ((platform, "node"), (socket, "gethostname"), (socket, "getfqdn")):
        monkeypatch.setattr(module, name, lambda *_: "of-somebody")
    folder = write_model(tmp_path / "tiny")
    facts = json.dumps([machine(torch.device("cpu")), versions(), model_facts(str(folder), folder), now()])
    assert "of-somebody" not in facts
    assert str(tmp_path) not in facts
    assert str(Path(draftree.__file__).parent) not in facts


def test_the_machine_is_described():
    facts = machine(torch.device("cpu"))
    assert facts["cpu"]
    assert facts["usable_cores"] >= 1
    assert facts["memory_gib"] is None or facts["memory_gib"] > 0
    assert "gpu" not in facts
    assert versions()["torch"] == torch.__version__
    assert load_average() is None or len(load_average() or []) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
def test_the_commit_is_known_in_a_checkout_only(tmp_path, monkeypatch):
    package = tmp_path / "src" / "draftree"
    package.mkdir(parents=True)
    assert checkout(package) == {"commit": None, "dirty": None}
    git(tmp_path, "init", "-q")
    (package / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    clean = checkout(package)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "results.jsonl").write_text("{}")
    assert checkout(package)["dirty"] is False  # what was measured is the package
    (package / "a.py").write_text("2")
    assert checkout(package) == {**clean, "dirty": True}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert checkout(package)["commit"] == clean["commit"], "a hook's variables must not select its repository"
    monkeypatch.delenv("GIT_DIR")
    installed = tmp_path / "venv" / "draftree"
    installed.mkdir(parents=True)
    assert checkout(installed) == {"commit": None, "dirty": None}


def test_a_fingerprint_is_of_the_content(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    one, same = write_model(tmp_path / "one"), write_model(tmp_path / "same")
    other = write_model(tmp_path / "other", seed=1)
    facts = [model_facts(str(folder), folder) for folder in (one, same, other)]
    assert [fact["name"] for fact in facts] == ["one", "same", "other"]
    assert facts[0]["sha256"] == facts[1]["sha256"] != facts[2]["sha256"]


def test_names_are_shown_without_folders(tmp_path):
    assert shown_name(str(tmp_path)) == tmp_path.name
    assert shown_name("stories15m") == "stories15m"
    assert shown_name("owner/name") == "owner/name"
