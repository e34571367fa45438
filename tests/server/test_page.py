"""The page in a browser, with the server and a real model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from browser import Browser, open_browser
from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from operated import paused, wait_for
from page_checks import low_contrasts, unnamed
from real_weights import folder_of
from serving import NAME as TINY
from serving import Running, running_server, slow_rounds, tiny_async_llm

pytestmark = pytest.mark.weights

NAME = "smollm2-135m-instruct"
PROMPT = "Repeat this line five times: red, green, blue, red, green, blue, red, green, blue."
IDLE = "document.getElementById('stop-run').hidden"
TEXT = ".view:not([hidden]) .text"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A real model with drafts of fixed size, so that every run drafts; and a tiny one with the default planner."""
    folder_of(NAME)
    real = AsyncLLM(NAME, ("ngram", "suffix"), plan="fixed,k=5", dtype="float32", device="cpu")
    models = [ServedModel(NAME, real, ()), ServedModel(TINY, tiny_async_llm(), ())]
    with running_server(models) as found:
        yield found


@pytest.fixture(scope="module")
def url(running: Running) -> str:
    return running.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _clean_log(browser: Browser) -> Iterator[None]:
    browser.emulate(width=1600)
    browser.log()
    yield
    assert [line for line in browser.log() if "Failed to load resource" not in line] == []


def visit(browser: Browser, url: str, *, prompt: str = PROMPT, seed: int = 3, **state: object) -> None:
    fragment = httpx.QueryParams({"max_tokens": 48, "temperature": 0, "prompt": prompt, "seed": seed} | state)
    browser.open(f"{url}/#{fragment}")
    browser.wait("document.getElementById('model').value !== ''")


def wait_for_text(browser: Browser) -> None:
    either = f"document.querySelector('{TEXT}') || !document.getElementById('error').hidden"
    browser.wait(f"{IDLE} && ({either})", seconds=180)
    assert browser.run("return document.getElementById('error').hidden"), browser.text("#error")


def send(browser: Browser) -> None:
    browser.click("#send")
    wait_for_text(browser)


def expected(url: str, *, draft: str, path: str = "chat/completions", **content: object) -> str:
    """The text of the same request to the API."""
    body: dict[str, object] = {"model": NAME, "max_tokens": 48, "seed": 3, "temperature": 0, "draft": draft} | content
    choice = httpx.post(f"{url}/v1/{path}", json=body, timeout=180).json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_an_answer_streams_in_pieces_of_known_origin(browser: Browser, running: Running) -> None:
    url = running.url
    visit(browser, url)
    with paused(running, rounds=6):
        browser.click("#send")
        browser.wait(f"document.querySelectorAll('{TEXT} .piece').length > 3 && !{IDLE}", seconds=180)
    wait_for_text(browser)
    messages = [{"role": "user", "content": PROMPT}]
    assert browser.text(TEXT) == expected(url, draft="none", messages=messages)
    origins = {origin: browser.count(f"{TEXT} .{origin}") for origin in ("drafted", "picked", "plain")}
    assert origins["drafted"] > 5
    assert origins["picked"] > 5
    assert origins["plain"] == 0
    assert browser.text("#legend").endswith(f"picked by the target: {origins['picked']}")
    assert int(browser.text("#stat-tokens")) >= origins["drafted"] + origins["picked"]
    assert float(browser.text("#speed")) > 0
    assert float(browser.text("#stat-acceptance")) > 1
    assert browser.count("#depths li") >= 1
    assert browser.text("#explain") == "This planner gives no reason: its budget is fixed."


def test_the_reason_of_the_default_planner_is_shown(browser: Browser, url: str) -> None:
    visit(browser, url, model=TINY)
    send(browser)
    body: dict[str, object] = {"model": TINY, "max_tokens": 48, "seed": 3, "temperature": 0}
    body |= {"draftree": {"pieces": True}, "messages": [{"role": "user", "content": PROMPT}]}
    said = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180).json()["draftree"]["explain"]
    shown = browser.text("#explain")
    assert len(said) > 20
    assert shown.split()[:2] == said.split()[:2]


def test_load_counts_the_running_request(browser: Browser, running: Running) -> None:
    visit(browser, running.url, max_tokens=200, prompt="Tell a long story.", temperature=1)
    with slow_rounds(running.llm, seconds=0.1):
        browser.click("#send")
        browser.wait(f"document.querySelector('{TEXT} .piece')", seconds=180)
        browser.click("#tab-load")
        browser.wait("document.querySelector('#load .served:nth-child(2) dd')?.textContent === '1'")
        browser.wait("Number(document.querySelector('#load .served:nth-child(2) div:nth-child(3) dd').textContent) > 0")
        assert browser.text("#load .served:nth-child(2) h2") == NAME
        assert "drafts: ngram, suffix" in browser.text("#load")
        browser.press("Escape")
    browser.wait("document.querySelector('#load .served:nth-child(2) dd').textContent === '0'")


def test_a_focused_piece_shows_the_round_that_wrote_it(browser: Browser, url: str) -> None:
    visit(browser, url)
    send(browser)
    browser.run("document.querySelector(arguments[0]).focus()", TEXT)
    for _ in range(200):
        if browser.count(f"{TEXT} .piece.drafted.current"):
            break
        browser.press("Right")
    piece = browser.text(f"{TEXT} .piece.current")
    walked = (
        "return [...document.querySelectorAll('.node:is(.root, .accepted, .pick) title')].map((e) => e.textContent)"
    )
    (_, first), *nodes, (bonus,) = (title.split("\n") for title in browser.run(walked))
    accepted = [token for token, _ in nodes]
    picks = [words.removeprefix("the target’s pick after it: ") for words in (first, *(pick for _, pick in nodes))]
    assert picks == [*accepted, bonus]
    assert piece.replace(" ", "␣") in accepted
    assert browser.count(".tree .node.pick") == 1
    assert browser.count("#round-table tbody tr.accepted") == len(accepted)
    sources = browser.run(
        "return [...document.querySelectorAll('#round-table td:nth-child(4)')].map((e) => e.innerText)"
    )
    assert "target" in browser.text("#round-table")
    assert len(sources) == browser.count("#round-table tbody tr")


@pytest.mark.essential
@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_compared_texts_are_identical(browser: Browser, url: str, draft: str) -> None:
    visit(browser, url, mode="compare", draft=draft)
    send(browser)
    verdict = browser.text(".verdict strong")
    left, right = browser.text(".side:nth-child(1) .text"), browser.text(".side:nth-child(2) .text")
    assert left == right == expected(url, draft="none", messages=[{"role": "user", "content": PROMPT}])
    assert verdict == f"✓ Identical: all {len(left)} characters are the same"
    assert browser.count(".side:nth-child(1) .piece.plain") == browser.count(".side:nth-child(1) .piece")
    assert browser.count(".side:nth-child(2) .piece.drafted") > 0
    assert re.search(r"ran at \d+\.\d\d× the speed", browser.text(".verdict"))


def test_a_prompt_is_continued_without_a_template(browser: Browser, url: str) -> None:
    prompt = "one, two, three, one, two, three, one,"
    visit(browser, url, mode="complete", prompt=prompt, max_tokens=24)
    send(browser)
    text = expected(url, draft="none", path="completions", prompt=prompt, max_tokens=24)
    assert browser.text(TEXT) == text
    assert browser.text("article .prompt-echo") == prompt


def test_plain_decoding_has_no_drafts(browser: Browser, url: str) -> None:
    visit(browser, url, draft="none", max_tokens=12)
    send(browser)
    assert browser.count(f"{TEXT} .plain") == browser.count(f"{TEXT} .piece") > 0
    assert browser.text("#stat-acceptance") == "1.00"
    assert browser.text("#ratio") == "plain decoding"


def test_the_ratio_is_measured_with_the_same_request(browser: Browser, url: str) -> None:
    visit(browser, url)
    send(browser)
    browser.click("#measure-plain")
    browser.wait(IDLE, seconds=180)
    assert re.fullmatch(
        r"\d+\.\d\d× plain \(\d+\.\d tokens/s\)\. ✓ Identical: all \d+ .* same\.", browser.text("#ratio")
    )


def test_stop_ends_the_request_on_the_server(browser: Browser, running: Running) -> None:
    visit(browser, running.url, prompt="Tell a very long story about a lighthouse.", max_tokens=600, temperature=1)
    with paused(running, rounds=10):
        browser.click("#send")
        browser.wait(f"document.querySelectorAll('{TEXT} .piece').length > 5", seconds=180)
        browser.click("#stop-run")
        wait_for_text(browser)
    wait_for(lambda: not running.llm.num_running)
    assert "stopped" in browser.text(".meta")
    assert browser.count(f"{TEXT} .piece") < 500


def test_a_refused_field_is_shown_in_words(browser: Browser, url: str) -> None:
    visit(browser, url, temperature=-1)
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert "temperature" in browser.text("#error")
    assert browser.run("return document.getElementById('prompt').value") == PROMPT


def test_everything_works_from_the_keyboard(browser: Browser, url: str) -> None:
    visit(browser, url, prompt="", max_tokens=24)
    browser.press("Tab", "Enter")
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.write(PROMPT)
    browser.press("Enter")
    wait_for_text(browser)
    assert browser.run("return document.activeElement.id") == "prompt"
    browser.press("Tab", "Tab", shift=True)
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_streamed_answer_is_readable(browser: Browser, url: str, scheme: str) -> None:
    browser.emulate(width=1600, scheme=scheme)
    visit(browser, url, max_tokens=24)
    send(browser)
    assert low_contrasts(browser) == []
    assert unnamed(browser) == []


def test_a_link_restores_the_state(browser: Browser, url: str) -> None:
    visit(browser, url, mode="compare", draft="suffix", temperature="0.3")
    link = browser.run("return location.href")
    browser.open(link)
    browser.wait("document.getElementById('model').value !== ''")
    fields = ("model", "draft", "temperature", "seed", "prompt")
    values = [browser.run("return document.getElementById(arguments[0]).value", field) for field in fields]
    assert values == [NAME, "suffix", "0.3", "3", PROMPT]
    assert browser.run("return location.href") == link
