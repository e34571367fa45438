"""The page of a server with API keys, in a browser, and without one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from browser import Browser, open_browser
from serving import NAME, running_server, settings

KEY, WRONG = "key-of-the-test", "another-key-that-is-wrong"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with running_server(settings_given=settings(api_key_file=str(keys))) as running:
        yield running.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def enter(browser: Browser, key: str) -> None:
    browser.run("document.getElementById('key').value = ''; document.getElementById('key').focus()")
    browser.write(key)
    browser.press("Tab")


def test_a_wrong_key_is_an_error_in_words_and_the_right_one_removes_it(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#prompt=hello&max_tokens=12&seed=1")
    browser.wait("document.getElementById('error').textContent.includes('no API key was sent')")
    browser.run("document.getElementById('error').textContent = ''")
    enter(browser, WRONG)
    browser.wait("document.getElementById('error').textContent !== ''")
    words = "The API key is not known to this server: check it. Enter a valid API key in the settings."
    assert browser.text("#error") == words
    assert "not connected" in browser.text("#connection")
    enter(browser, KEY)
    browser.wait("document.getElementById('model').value !== ''")
    assert browser.run("return document.getElementById('error').hidden")
    assert browser.run("return document.getElementById('model').value") == NAME
    browser.click("#send")
    browser.wait("document.getElementById('stop-run').hidden && document.querySelector('#log .meta')")
    assert browser.count("#log .piece") > 0
    assert KEY not in browser.run("return location.href + JSON.stringify(localStorage) + document.cookie")


def test_the_page_needs_no_key_and_what_it_shows_does(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for path in ("/", "/page/app.js", "/page/theme.css"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert answer.headers.get_list("content-security-policy")[0].startswith("default-src 'self';")
            assert len(answer.headers.get_list("content-security-policy")) == 1
        assert http.get("/draftree/status").status_code == 401


def test_the_page_can_be_left_out() -> None:
    with running_server(settings_given=settings(page=False)) as running:
        assert httpx.get(f"{running.url}/").status_code == 404
        assert httpx.get(f"{running.url}/page/app.js").status_code == 404
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
