"""The load of a scripted server on the page: metrics, rates, refusals."""

from __future__ import annotations

import re

import pytest

from browser import Browser
from fake_serving import KEY, fake_server
from page_visits import visit

pytestmark = pytest.mark.usefixtures("clean_log")


def test_load_shows_queue_models_and_history(browser: Browser, url: str) -> None:
    visit(browser, url, "mode=load")
    browser.wait("document.querySelectorAll('.sparkline polyline').length === 2")
    text = browser.text("#load")
    for word in (
        "Running requests2",
        "Places taken4 of 32",
        "Waiting requests5 of 64",
        "fake-model",
        "Running texts1",
        "Waiting texts3",
    ):
        assert word in text
    for word in ("Tokens per drafted round3.90", "Drafts accepted58 %"):
        assert word in text
    rates = re.findall(r"(Tokens|Requests)/s(\d+(?:\.\d+)?)", text)
    assert [name for name, _ in rates] == ["Tokens", "Requests", "Tokens", "Requests"]
    # both counters of a rate are from the same two readings: 60 tokens and 3 requests in each
    assert float(rates[2][1]) == pytest.approx(20 * float(rates[3][1]), rel=0.02)
    assert "1000000000" not in text
    assert browser.run("return document.getElementById('composer').hidden")


def test_load_has_no_rates_before_the_second_reading(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.run("window.setTimeout = () => 0")
    browser.click("#tab-load")
    browser.wait("document.querySelector('#load .served')")
    for word in ("Running texts1", "Tokens/s–", "Requests/s–", "Drafts accepted–"):
        assert word in browser.text("#load")


def test_refused_metrics_are_an_error_in_words(browser: Browser) -> None:
    with fake_server(hides_metrics=True) as served:
        visit(browser, served, "mode=load")
        browser.wait("document.querySelector('#load .served')")
        words = "The load is not known. /metrics was refused with status 403. Metrics are for the operator."
        assert browser.text("#load [role=alert]") == words
        assert "drafts: ngram, suffix" in browser.text("#load")
        assert "Running texts–" in browser.text("#load")


def test_load_sends_the_key_with_the_request_for_metrics(browser: Browser) -> None:
    with fake_server(key=KEY) as served:
        visit(browser, served, "mode=load")
        browser.wait("!document.querySelector('#load .alert').hidden")
        assert "Enter a valid API key" in browser.text("#load .alert")
        browser.click("#tab-chat")
        browser.run("document.getElementById('key').focus()")
        browser.write(KEY)
        browser.press("Tab")
        browser.click("#tab-load")
        browser.wait("document.querySelector('#load .alert').hidden && document.querySelector('#load .served')")
        assert "Waiting texts3" in browser.text("#load")
