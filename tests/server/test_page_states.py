"""States of the page that need a scripted server: branching trees, errors, differences, slow answers."""

from __future__ import annotations

import math
from urllib.parse import quote

import pytest

from browser import Browser
from fake_serving import KEY, MODEL, TEXT, fake_server
from page_visits import ANSWER, IDLE, send, visit

pytestmark = pytest.mark.usefixtures("clean_log")


def test_the_text_is_shown_whole_with_origins_and_counts(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello&seed=4")
    send(browser)
    assert browser.text(ANSWER) == TEXT
    drafted, picked = browser.count(f"{ANSWER} .drafted"), browser.count(f"{ANSWER} .picked")
    assert drafted > 20
    assert picked > 20
    assert browser.text("#legend") == f"token drafted and accepted: {drafted}token picked by the target: {picked}"
    assert browser.text("#stat-rounds") == str(picked)
    assert browser.text("#explain") == MODEL["explain"]
    assert browser.text("#speed") == "58.9"


def test_origins_differ_without_colour(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    style = "return getComputedStyle(document.querySelector(arguments[0])).textDecorationStyle"
    assert browser.run(style, f"{ANSWER} .drafted") == "solid"
    assert browser.run(style, f"{ANSWER} .picked") == "dotted"


def test_every_outcome_of_a_round_is_drawn_and_listed(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    browser.run("document.querySelector(arguments[0]).focus()", ANSWER)
    while not browser.count(".tree .node.accepted") or not browser.count(".tree .node.rejected"):
        browser.press("Down")
    nodes = browser.count(".tree .node.accepted") + browser.count(".tree .node.rejected")
    assert browser.count(".tree .node.pick") == browser.count(".tree .node.root") == 1
    assert browser.count(".tree .edge") == nodes + 1
    assert browser.count("#round-table tbody tr") == nodes + 1
    assert browser.text("#round-words") == browser.run("return document.querySelector('.tree').ariaLabel")
    accepted = browser.count(".tree .node.accepted")
    assert browser.text("#round-words").startswith(f"{accepted} of {nodes} drafted tokens accepted")


def test_pointing_at_a_piece_shows_its_round(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    browser.hover(f"{ANSWER} .piece:nth-child(12)")
    shown = browser.text(f"{ANSWER} .piece.current")
    assert shown == browser.text(f"{ANSWER} .piece:nth-child(12)")
    marked = browser.run("return [...document.querySelectorAll('.in-round')].map((e) => e.textContent)")
    titles = browser.run(
        "return [...document.querySelectorAll('.node.accepted title, .node.pick title')].map((e) => e.textContent)"
    )
    assert [text.replace(" ", "␣") for text in marked] == [title.split("\n")[0] for title in titles]


def test_steps_through_rounds_with_buttons(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    last = int(browser.text("#stat-rounds"))
    assert browser.text("#round-title") == f"Round {last} of {last}"
    assert browser.run("return document.getElementById('round-next').disabled")
    browser.click("#round-previous")
    assert browser.text("#round-title") == f"Round {last - 1} of {last}"
    assert f"Round {last - 1}." in browser.text("#announcements")


def test_depth_bars_name_their_numbers(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    rows = browser.run("return [...document.querySelectorAll('#depths li')].map((e) => e.innerText.split(/\\s+/))")
    assert len(rows) >= 4
    for depth, row in enumerate(rows, 1):
        share, accepted, reached = int(row[1]), int(row[3]), int(row[5])
        assert int(row[0]) == depth
        assert share == math.floor(100 * accepted / reached + 0.5)


def test_streamed_text_is_announced_in_sentences(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    lines = browser.run("return [...document.querySelectorAll('#announcements p')].map((e) => e.textContent)")
    assert len(lines) >= 5
    assert " ".join(lines).split() == TEXT.split()


def test_plain_decoding_is_measured_on_request(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello&seed=3")
    send(browser)
    assert browser.text("#ratio") == "plain speed not measured yet"
    browser.click("#measure-plain")
    browser.wait(IDLE)
    assert browser.text("#ratio").startswith("1.90× plain (31.0 tokens/s). ✓ Identical")


def test_a_difference_is_shown_where_it_begins(browser: Browser, url: str) -> None:
    visit(browser, url, "mode=compare&prompt=differ")
    send(browser)
    at = TEXT.index("close at hand") + 1
    assert browser.text(".verdict strong") == f"✕ Different from character {at}"
    assert "near" in browser.text(".verdict")
    assert "close at hand" in browser.text(".verdict")


@pytest.mark.parametrize("order", ["sequence", "together"])
def test_identical_texts_are_found_identical(browser: Browser, url: str, order: str) -> None:
    visit(browser, url, f"mode=compare&prompt=same&order={order}&format=complete")
    send(browser)
    assert browser.text(".verdict strong") == f"✓ Identical: all {len(TEXT)} characters are the same"
    assert browser.count(".side:nth-child(1) .plain") == browser.count(".side:nth-child(1) .piece")
    assert "1.90×" in browser.text(".verdict")
    assert ("shared the machine" in browser.text(".verdict")) == (order == "together")


def test_a_comparison_that_is_stopped_has_no_verdict(browser: Browser, url: str) -> None:
    visit(browser, url, "mode=compare&prompt=slow")
    browser.click("#send")
    browser.wait("document.querySelectorAll('.side:nth-child(2) .piece').length > 2")
    assert browser.count(".side:nth-child(1) .piece") == 0
    browser.press("Escape")
    browser.wait(IDLE)
    assert browser.text(".verdict strong") == "No verdict: a text was stopped before its end"


def test_a_repeated_comparison_names_the_advantage_of_memory(browser: Browser, url: str) -> None:
    visit(browser, url, "mode=compare&prompt=again")
    send(browser)
    assert "compared before" not in browser.text(".verdict")
    send(browser)
    assert "compared before" in browser.text(".verdict")


def test_stop_ends_the_request_and_keeps_the_text(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=slow")
    browser.click("#send")
    browser.wait(f"document.querySelectorAll('{ANSWER} .piece').length > 2")
    assert browser.run("return document.activeElement.id") == "stop-run"
    browser.press("Escape")
    browser.wait(IDLE)
    text = browser.text(ANSWER)
    assert TEXT.startswith(text)
    assert 0 < len(text) < len(TEXT)
    assert "stopped" in browser.text(".meta")
    assert browser.run("return document.getElementById('error').hidden")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("busy", "The queue is full. Try again in 7 s."), ("fail", "The model failed."), ("%20", "Write a prompt first.")],
)
def test_errors_are_shown_and_the_prompt_is_kept(browser: Browser, url: str, prompt: str, words: str) -> None:
    visit(browser, url, f"prompt={prompt}")
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert browser.text("#error") == words
    assert browser.run("return document.getElementById('error').getAttribute('role')") == "alert"
    browser.wait(IDLE)
    assert quote(browser.run("return document.getElementById('prompt').value")) == prompt


def test_a_key_is_asked_for_kept_in_the_tab_and_never_in_the_link(browser: Browser) -> None:
    with fake_server(key=KEY) as guarded:
        visit(browser, guarded, "prompt=hello")
        browser.wait("!document.getElementById('error').hidden")
        assert "Enter a valid API key" in browser.text("#error")
        browser.click("#key")
        browser.write(KEY)
        browser.press("Tab")
        browser.wait("document.getElementById('model').value !== ''")
        assert browser.run("return document.getElementById('error').hidden")
        send(browser)
        assert browser.text(ANSWER) == TEXT
        assert KEY not in browser.run("return location.href + JSON.stringify(localStorage) + document.cookie")
        assert KEY in browser.run("return JSON.stringify(sessionStorage)")


def test_a_server_that_is_gone_is_named(browser: Browser) -> None:
    with fake_server() as served:
        visit(browser, served, "prompt=hello")
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert browser.text("#error") == "The server cannot be reached. Check that it is running."
