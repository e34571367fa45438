"""schemathesis over the OpenAPI description: no status 5xx, none that is not described, no body of another shape."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from serving import Running

pytestmark = pytest.mark.install

HOOKS = Path(__file__).parent / "clients" / "fuzzing_hooks.py"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = int(os.environ.get("DRAFTREE_FUZZING_EXAMPLES", "8"))


@pytest.fixture(scope="module")
def schemathesis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own."""
    place = tmp_path_factory.mktemp("fuzzing") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    installed = subprocess.run([*pip, "schemathesis>=4"], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"pip cannot install schemathesis: {installed.stderr.strip().splitlines()[-1:]}")
    return place / "bin" / "schemathesis"


def test_no_generated_request_breaks_the_description(server: Running, schemathesis: Path, http: httpx.Client) -> None:
    command = [str(schemathesis), "run", f"{server.url}/openapi.json", "--phases", "fuzzing"]
    command += ["--checks", CHECKS, "--max-examples", str(EXAMPLES), "--exclude-path", "/draftree/rounds"]
    command += ["--request-timeout", "60", "--seed", "1"]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(HOOKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    status = http.get("/draftree/status").json()
    assert status["queue"]["running"] == status["queue"]["waiting"] == 0
