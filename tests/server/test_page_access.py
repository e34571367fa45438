"""The page of a scripted server: links, keyboard, contrast, sizes of the window, themes, own origin."""

from __future__ import annotations

import json

import pytest

from browser import Browser
from fake_serving import TEXT
from page_checks import low_contrasts, tab_stops, unnamed
from page_visits import send, visit

pytestmark = pytest.mark.usefixtures("clean_log")


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
    assert "temperature" in bodies[0]
    assert bodies[0]["draftree"] == {"pieces": True, "rounds": True}


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
    wanted += ["system", "stop", "key", "text", "quiet", "prompt", "clear", "send", "measure-plain", "round-next"]
    assert [name for name in names if name in wanted] == wanted


def test_the_skip_button_leads_to_the_prompt(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.press("Tab", "Enter")
    assert browser.run("return document.activeElement.id") == "prompt"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("mode", ["chat", "complete", "compare", "load"])
def test_contrast_and_names(browser: Browser, url: str, mode: str, scheme: str) -> None:
    browser.emulate(scheme=scheme)
    visit(browser, url, f"mode={mode}&prompt=differ")
    if mode == "load":
        browser.wait("document.querySelectorAll('.sparkline polyline').length === 2")
    else:
        assert low_contrasts(browser) == []
        send(browser)
        browser.run("[...document.querySelectorAll('.view:not([hidden]) .text')].at(-1).focus()")
        browser.press("Down", "Down", "Down", "Down", "Down")
        browser.run(
            "document.getElementById('round-details').open = true; document.getElementById('prompt').value = ''"
        )
    assert low_contrasts(browser) == []
    assert unnamed(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_errors(browser: Browser, url: str, scheme: str) -> None:
    browser.emulate(scheme=scheme)
    visit(browser, url, "prompt=fail")
    send(browser)
    assert not browser.run("return document.getElementById('error').hidden")
    assert low_contrasts(browser) == []


def test_the_theme_button_overrides_the_system_and_is_kept(browser: Browser, url: str) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    visit(browser, url)
    light = browser.run(ground)
    browser.click("#theme")
    browser.click("#theme")
    assert browser.text("#theme") == "Dark"
    dark = browser.run(ground)
    assert dark != light
    visit(browser, url)
    assert browser.run(ground) == dark
    browser.click("#theme")
    assert browser.run(ground) == light
    browser.emulate(scheme="dark")
    assert browser.run(ground) == dark


@pytest.mark.parametrize("width", [360, 768, 1000, 1600])
@pytest.mark.parametrize("mode", ["chat", "compare", "load"])
def test_nothing_is_wider_than_the_window(browser: Browser, url: str, width: int, mode: str) -> None:
    browser.emulate(width=width)
    visit(browser, url, f"mode={mode}&prompt=differ")
    if mode != "load":
        send(browser)
    assert browser.run("return document.documentElement.scrollWidth") <= width


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
