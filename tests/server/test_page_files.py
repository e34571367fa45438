"""The files of the page: complete, from their own origin only, and served with a strict policy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from draftree.serve.page import FOLDER, MEDIA_TYPES, mount, read_files

MODULES = Path(__file__).parent / "page"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    mount(app)
    return TestClient(app)


def test_every_file_is_served_with_its_type_and_policy(client: TestClient) -> None:
    assert {path.name for path in FILES} == set(read_files())
    for path in FILES:
        answer = client.get("/" if path.name == "index.html" else f"/page/{path.name}")
        assert answer.status_code == 200
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_known_version_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/")
    again = client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/__init__.py", "/page/../__init__.py", "/page/%2e%2e/__init__.py", "/page/", "/page"]
)
def test_other_paths_are_not_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_only_reading_is_allowed(client: TestClient) -> None:
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405


def test_the_page_is_not_in_the_description_of_the_api(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


def test_no_other_origin_is_named() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
        assert re.findall(r"(?:https?:|wss?:)?//[a-z0-9]", text) == [], path.name


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\ssrc=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []


def test_every_import_and_link_exists() -> None:
    names = set(read_files())
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        linked = re.findall(r'from "\./([^"]+)"', text) + re.findall(r'(?:src|href)="page/([^"]+)"', text)
        assert set(linked) <= names, path.name


def test_modules_of_the_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; Debian: apt-get install nodejs")
    tests = sorted(map(str, MODULES.glob("*.test.mjs")))
    assert tests
    done = subprocess.run([node, "--test", *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(?:#|ℹ) pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= len(tests)
