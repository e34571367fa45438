"""The playground in a real browser: one file without a network, from a real trace of a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_samples import write_model
from browser import Browser
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.lab.analysis.theory import expected_tokens, walltime_improvement
from draftree.lab.figures.playground import page_of
from page_checks import low_contrasts, tab_stops, unnamed

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("playground")
    model = write_model(home / "tiny")
    options = ["--draft", "ngram,min=1", "--plan", "fixed:4", "--no-chat", "--max-tokens", "30", "--temperature", "0"]
    assert run(["generate", str(model), PROMPT, *options, "--record", str(home / "t.jsonl")]) == 0
    return home / "t.jsonl"


@pytest.fixture(scope="module")
def page(trace: Path) -> Path:
    out = trace.with_name("page.html")
    assert run(["trace", "page", str(trace), "--output", str(out)]) == 0
    return out


@pytest.fixture
def shown(browser: Browser, page: Path) -> Browser:
    browser.open(page.as_uri())
    browser.wait("document.querySelector('#tree svg')")
    return browser


def number(browser: Browser) -> int:
    return int(browser.text("#number").split()[0])


def test_the_page_shows_the_recorded_text(shown: Browser, trace: Path) -> None:
    found = Trace.read(trace)
    steps = [step for one in found.rounds for step in one.steps]
    tokens = [token for step in steps for token in step.tokens[: step.num_written]]
    assert shown.count("#text .token") == len(tokens)
    assert shown.text("#text") == "".join(found.text_of(token) for token in tokens)
    accepted = sum(min(len(step.path), step.num_written) for step in steps)
    assert shown.count("#text .drafted") == accepted
    assert shown.count("#timeline .round") == len(found.rounds)
    assert shown.log() == []


def test_rounds_are_stepped_by_keys_and_buttons(shown: Browser, trace: Path) -> None:
    last = len(Trace.read(trace).rounds)
    shown.run("document.body.tabIndex = -1; document.body.focus()")
    assert number(shown) == 1
    shown.press("Right", "Right")
    assert number(shown) == 3
    shown.press("Left", "End")
    assert number(shown) == last
    shown.press("Right", "Home")
    assert number(shown) == 1
    shown.click("#next")
    assert number(shown) == 2
    # by an event: rounds that took little time are narrow and overlap
    click = "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    shown.run(f"{click}; document.activeElement.blur()", "#timeline .round:nth-of-type(4) .hit")
    assert number(shown) == 4
    shown.press("Space")
    assert shown.text("#play") == "Pause"
    shown.wait("Number(document.getElementById('number').textContent.split(' ')[0]) > 4")
    if shown.text("#play") == "Pause":  # else it has arrived at the end
        shown.click("#play")
    assert shown.text("#play") == "Play"


def test_the_tree_has_all_nodes_and_the_table_has_the_same(shown: Browser, trace: Path) -> None:
    for place, one in enumerate(Trace.read(trace).rounds[:6]):
        step = one.steps[0]
        shown.run("location.hash = arguments[0]", f"r={place}&t=0")
        shown.wait("document.getElementById('number').textContent.startsWith(arguments[0])", f"{place + 1} ")
        assert shown.count("#tree rect") == len(step.tree) + 2  # the root, and the target token at the end of the walk
        assert shown.count("#tree rect.accepted") == len(step.path) + 1
        shown.run("location.hash = arguments[0]", f"r={place}&t=1")
        shown.wait("document.querySelector('#tree table')")
        assert shown.count("#tree tbody tr") == len(step.tree) + 1
        assert shown.count("#tree tbody tr.accepted") == len(step.path)
        targets = shown.run(
            "return [...document.querySelectorAll('#tree tbody td:nth-child(8)')].map(e => e.textContent)"
        )
        assert sum(bool(text) for text in targets) == len(step.picks)


def test_sliders_follow_the_closed_forms_and_the_link_keeps_them(shown: Browser, page: Path) -> None:
    shown.run("location.hash = 'k=5&a=0.8&c=0.1&rtt=0&r=2'")
    shown.wait("document.getElementById('verdict').textContent.startsWith('K = 5')")
    words = shown.text("#verdict")
    assert f"{expected_tokens(0.8, 5):.2f} tokens per pass" in words
    assert f"speed-up {walltime_improvement(0.8, 5, 0.1):.2f}" in words
    shown.run("const k = document.getElementById('k'); k.value = 3; k.dispatchEvent(new Event('input'))")
    assert shown.text("#verdict").startswith("K = 3")
    link = shown.run("return location.href")
    assert "k=3" in link
    shown.open(link)
    shown.wait("document.getElementById('verdict').textContent.startsWith('K = 3')")
    assert (number(shown), shown.text("#a-value")) == (3, "0.80")
    shown.run("location.hash = 'k=nonsense&a=7&r=99999&s=-3'")
    shown.wait("document.getElementById('a-value').textContent === '0.99'")
    assert shown.text("#k-value") == "0"


def test_a_round_trip_favours_longer_drafts(shown: Browser) -> None:
    best = []
    for trip in (0, 300):
        shown.run("location.hash = arguments[0]", f"k=2&a=0.7&c=0.3&rtt={trip}")
        shown.wait("document.getElementById('rtt-value').textContent === arguments[0]", f"{trip} ms")
        best.append(int(shown.text("#verdict").split("best K = ")[1].split()[0]))
    assert best[1] > best[0]


def test_the_measured_point_is_that_of_the_trace(shown: Browser, trace: Path) -> None:
    steps = [step for one in Trace.read(trace).rounds for step in one.steps][1:]
    shown.click("#measured")
    expected = sum(step.num_written for step in steps) / len(steps)
    assert f"{expected:.2f} tokens per pass" in shown.text("#verdict").split("Measured")[1]


def test_the_page_is_accessible_in_both_schemes(shown: Browser) -> None:
    for scheme in ("light", "dark"):
        for table in (0, 1):
            shown.emulate(scheme=scheme)
            shown.run("location.hash = arguments[0]", f"t={table}&r=3")
            shown.wait("document.getElementById('as-table').checked === Boolean(arguments[0])", table)
            assert low_contrasts(shown) == []
    assert unnamed(shown) == []
    stops = tab_stops(shown)
    assert {"sequence", "file", "play", "round", "as-table", "k", "a", "c", "rtt"} <= {stop.name for stop in stops}
    assert all(stop.outline >= 2 for stop in stops)
    shown.emulate(width=390, height=800)
    assert shown.run("return document.documentElement.scrollWidth <= innerWidth")


def test_another_trace_is_loaded_and_other_files_are_refused(shown: Browser, trace: Path, tmp_path: Path) -> None:
    field = shown.find("#file")
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({"kind": "trace", "format": 99}) + "\n")
    shown.call(f"element/{field}/value", {"text": str(wrong)})
    shown.wait("!document.getElementById('error').hidden")
    assert "format 99" in shown.text("#error")
    lines = trace.read_text().splitlines()
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("\n".join([*lines[:4], lines[-1]]) + "\n")
    shown.call(f"element/{field}/value", {"text": str(shorter)})
    shown.wait("document.getElementById('number').textContent === '1 of 3'")
    assert shown.run("return document.getElementById('error').hidden")


def test_the_page_needs_no_network_and_escapes_the_trace(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines()
    last = json.loads(lines[-1])
    last["texts"][next(iter(last["texts"]))] = "</script><!-- <b>"
    hostile = tmp_path / "hostile.jsonl"
    hostile.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    page = page_of(hostile)
    assert "</script><!--" not in page
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page
    assert "src=" not in page.replace("http-equiv", "")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(lines[0] + "\n")
    with pytest.raises(ConfigurationError, match="has no rounds"):
        page_of(empty)
