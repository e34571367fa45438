"""The page in a browser with the server: a real model, and API keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from browser import Browser
from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from operated import paused, wait_for
from real_weights import folder_of
from serving import HTTP, Running, running_server, settings, slow_rounds, tiny_async_llm
from serving import NAME as TINY

NAME = "smollm2-135m-instruct"
PROMPT = "Repeat this line five times: red, green, blue, red, green, blue, red, green, blue."
IDLE = "document.getElementById('stop-run').hidden"
KEY = "key-of-the-test"
TEXT = ".view:not([hidden]) .text"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A real model with drafts of fixed size, so that every run drafts; and a tiny one with the default planner."""
    folder_of(NAME)
    real = AsyncLLM(NAME, ("ngram", "suffix"), plan="fixed,k=5", dtype="float32", device="cpu")
    models = [ServedModel(NAME, real, ()), ServedModel(TINY, tiny_async_llm(), ())]
    with running_server(models) as found:
        yield found


def visit(browser: Browser, url: str, *, prompt: str = PROMPT, seed: int = 3, **state: object) -> None:
    fragment = httpx.QueryParams({"max_tokens": 48, "temperature": 0, "prompt": prompt, "seed": seed} | state)
    browser.emulate(width=1600)
    browser.open(f"{url}/#{fragment}")
    browser.wait("document.getElementById('model').value !== ''")


def wait_for_text(browser: Browser) -> None:
    either = f"document.querySelector('{TEXT}') || !document.getElementById('error').hidden"
    browser.wait(f"{IDLE} && ({either})")
    assert browser.run("return document.getElementById('error').hidden"), browser.text("#error")


def send(browser: Browser) -> None:
    browser.click("#send")
    wait_for_text(browser)


def show_source(browser: Browser) -> None:
    """Show an answer as written: a formatted one has elements for parts of pieces, and none for syntax."""
    browser.click(".meta button:nth-of-type(2)")


def expected(url: str, *, draft: str, path: str = "chat/completions", **content: object) -> str:
    """The text of the same request to the API."""
    body: dict[str, object] = {"model": NAME, "max_tokens": 48, "seed": 3, "temperature": 0, "draft": draft} | content
    choice = HTTP.post(f"{url}/v1/{path}", json=body).json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.weights
def test_an_answer_streams_in_pieces_of_known_origin(browser: Browser, running: Running) -> None:
    url = running.url
    visit(browser, url)
    with paused(running, rounds=6):
        browser.click("#send")
        browser.wait(f"document.querySelectorAll('{TEXT} .piece').length > 3 && !{IDLE}")
    wait_for_text(browser)
    show_source(browser)
    messages = [{"role": "user", "content": PROMPT}]
    assert browser.text(TEXT) == expected(url, draft="none", messages=messages)
    origins = {origin: browser.count(f"{TEXT} .{origin}") for origin in ("drafted", "target", "plain")}
    assert origins["drafted"] > 5
    assert origins["target"] > 5
    assert origins["plain"] == 0
    assert browser.text("#legend").endswith(f"target token: {origins['target']}")
    assert int(browser.text("#stat-tokens")) >= origins["drafted"] + origins["target"]
    assert float(browser.text("#speed")) > 0
    assert float(browser.text("#stat-acceptance")) > 1
    assert browser.count("#depths li") >= 1
    assert browser.text("#explain") == "This planner gives no reason: its budget is fixed."


@pytest.mark.weights
def test_the_reason_of_the_default_planner_is_shown(browser: Browser, running: Running) -> None:
    url = running.url
    visit(browser, url, model=TINY)
    send(browser)
    body: dict[str, object] = {"model": TINY, "max_tokens": 48, "seed": 3, "temperature": 0}
    body |= {"draftree": {"pieces": True}, "messages": [{"role": "user", "content": PROMPT}]}
    said = HTTP.post(f"{url}/v1/chat/completions", json=body).json()["draftree"]["explain"]
    shown = browser.text("#explain")
    assert len(said) > 20
    assert shown.split()[:2] == said.split()[:2]


@pytest.mark.weights
def test_load_counts_the_running_request(browser: Browser, running: Running) -> None:
    visit(browser, running.url, max_tokens=200, prompt="Tell a long story.", temperature=1)
    with slow_rounds(running.llm, seconds=0.1):
        browser.click("#send")
        browser.wait(f"document.querySelector('{TEXT} .piece')")
        browser.click("#tab-load")
        browser.wait("document.querySelector('#load .served:nth-child(2) dd')?.textContent === '1'")
        browser.wait("Number(document.querySelector('#load .served:nth-child(2) div:nth-child(3) dd').textContent) > 0")
        assert browser.text("#load .served:nth-child(2) h2") == NAME
        assert "drafts: ngram, suffix" in browser.text("#load")
        browser.press("Escape")
    browser.wait("document.querySelector('#load .served:nth-child(2) dd').textContent === '0'")


@pytest.mark.essential
@pytest.mark.weights
def test_compared_texts_are_identical(browser: Browser, running: Running) -> None:
    url = running.url
    visit(browser, url, mode="compare", draft="ngram")
    send(browser)
    verdict = browser.text(".verdict strong")
    left, right = browser.text(".side:nth-child(1) .text"), browser.text(".side:nth-child(2) .text")
    assert left == right == expected(url, draft="none", messages=[{"role": "user", "content": PROMPT}])
    assert verdict == f"✓ Identical: all {len(left)} characters are the same"
    assert browser.count(".side:nth-child(1) .piece.plain") == browser.count(".side:nth-child(1) .piece")
    assert browser.count(".side:nth-child(2) .piece.drafted") > 0
    assert re.search(r"ran at \d+\.\d\d× the speed", browser.text(".verdict"))


@pytest.mark.weights
def test_a_prompt_is_continued_without_a_template(browser: Browser, running: Running) -> None:
    url = running.url
    prompt = "one, two, three, one, two, three, one,"
    visit(browser, url, mode="complete", prompt=prompt, max_tokens=24)
    send(browser)
    text = expected(url, draft="none", path="completions", prompt=prompt, max_tokens=24)
    assert browser.text(TEXT) == text
    assert browser.text("article .prompt-echo") == prompt


@pytest.mark.weights
def test_stop_ends_the_request_on_the_server(browser: Browser, running: Running) -> None:
    visit(browser, running.url, prompt="Tell a very long story about a lighthouse.", max_tokens=600, temperature=1)
    with paused(running, rounds=10):
        browser.click("#send")
        browser.wait(f"document.querySelectorAll('{TEXT} .piece').length > 5")
        browser.click("#stop-run")
        wait_for_text(browser)
    wait_for(lambda: not running.llm.num_running)
    assert "stopped" in browser.text(".meta")
    assert browser.count(f"{TEXT} .piece") < 500


@pytest.mark.weights
def test_everything_works_from_the_keyboard(browser: Browser, running: Running) -> None:
    url = running.url
    visit(browser, url, prompt="", max_tokens=24)
    browser.press("Tab", "Enter")
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.write(PROMPT)
    browser.press("Enter")
    wait_for_text(browser)
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.press("Tab", "Tab", "Tab", "Tab", shift=True)
    assert browser.run("return document.activeElement.className") == "text"
    browser.press("End", "Up")
    assert browser.count(".piece.current") == 1
    assert browser.count(".tree .node") >= 2
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.run(outline) == "solid"
    browser.run("document.getElementById('tab-chat').focus()")
    browser.press("Right", "Right")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter")
    wait_for_text(browser)
    assert "Identical" in browser.text(".verdict strong")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with an API key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    with running_server(settings_given=settings(api_key_file=str(keys))) as running:
        yield running.url


def enter(browser: Browser, key: str) -> None:
    browser.run("document.getElementById('key').value = ''; document.getElementById('key').focus()")
    browser.write(key)
    browser.press("Tab")


def test_a_key_is_asked_for_kept_in_the_tab_and_never_in_the_link(browser: Browser, guarded: str) -> None:
    browser.open(f"{guarded}/#prompt=hello&max_tokens=12&seed=1")
    browser.wait("document.getElementById('error').textContent.includes('No API key was sent')")
    browser.run("document.getElementById('error').textContent = ''")
    enter(browser, "another-key-that-is-wrong")
    browser.wait("document.getElementById('error').textContent !== ''")
    words = "The API key is not known to this server: check it. Enter a valid API key in the settings."
    assert browser.text("#error") == words
    assert "not connected" in browser.text("#connection")
    enter(browser, KEY)
    browser.wait("document.getElementById('model').value !== ''")
    assert browser.run("return document.getElementById('error').hidden")
    assert browser.run("return document.getElementById('model').value") == TINY
    send(browser)
    assert browser.count("#log .piece") > 0
    assert KEY not in browser.run("return location.href + JSON.stringify(localStorage) + document.cookie")
    assert KEY in browser.run("return JSON.stringify(sessionStorage)")
    browser.click("#tab-load")
    browser.wait("document.querySelector('#load .served')")
    assert "Waiting texts0" in browser.text("#load"), "the key is sent with the request for metrics"


def test_the_page_needs_no_key_and_what_it_shows_does(guarded: str) -> None:
    for path in ("/", "/page/app.js", "/page/theme.css"):
        answer = HTTP.get(guarded + path)
        assert answer.status_code == 200
        (policy,) = answer.headers.get_list("content-security-policy")
        assert policy.startswith("default-src 'self';")
    assert HTTP.get(f"{guarded}/draftree/status").status_code == 401


def test_the_page_can_be_left_out() -> None:
    with running_server(settings_given=settings(page=False)) as running:
        statuses = [HTTP.get(running.url + path).status_code for path in ("/", "/page/app.js", "/v1/models")]
    assert statuses == [404, 404, 200]
