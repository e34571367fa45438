"""The container file and the systemd unit: what they name exists, and their times and addresses fit the server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from draftree.core.errors import EXTRAS
from draftree.serve.api import status
from draftree.serve.settings import ModelChoice, ServerSettings

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "Containerfile"
UNIT = ROOT / "deploy" / "systemd" / "draftree.service"
DEFAULTS = ServerSettings(models=(ModelChoice("m", "m"),))


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file: name and rest, continued lines joined."""
    text = "\n".join(line for line in CONTAINER.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_container_file_has_known_instructions_and_begins_with_an_image() -> None:
    known = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    names = [name for name, _ in instructions()]
    assert set(names) <= known | {"ENTRYPOINT", "CMD"}
    assert next(name for name in names if name != "ARG") == "FROM"
    for name in ("USER", "VOLUME", "HEALTHCHECK", "ENTRYPOINT", "CMD"):
        assert names.count(name) == 1


def test_copied_files_exist_and_extras_are_known() -> None:
    for copied in of("COPY"):
        *sources, _ = copied.split()
        assert sources
        for source in sources:
            assert (ROOT / source).exists(), source
    (extras,) = (shlex.split(arg)[0].removeprefix("EXTRAS=") for arg in of("ARG") if arg.startswith("EXTRAS"))
    assert set(extras.split(",")) <= set(EXTRAS)


def test_the_container_runs_as_an_ordinary_user_with_a_cache_that_it_owns() -> None:
    names = [name for name, _ in instructions()]
    assert of("USER") == ["10001"]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    (volume,) = of("VOLUME")
    assert f"chown draftree {volume}" in " ".join(of("RUN"))
    assert f"DRAFTREE_CACHE={volume}" in " ".join(of("ENV"))


def test_the_health_check_asks_the_port_of_the_server() -> None:
    (check,) = of("HEALTHCHECK")
    ((port, path),) = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", check)
    assert int(port) == DEFAULTS.port == int(of("EXPOSE")[0])
    assert path in {route.path for route in status.router.routes}  # type: ignore[attr-defined]


def test_the_unit_waits_longer_than_the_drain() -> None:
    (seconds,) = unit()["TimeoutStopSec"]
    assert float(seconds) >= DEFAULTS.drain_timeout + 10
    assert unit()["KillSignal"] == ["SIGTERM"]
    assert unit()["EnvironmentFile"] == ["/etc/draftree/draftree.env"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "draftree"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/draftree/bin/draftree", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    score = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(copy)], capture_output=True, text=True, check=False
    )
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", score.stdout)
    assert exposure is not None, score.stderr
    assert float(exposure[1]) < 3
