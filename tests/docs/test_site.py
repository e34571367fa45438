"""The site of the documentation: navigation, links, notebooks, and no requests to other hosts."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import build_site
import pytest
from documents import ROOT, documents
from generator.site.config import config
from generator.site.navigation import Item, navigation
from generator.site.notebooks import converted
from generator.site.places import PROJECT, links, place_of, rewritten, target_of

from browser import Browser, open_browser

needs_zensical = pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra docs is missing")
LOADING = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("use", "href")}
"""Tags and attributes whose address a browser loads without a click."""
NOT_LOADED = {"canonical", "next", "prev"}
"""Relations of a link that are not loaded."""


class Addresses(HTMLParser):
    """Addresses of a page: what it loads, what it links to, and the names of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if (tag, name) in LOADING and values.get("rel") not in NOT_LOADED:
                self.loaded.append(value)
        if tag == "a" and "href" in values:
            self.linked.append(values["href"])


def addresses(page: Path) -> Addresses:
    found = Addresses()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def site(prepared: Path) -> Path:
    """The built pages."""
    assert build_site.build(prepared) == 0
    return prepared / "html"


def leaves(nav: list[Item]) -> Iterator[str]:
    for item in nav:
        for below in item.values():
            if isinstance(below, str):
                yield below
            else:
                yield from leaves(below)


def test_every_page_is_in_the_navigation_once(prepared: Path) -> None:
    nav = tomllib.loads((prepared / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    pages = [path.relative_to(prepared / "pages").as_posix() for path in (prepared / "pages").rglob("*.md")]
    assert sorted(leaves(nav)) == sorted(pages)
    assert {place_of(path.relative_to(ROOT).as_posix(), ROOT) for path in documents()} <= set(pages)


def test_links_of_the_prepared_pages_have_targets(prepared: Path) -> None:
    pages = prepared / "pages"
    missing = [
        f"{page.relative_to(pages)}: {link}"
        for page in sorted(pages.rglob("*.md"))
        for link in links(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|#", link) and not (page.parent / link.partition("#")[0]).is_file()
    ]
    assert missing == []


@needs_zensical
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    loaded = {address for page in pages for address in addresses(page).loaded}
    assert loaded
    assert [address for address in loaded if re.match(r"(?:[a-z]+:)?//", address)] == []
    for sheet in site.rglob("*.css"):
        assert re.findall(r"@import|url\(\s*['\"]?(?:[a-z]+:)?//", sheet.read_text(encoding="utf-8")) == []


@needs_zensical
def test_links_of_the_built_pages_have_targets(site: Path) -> None:
    found = {page.resolve(): addresses(page) for page in site.rglob("*.html")}
    broken = []
    for page, here in found.items():
        for link in (*here.linked, *here.loaded):
            file, _, name = link.partition("#")
            if re.match(r"[a-z]+:|//", link) or page.name == "404.html":
                continue
            target = (page.parent / file).resolve() if file else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (name and target in found and name not in found[target].names):
                broken.append(f"{page.relative_to(site.resolve())}: {link}")
    assert broken == []


@needs_zensical
def test_the_search_index_is_local_and_has_the_pages(site: Path) -> None:
    index = (site / "search.json").read_text(encoding="utf-8")
    assert "methods/verifier-coupled.html" in index
    assert "source/src/draftree" not in index


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder on a free port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


REQUESTED = "return performance.getEntriesByType('resource').map(entry => entry.name)"
FOCUSED = "!!document.activeElement.shadowRoot"
RESULTS = "/\\d results?.*Glossary/.test(document.activeElement.shadowRoot.textContent)"


@needs_zensical
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_requests_nothing_else_and_finds_pages(site: Path, scheme: str) -> None:
    with open_browser() as browser, served(site) as url:
        browser.emulate(width=1280, height=900, scheme=scheme)
        for page in ("index.html", "gallery.html", "playground-page.html"):
            browser.open(f"{url}/{page}")
            browser.wait("document.readyState === 'complete'")
            requested = browser.run(REQUESTED)
            assert requested
            assert [name for name in requested if not name.startswith(url)] == []
        search(browser, f"{url}/index.html")


SCHEME = "return getComputedStyle(document.querySelector('article img[src$=\".svg\"]')).colorScheme"


@needs_zensical
def test_figures_follow_the_scheme_that_the_reader_chose(site: Path) -> None:
    """Whatever the system prefers: the pictures of a page get the scheme of the page, and have colours for both."""
    with open_browser() as browser, served(site) as url:
        browser.emulate(width=1280, height=900, scheme="light")
        browser.open(f"{url}/gallery.html")
        browser.wait("document.readyState === 'complete'")
        for chosen, scheme in (("slate", "dark"), ("default", "light")):
            browser.run("document.body.setAttribute('data-md-color-scheme', arguments[0])", chosen)
            assert browser.run(SCHEME) == scheme
    pictures = {link for link in addresses(site / "gallery.html").loaded if link.endswith(".svg")}
    assert len(pictures) == 25
    for picture in pictures:
        assert "prefers-color-scheme: dark" in (site / picture).read_text(encoding="utf-8")


@needs_zensical
def test_the_search_works_where_pages_are_opened_as_files(site: Path) -> None:
    with open_browser() as browser:
        search(browser, (site / "methods" / "verifier-coupled.html").as_uri())


def search(browser: Browser, address: str) -> None:
    """Open a page and search for another one."""
    browser.open(address)
    key = {"type": "keyDown", "key": "k", "code": "KeyK", "modifiers": 2, "windowsVirtualKeyCode": 75}
    browser.wait("document.readyState === 'complete'")
    browser.devtools("Input.dispatchKeyEvent", **key)
    browser.wait(FOCUSED)
    browser.devtools("Input.insertText", text="glossary")
    browser.wait(RESULTS)
    assert [line for line in browser.log() if "Failed to load" in line] == []


@needs_zensical
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "zensical.toml").write_text(config([{"Home": "index.md"}]), encoding="utf-8")
    for text, fails in (("# Home\n\n[here](index.md#home)\n", False), ("# Home\n\n[gone](no.md)\n", True)):
        (tmp_path / "pages" / "index.md").write_text(text, encoding="utf-8")
        (tmp_path / "pages" / "site.css").write_text("", encoding="utf-8")
        assert (build_site.build(tmp_path) != 0) == fails


def test_a_link_to_a_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Home\n\n[gone](../src/no.py)\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"src/no\.py"):
        build_site.prepare(tmp_path / "site", tmp_path)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("docs/README.md", "index.md"),
        ("docs/methods", "methods/index.md"),
        ("docs/lossless.md", "lossless.md"),
        ("docs/playground.html", "playground.html"),
        ("README.md", PROJECT["README.md"]),
        ("benchmarks/results", "source/benchmarks/results/index.md"),
        ("benchmarks/results/smollm2-grammar.jsonl", "files/benchmarks/results/smollm2-grammar.jsonl"),
        ("src/draftree/drafters/model.py", "source/src/draftree/drafters/model.py.md"),
    ],
)
def test_places(path: str, place: str) -> None:
    assert (ROOT / path).exists()
    assert place_of(path, ROOT) == place


def test_links_are_rewritten_outside_of_code() -> None:
    text = "# T\n\n[a](../README.md#use) [b](https://x/y) [c](#t) `[d](../README.md)`\n\n```\n[e](../README.md)\n```\n"
    made = rewritten(text, "docs/lossless.md", ROOT)
    assert "[a](project/readme.md#use) [b](https://x/y) [c](#t) `[d](../README.md)`" in made
    assert "\n[e](../README.md)\n" in made
    assert links(text) == ["../README.md#use", "https://x/y", "#t"]
    assert target_of("../README.md#use", "docs/lossless.md") == "README.md"


def test_new_pages_join_the_group_of_their_folder() -> None:
    nav = navigation(["index.md", "guides/new.md", "methods/drafter-new.md", "other.md"], str)
    assert nav[0] == {"index.md": "index.md"}
    assert {"Guides": [{"More": [{"guides/new.md": "guides/new.md"}]}]} in nav
    assert {"Methods": [{"Drafters": [{"methods/drafter-new.md": "methods/drafter-new.md"}]}]} in nav
    assert {"Project": [{"More pages": [{"other.md": "other.md"}]}]} in nav


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def cell(kind: str, source: list[str], *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source, **({"outputs": outputs} if kind == "code" else {})}


def notebook(*cells: dict[str, Any], version: int = 4) -> str:
    return json.dumps({"nbformat": version, "metadata": {"language_info": {"name": "python"}}, "cells": cells})


def test_cells_and_outputs_become_markdown() -> None:
    text, pictures = converted(
        notebook(
            cell("markdown", ["# First steps\n", "\n", "Prose."]),
            cell("code", ["x = 1\n", "print(x)"], {"output_type": "stream", "text": ["1\n"]}),
            cell("code", ["x"], {"output_type": "execute_result", "data": {"text/plain": ["1"]}}),
            cell(
                "code", ["draw()"], {"data": {"image/png": base64.b64encode(PNG).decode(), "text/plain": ["<Figure>"]}}
            ),
            cell("code", ["tree()"], {"data": {"image/svg+xml": [SVG]}}),
            cell("code", ["1 / 0"], {"output_type": "error", "traceback": ["\x1b[31mZeroDivisionError\x1b[0m"]}),
            cell("raw", ["left out"]),
        ),
        "steps",
    )
    assert text.startswith("# First steps\n\nProse.\n\n````python\nx = 1\nprint(x)\n````\n\n````text\n1\n````\n")
    assert pictures == {"steps-1.png": PNG, "steps-2.svg": SVG.encode()}
    assert 'src="steps-1.png"' in text
    assert "<Figure>" not in text
    assert "ZeroDivisionError\n````" in text
    assert "\x1b" not in text
    assert "left out" not in text


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format 3"):
        converted(notebook(version=3), "old")


def test_a_notebook_is_a_page_with_its_file_and_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    drawn = cell("code", ["tree()"], {"data": {"image/svg+xml": SVG}})
    links = cell("markdown", ["# Steps\n", "[home](../README.md)"])
    (folder / "steps.ipynb").write_text(notebook(links, drawn), encoding="utf-8")
    (tmp_path / "docs" / "README.md").write_text("# Home\n\n[steps](notebooks/steps.ipynb)\n", encoding="utf-8")
    assert build_site.prepare(tmp_path / "site", tmp_path) == ["index.md", "notebooks/steps.md", "playground-page.md"]
    pages = tmp_path / "site" / "pages"
    assert "[steps](notebooks/steps.md)" in (pages / "index.md").read_text(encoding="utf-8")
    assert "[home](../index.md)" in (pages / "notebooks" / "steps.md").read_text(encoding="utf-8")
    assert (pages / "notebooks" / "steps.ipynb").is_file()
    assert (pages / "notebooks" / "steps-1.svg").read_text(encoding="utf-8") == SVG
    assert place_of("docs/notebooks/steps.ipynb", tmp_path) == "notebooks/steps.md"
