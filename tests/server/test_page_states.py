"""States of the page, with a scripted server: rounds, errors, differences, load, links, keyboard, contrast, widths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from browser import Browser
from fake_serving import MODEL, TEXT, fake_server
from page_checks import low_contrasts, tab_stops, unnamed

IDLE = "document.getElementById('stop-run').hidden"
ANSWER = "#log .assistant .text"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of the scripted server."""
    with fake_server() as served:
        yield served


def visit(browser: Browser, url: str, fragment: str = "") -> None:
    browser.open(f"{url}/#{fragment}")
    browser.wait("document.getElementById('model').value !== '' || !document.getElementById('error').hidden")


def show_source(browser: Browser) -> None:
    """Show the last answer as written: a formatted one has elements for parts of pieces, and none for syntax."""
    browser.run("[...document.querySelectorAll('.meta button')].findLast(e => e.textContent == 'Show source').click()")


def send(browser: Browser) -> None:
    browser.click("#send")
    browser.wait(f"{IDLE} && document.querySelector('.view:not([hidden]) .text, #error:not([hidden])')")


@pytest.mark.essential
def test_the_text_is_shown_whole_with_origins_and_counts(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello&seed=4")
    send(browser)
    assert browser.text(ANSWER) == TEXT.replace("\n\n", ""), "paragraphs are elements"
    show_source(browser)
    assert browser.text(ANSWER) == TEXT
    drafted, target = browser.count(f"{ANSWER} .drafted"), browser.count(f"{ANSWER} .target")
    assert drafted > 20
    assert target > 20
    assert browser.text("#legend") == f"token drafted and accepted: {drafted}token target token: {target}"
    assert browser.text("#stat-rounds") == str(target)
    assert browser.text("#explain") == MODEL["explain"]
    assert browser.text("#speed") == "58.9"
    style = "return getComputedStyle(document.querySelector(arguments[0])).textDecorationStyle"
    assert browser.run(style, f"{ANSWER} .drafted") == "solid"
    assert browser.run(style, f"{ANSWER} .target") == "dotted", "origins differ without colour"
    lines = browser.run("return [...document.querySelectorAll('#announcements p')].map((e) => e.textContent)")
    assert len(lines) >= 5
    assert " ".join(lines).split() == TEXT.split(), "the text is announced in sentences"


def test_every_outcome_of_a_round_is_drawn_and_listed(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    browser.run("document.querySelector(arguments[0]).focus()", ANSWER)
    while not browser.count(".tree .node.accepted") or not browser.count(".tree .node.rejected"):
        browser.press("Down")
    nodes = browser.count(".tree .node.accepted") + browser.count(".tree .node.rejected")
    assert browser.count(".tree .node.target") == browser.count(".tree .node.root") == 1
    assert browser.count(".tree .edge") == nodes + 1
    assert browser.count("#round-table tbody tr") == nodes + 1
    assert browser.text("#round-words") == browser.run("return document.querySelector('.tree').ariaLabel")
    accepted = browser.count(".tree .node.accepted")
    assert browser.text("#round-words").startswith(f"{accepted} of {nodes} drafted tokens accepted")


def test_pointing_at_a_piece_shows_its_round(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    show_source(browser)
    browser.hover(f"{ANSWER} .piece:nth-child(12)")
    shown = browser.text(f"{ANSWER} .piece.current")
    assert shown == browser.text(f"{ANSWER} .piece:nth-child(12)")
    marked = browser.run("return [...document.querySelectorAll('.in-round')].map((e) => e.textContent)")
    titles = browser.run(
        "return [...document.querySelectorAll('.node.accepted title, .node.target title')].map((e) => e.textContent)"
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


def test_a_server_that_is_gone_is_named(browser: Browser) -> None:
    with fake_server() as served:
        visit(browser, served, "prompt=hello")
    browser.click("#send")
    browser.wait("!document.getElementById('error').hidden")
    assert browser.text("#error") == "The server cannot be reached. Check that it is running."


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


def test_a_conversation_sends_its_history(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=first&system=Be+brief")
    browser.run(
        "const original = window.fetch; window.bodies = [];"
        "window.fetch = (url, init) => { if (init.body) window.bodies.push(init.body); return original(url, init); }"
    )
    for prompt in ("first", "second"):
        browser.run("document.getElementById('prompt').value = arguments[0]", prompt)
        send(browser)
    bodies = [json.loads(body) for body in browser.run("return window.bodies")]
    assert [message["content"] for message in bodies[1]["messages"]] == ["Be brief", "first", TEXT, "second"]
    assert not {"temperature", "top_p"} & bodies[0].keys(), "the model's defaults"
    assert bodies[0]["draftree"] == {"pieces": True, "rounds": True}


@pytest.mark.parametrize(("width", "height"), [(1280, 700), (390, 800)])
def test_the_newest_text_is_followed_until_the_user_scrolls_up(
    browser: Browser, url: str, width: int, height: int
) -> None:
    visit(browser, url)
    browser.emulate(width=width, height=height)
    end = "document.querySelector('#log .assistant:last-child .card').getBoundingClientRect().bottom"
    composer = "document.getElementById('composer').getBoundingClientRect().top"
    for _ in range(4):
        browser.run("document.getElementById('prompt').value = 'hello'")
        send(browser)
        assert browser.run(f"return {end} <= {composer}")
    browser.run("document.getElementById('prompt').value = 'slow'")
    browser.click("#send")
    browser.wait(f"{end} <= {composer}")
    browser.run("window.scrollTo(0, 200)")
    pieces = f"document.querySelectorAll('{ANSWER} .piece').length"
    browser.wait(f"{pieces} > arguments[0] + 5", browser.run(f"return {pieces}"))
    assert browser.run("return window.scrollY") == 200
    browser.click("#to-latest")
    browser.wait(f"{end} <= {composer} && document.getElementById('to-latest').hidden")
    browser.press("Escape")
    browser.wait(IDLE)


def test_clear_asks_first(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    for answer, turns in ((False, 1), (True, 0)):
        browser.run("window.confirm = () => arguments[0]".replace("arguments[0]", str(answer).lower()))
        browser.click("#clear")
        assert browser.count("#log .assistant") == turns


def test_the_state_is_in_the_link(browser: Browser, url: str) -> None:
    fragment = "mode=compare&draft=suffix&temperature=0.2&seed=5&stop=END&prompt=na%C3%AFve+%26+%23&order=together"
    visit(browser, url, fragment)
    shown = "return Object.fromEntries([...document.querySelectorAll('#draft,#temperature,#seed,#stop,#prompt,#order')]"
    values = browser.run(f"{shown}.map((e) => [e.id, e.value]))")
    assert values == {
        "draft": "suffix",
        "temperature": "0.2",
        "seed": "5",
        "stop": "END",
        "prompt": "naïve & #",
        "order": "together",
    }
    browser.run("const e = document.getElementById('seed'); e.value = '6'; e.dispatchEvent(new Event('input'))")
    link = browser.run("return location.href")
    assert "seed=6" in link
    browser.open(link)
    browser.wait("document.getElementById('model').value !== ''")
    assert browser.run("return location.href") == link
    assert browser.run("return document.getElementById('seed').value") == "6"
    assert browser.run("return document.querySelector('[aria-selected=true]').id") == "tab-compare"


def test_a_link_to_what_is_not_served_says_so(browser: Browser, url: str) -> None:
    visit(browser, url, "draft=eagle&model=fake-model")
    browser.wait("!document.getElementById('error').hidden")
    assert browser.text("#error") == "There is no drafter “eagle”; the default is used."
    assert browser.run("return document.getElementById('draft').value") == ""


def test_texts_and_links_are_copied(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello&seed=9")
    send(browser)
    for permission in ("clipboard-read", "clipboard-write"):
        browser.call("permissions", {"descriptor": {"name": permission}, "state": "granted"})
    read = "return navigator.clipboard.readText()"
    browser.click(".meta button")
    browser.wait("document.querySelector('.meta button').textContent === 'Copied'")
    assert browser.run(read) == TEXT
    browser.click("#share")
    browser.wait("document.getElementById('share').textContent === 'Link copied'")
    assert browser.run(read) == browser.run("return location.href")


def test_tabs_move_with_arrow_keys(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.run("document.getElementById('tab-chat').focus()")
    for key, mode in (
        ("Right", "complete"),
        ("Right", "compare"),
        ("End", "load"),
        ("Right", "chat"),
        ("Left", "load"),
    ):
        browser.press(key)
        assert browser.run("return document.activeElement.id") == f"tab-{mode}"
        assert not browser.run("return document.getElementById(arguments[0]).hidden", f"view-{mode}")


def test_every_stop_of_the_tab_key_is_visible_and_outlined(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    stops = tab_stops(browser)
    names = [stop.name for stop in stops]
    assert [stop for stop in stops if stop.outline < 2 or not stop.is_visible] == []
    wanted = ["skip", "tab-chat", "share", "theme", "model", "draft", "temperature", "top_p", "max_tokens", "seed"]
    wanted += ["system", "stop", "key", "text", "quiet", "quiet", "prompt", "clear", "send"]
    wanted += ["measure-plain", "round-next"]
    assert [name for name in names if name in wanted] == wanted


def test_the_skip_button_leads_to_the_prompt(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.press("Tab", "Enter")
    assert browser.run("return document.activeElement.id") == "prompt"


def test_the_theme_button_overrides_the_system_and_is_kept(browser: Browser, url: str) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    visit(browser, url)
    light = browser.run(ground)
    browser.click("#theme")
    browser.click("#theme")
    assert browser.text("#theme") == "Theme: dark"
    dark = browser.run(ground)
    assert dark != light
    visit(browser, url)
    assert browser.run(ground) == dark
    browser.click("#theme")
    assert browser.run(ground) == light
    browser.emulate(scheme="dark")
    assert browser.run(ground) == dark


def test_nothing_moves_if_motion_is_reduced(browser: Browser, url: str) -> None:
    script = "return [...document.querySelectorAll('*')].map((e) => getComputedStyle(e).transitionDuration)"
    visit(browser, url)
    assert set(browser.run(script)) == {"0s"}
    browser.emulate(motion="no-preference")
    assert len(set(browser.run(script))) > 1


def test_requests_go_to_the_own_origin_only(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=hello")
    send(browser)
    names = browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(names) > 15
    assert [name for name in names if not name.startswith(f"{url}/")] == []


@pytest.mark.parametrize("mode", ["chat", "compare", "load"])
def test_nothing_is_wider_than_the_window(browser: Browser, url: str, mode: str) -> None:
    visit(browser, url, f"mode={mode}&prompt=differ")
    if mode != "load":
        send(browser)
    for width in (360, 768, 1000, 1600):
        browser.emulate(width=width)
        assert browser.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("mode", ["chat", "complete", "compare", "load"])
def test_contrast_and_names(browser: Browser, url: str, mode: str) -> None:
    visit(browser, url, f"mode={mode}&prompt=differ")
    if mode == "load":
        browser.wait("document.querySelectorAll('.sparkline polyline').length === 2")
    else:
        check_contrasts(browser)
        send(browser)
        browser.run("[...document.querySelectorAll('.view:not([hidden]) .text')].at(-1).focus()")
        browser.press("Down", "Down", "Down", "Down", "Down")
        browser.run(
            "document.getElementById('round-details').open = true; document.getElementById('prompt').value = ''"
        )
    check_contrasts(browser)
    assert unnamed(browser) == []


def test_contrast_of_errors(browser: Browser, url: str) -> None:
    visit(browser, url, "prompt=fail")
    send(browser)
    assert not browser.run("return document.getElementById('error').hidden")
    check_contrasts(browser)


def check_contrasts(browser: Browser) -> None:
    for scheme in ("dark", "light"):
        browser.emulate(scheme=scheme)
        assert low_contrasts(browser) == [], scheme
