"""Conversations on the page: formatted answers, turns sent again, the kept history, and hostile texts and names."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import Browser
from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from fake_serving import TEXT, fake_server
from page_checks import low_contrasts, unnamed

IDLE = "document.getElementById('stop-run').hidden"
ANSWER = "#log .assistant:last-child .text"
MARKDOWN = """# Sorting

A list is sorted **in place** by `sort`; see [the manual](https://manual.example/sort).

1. Choose a *key*:
   - `str.lower`
2. Sort:

```python
def by_name(rows):
    return sorted(rows)
```

| a | b |
|---|--:|
| 1 | 2 |
"""
LONG_NAME = "model:smollm2-135m-instruct,dtype=int8,k=7,tree=best-12"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of the scripted server, with a chat model and a base model."""
    with fake_server({"drafts": [LONG_NAME, "suffix"]}, {"name": "base", "supports_chat": False}) as served:
        yield served


def visit(browser: Browser, url: str, fragment: str = "") -> None:
    browser.open(f"{url}/#{fragment}")
    browser.wait("document.getElementById('model').value !== ''")


def say(browser: Browser, prompt: str) -> None:
    browser.run("document.getElementById('prompt').value = arguments[0]", prompt)
    browser.click("#send")
    finish(browser)


def finish(browser: Browser) -> None:
    browser.wait(IDLE)
    assert browser.run("return document.getElementById('error').hidden"), browser.text("#error")


def press(browser: Browser, css: str, words: str) -> None:
    """Click the last button with these words."""
    script = "[...document.querySelectorAll(arguments[0])].findLast((e) => e.textContent === arguments[1]).click()"
    browser.run(script, f"{css} button", words)


def watch_requests(browser: Browser) -> None:
    browser.run(
        "const original = window.fetch; window.bodies = [];"
        "window.fetch = (url, init) => { if (init.body) window.bodies.push(init.body); return original(url, init); }"
    )


def sent(browser: Browser) -> list[str]:
    """The messages of the last request."""
    return [message["content"] for message in json.loads(browser.run("return window.bodies.at(-1)"))["messages"]]


def turns(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('#log .said, #log .text')].map((e) => e.textContent)"
    return [str(text) for text in browser.run(script)]


def titles(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('.conversation')].map((e) => e.firstChild.textContent)"
    return [str(text) for text in browser.run(script)]


@pytest.mark.essential
def test_an_answer_is_formatted_and_keeps_the_origin_of_its_tokens(browser: Browser, url: str) -> None:
    visit(browser, url)
    say(browser, f"say {MARKDOWN}")
    shown = {
        tag: browser.text(f"{ANSWER} {tag}") for tag in ("h3", "strong", "em", "pre", "li li code", "td:last-child")
    }
    assert shown == {
        "h3": "Sorting",
        "strong": "in place",
        "em": "key",
        "pre": "def by_name(rows):\n    return sorted(rows)",
        "li li code": "str.lower",
        "td:last-child": "2",
    }
    assert (
        browser.run("return document.querySelector(arguments[0]).href", f"{ANSWER} a") == "https://manual.example/sort"
    )
    for kind in ("drafted", "target"):
        assert browser.count(f"{ANSWER} pre .piece.{kind}") > 0
    font = "return getComputedStyle(document.querySelector(arguments[0])).fontFamily"
    assert "monospace" in browser.run(font, f"{ANSWER} pre code")
    for permission in ("clipboard-read", "clipboard-write"):
        browser.call("permissions", {"descriptor": {"name": permission}, "state": "granted"})
    browser.click(f"{ANSWER} .code-head button")
    browser.wait(f"document.querySelector('{ANSWER} .code-head button').textContent === 'Copied'")
    assert browser.run("return navigator.clipboard.readText()") == shown["pre"]
    browser.run("document.querySelector(arguments[0]).focus()", ANSWER)
    for _ in range(30):
        browser.press("Right")
        assert browser.count(f"{ANSWER} .current") >= 1, "pieces of syntax are skipped"
    press(browser, "#log", "Show source")
    assert browser.text(ANSWER) == MARKDOWN
    press(browser, "#log", "Show formatted")
    assert browser.text(f"{ANSWER} strong") == "in place"
    for scheme in ("dark", "light"):
        browser.emulate(scheme=scheme)
        assert low_contrasts(browser) == []
    assert unnamed(browser) == []
    for width in (360, 1280):
        browser.emulate(width=width)
        assert browser.run("return document.documentElement.scrollWidth") <= width


STREAM = """
return (async (pieces) => {
  const { TextView } = await import(new URL('page/text.js', document.baseURI));
  const [stepwise, whole] = [true, false].map((isMarkdown) => new TextView('Answer', () => {}, isMarkdown));
  let added = 0;
  const watcher = new MutationObserver(() => {});
  watcher.observe(stepwise.element, { childList: true, subtree: true });
  for (const text of pieces) {
    stepwise.add({ text, origin: 'target' }, null);
    whole.add({ text, origin: 'target' }, null);
    for (const node of watcher.takeRecords().flatMap((record) => [...record.addedNodes])) {
      added += 1 + (node.querySelectorAll?.('*').length ?? 0);
    }
  }
  stepwise.finish();
  whole.show(true);
  return { added, html: stepwise.element.innerHTML, atOnce: whole.element.innerHTML };
})(arguments[0]);
"""


@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_streamed_answer_ends_as_if_formatted_at_once(browser: Browser, url: str, size: int) -> None:
    visit(browser, url)
    code = "```\n" + "code\n" * 300
    text = "\n".join((MARKDOWN, "A *long* paragraph. " * 100, "", MARKDOWN, code))
    streamed = browser.run(STREAM, [text[at : at + size] for at in range(0, len(text), size)])
    assert "<strong>" in streamed["html"]
    assert streamed["html"] == streamed["atOnce"]


@pytest.mark.parametrize("unit", ["word *is* ", "a line of code\n", "- an item\n", "\n"])
def test_the_work_of_a_streamed_answer_grows_with_its_length_only(browser: Browser, url: str, unit: str) -> None:
    visit(browser, url)
    few, many = (
        browser.run(STREAM, ["```\n" if "code" in unit else "", *[unit] * count])["added"] for count in (1000, 4000)
    )
    assert many <= 5 * few + 100


def test_a_base_model_offers_complete(browser: Browser, url: str) -> None:
    visit(browser, url, "model=base")
    assert not browser.run("return document.getElementById('no-template').hidden")
    assert "base is a base model" in browser.text("#no-template")
    assert browser.run("return document.getElementById('composer').hidden")
    browser.click("#to-complete")
    say(browser, "hello")
    assert browser.text("#view-complete .text") == TEXT
    browser.click("#tab-compare")
    say(browser, "hello")
    assert browser.run("return document.getElementById('format').value") == "complete"
    browser.run(
        "const m = document.getElementById('model'); m.value = 'fake-model'; m.dispatchEvent(new Event('input'))"
    )
    browser.click("#tab-chat")
    assert browser.run("return document.getElementById('no-template').hidden")
    say(browser, "hello")


def test_regenerate_asks_again_and_replaces_the_answer(browser: Browser, url: str) -> None:
    visit(browser, url)
    say(browser, "say one")
    say(browser, "say two")
    watch_requests(browser)
    press(browser, "#log", "Regenerate")
    finish(browser)
    assert sent(browser) == ["say one", "one", "say two"]
    assert turns(browser) == ["say one", "one", "say two", "two"]
    visible = "[...document.querySelectorAll('.last-only')].filter((e) => e.checkVisibility()).length"
    assert browser.run(f"return {visible}") == 1


def test_an_edited_message_replaces_what_follows(browser: Browser, url: str) -> None:
    visit(browser, url)
    for prompt in ("say one", "say two", "say three"):
        say(browser, prompt)
    watch_requests(browser)
    edit = "document.querySelectorAll('#log .user .who button')[1].click()"
    browser.run(edit)
    press(browser, ".edit", "Cancel")
    assert turns(browser)[2:4] == ["say two", "two"]
    for prompt, kept in (("busy", 6), ("say 2", 4)):
        if not browser.count(".edit"):
            browser.run(edit)
        browser.run("document.querySelector('.edit textarea').value = arguments[0]", prompt)
        press(browser, ".edit", "Send")
        browser.wait(IDLE)
        assert browser.count("#log > li") == kept, "a refused request changes nothing"
    assert sent(browser) == ["say one", "one", "say 2"]
    assert turns(browser) == ["say one", "one", "say 2", "2"]


def test_conversations_survive_reload_and_are_deleted(browser: Browser, url: str) -> None:
    visit(browser, url)
    say(browser, "say **one**")
    browser.click("#new-conversation")
    browser.wait("document.querySelectorAll('#log > li').length === 0")
    say(browser, "say two")
    assert titles(browser) == ["say two", "say **one**"]
    browser.call("refresh", {})
    browser.wait("document.getElementById('model').value !== ''")
    assert turns(browser) == ["say two", "two"], "the conversation in view is opened again"
    browser.click(".conversations li:last-child .conversation")
    browser.wait("document.querySelector('#log strong')?.textContent === 'one'")
    watch_requests(browser)
    say(browser, "say more")
    assert sent(browser) == ["say **one**", "**one**", "say more"]
    assert titles(browser) == ["say **one**", "say two"], "the newest first"
    browser.run("window.confirm = () => true")
    press(browser, ".conversations", "Delete")
    assert titles(browser) == ["say **one**"]
    browser.click("#clear")
    browser.wait("document.querySelectorAll('.conversation, #log > li').length === 0")
    visit(browser, url)
    assert titles(browser) == turns(browser) == []


def test_another_conversation_ends_the_running_answer(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.run("document.getElementById('prompt').value = 'slow'")
    browser.click("#send")
    browser.wait(f"document.querySelectorAll('{ANSWER} .piece').length > 2")
    browser.click("#new-conversation")
    browser.wait("document.querySelectorAll('#log > li').length === 0")
    watch_requests(browser)
    say(browser, "say two")
    assert sent(browser) == ["say two"]
    assert titles(browser) == ["say two", "slow"], "the part that was written is kept"


def test_a_conversation_too_long_to_keep_says_so(browser: Browser, url: str) -> None:
    visit(browser, url)
    browser.run("Storage.prototype.setItem = () => { throw new Error('full'); }")
    say(browser, "say one")
    assert not browser.run("return document.getElementById('not-kept').hidden")
    assert turns(browser) == ["say one", "one"]


@pytest.mark.parametrize("suffix", ["md", "json"])
def test_a_conversation_is_exported(browser: Browser, url: str, suffix: str, tmp_path: Path) -> None:
    browser.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    visit(browser, url, "system=Be+brief")
    assert browser.run("return document.getElementById('export-json').disabled")
    say(browser, "say **one**")
    browser.click({"md": "#export-markdown", "json": "#export-json"}[suffix])
    end = time.monotonic() + 60
    while not (found := list(tmp_path.glob(f"draftree-*.{suffix}"))):
        assert time.monotonic() < end, list(tmp_path.iterdir())
        time.sleep(0.05)
    text = found[0].read_text(encoding="utf-8")
    contents = ["Be brief", "say **one**", "**one**"]
    if suffix == "json":
        assert [message["content"] for message in json.loads(text)["messages"]] == contents
        assert httpx.post(f"{url}/v1/chat/completions", json=json.loads(text)).status_code == 200
    else:
        names = ("System", "You", "fake-model")
        assert text == "\n".join(f"## {name}\n\n{content}\n" for name, content in zip(names, contents, strict=True))


def test_a_long_name_of_a_drafter_is_shown_whole(browser: Browser, url: str) -> None:
    visit(browser, url)
    assert browser.text("#draft-name") == f"default ({LONG_NAME})"
    browser.run(
        "const d = document.getElementById('draft'); d.value = arguments[0]; d.dispatchEvent(new Event('input'))",
        LONG_NAME,
    )
    assert browser.text("#draft-name") == LONG_NAME
    inside = (
        "const e = document.getElementById('draft-name'); return e.checkVisibility() && e.scrollWidth <= e.clientWidth"
    )
    assert browser.run(inside)
    browser.run("const d = document.getElementById('draft'); d.value = 'suffix'; d.dispatchEvent(new Event('input'))")
    assert browser.run("return document.getElementById('draft-name').hidden")


def test_numbers_are_limited_to_what_the_server_takes(browser: Browser, url: str) -> None:
    for name in ("temperature", "top_p"):
        visit(browser, url)
        low, most = (
            float(browser.run(f"return document.getElementById(arguments[0]).{at}", name)) for at in ("min", "max")
        )
        for value in (low, most):
            SamplingParams(**{name: value})
        too_much = 1.01 * most
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{name: too_much})
        visit(browser, url, f"prompt=hello&{name}={too_much}")
        browser.click("#send")
        words = browser.text("#error")
        assert f"must be a number from {low:g} to {most:g}, not {too_much:g}" in words
        assert browser.count("#log > li") == 0
    visit(browser, url, "prompt=hello&temperature=hot&max_tokens=9")
    watch_requests(browser)
    browser.click("#send")
    finish(browser)
    assert "temperature" not in json.loads(browser.run("return window.bodies[0]")), "the default, as the field shows"


def test_sparklines_have_a_scale(browser: Browser, url: str) -> None:
    visit(browser, url, "mode=load")
    browser.wait("document.querySelectorAll('.sparkline polyline').length === 4")
    figures = browser.run(
        "return [...document.querySelectorAll('figure')].slice(0, 2).map((e) => e.innerText.split('\\n'))"
    )
    for (caption, most, least, ago, now), unit in zip(figures, ("tokens/s", "texts"), strict=True):
        assert caption.endswith(unit)
        assert float(most) >= float(caption.split()[-2]) > float(least) == 0
        assert ago.endswith(" s ago")
        assert now == "now"


ATTACK = "window.attacked=1"
HOSTILE = [
    f"<script>{ATTACK}</script>",
    f"<img src=x onerror='{ATTACK}'><svg onload='{ATTACK}'><script>{ATTACK}</script></svg>",
    f"[a](javascript:{ATTACK}) [b](JaVaScRiPt:alert(1)) ![c](javascript:alert(1)) <javascript:alert(1)>",
    f"[a](data:text/html,<script>{ATTACK}</script>) [b](vbscript:x) [c](blob:x) [d](//x.example) [e](/x)",
    f'[a](https://x.example/"onmouseover="{ATTACK}) [b](https://x.example "t" onclick="{ATTACK}")',
    f"[<img src=x onerror={ATTACK}>](https://x.example/'onclick='{ATTACK})",
    f'```"><script>{ATTACK}</script><img/src=x/onerror={ATTACK}>\n</code></pre><script>{ATTACK}</script>\n```',
    f"| <script>{ATTACK}</script> | b |\n|---|---|\n| <iframe srcdoc='<script>parent.attacked=1'> | <base href=x> |",
    f"# <a href='javascript:{ATTACK}'>x</a>\n> <form action=javascript:{ATTACK}><button>x\n- <style>*{{top:0}}",
    f"</span></div></script><script>{ATTACK}</script><!-- `<b onclick={ATTACK}>`",
    f'javascript:{ATTACK} https://x.example/<script>{ATTACK}</script> http://"onclick="{ATTACK}"',
]
NAME = f"x\"><img src=x onerror='{ATTACK}'><script>{ATTACK}</script>"


def check_harmless(browser: Browser) -> None:
    """Nothing ran, and the page has no element or address that a text could have brought in."""
    browser.run(
        "for (const e of document.querySelectorAll('.text a, .text button, .text .piece')) {"
        "e.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})); e.focus(); }"
    )
    assert browser.run("return window.attacked ?? 0") == 0
    with pytest.raises(RuntimeError, match="no such alert"):
        browser.call("alert/text")
    outside = "main script, main img, main iframe, main style, main base, aside script, aside img, #load script"
    assert browser.count(outside) == 0
    attributes = browser.run(
        "return [...document.querySelectorAll(':is(main, aside) :not(.fill)')].flatMap((e) => e.getAttributeNames())"
    )
    assert [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc", "action")] == []
    links = browser.run("return [...document.querySelectorAll('a')].map((e) => [e.protocol, e.rel, e.target])")
    assert {tuple(link) for link in links} <= {
        ("https:", "noopener noreferrer", "_blank"),
        ("http:", "noopener noreferrer", "_blank"),
    }


@pytest.mark.essential
def test_hostile_texts_and_names_stay_texts(browser: Browser) -> None:
    model = {"name": NAME, "drafts": [NAME, "ngram"], "explain": NAME, "dtype": NAME, "kernels": NAME}
    with fake_server(model) as served:
        policy = httpx.get(served).headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        browser.open(f"{served}/page/icon.svg")
        kept = [{"id": NAME, "time": 1, "model": NAME, "turns": _turns(HOSTILE)}, {"id": "2", "time": "x"}]
        browser.run("localStorage.setItem('draftree-conversations', arguments[0])", json.dumps(kept))
        visit(browser, served)
        assert NAME in browser.text("#conversations .conversation") or "script" in browser.text("#conversations")
        check_harmless(browser)
        browser.click(".conversation")
        browser.wait("document.querySelectorAll('#log > li').length > 2")
        check_harmless(browser)
        browser.click("#new-conversation")
        for text in HOSTILE:
            say(browser, f"say {text}")
            press(browser, "#log", "Show source")
            assert browser.text(ANSWER) == text
            press(browser, "#log", "Show formatted")
        browser.run("document.querySelector(arguments[0]).focus()", ANSWER)
        browser.press("End", "Up")
        check_harmless(browser)
        for tab, run in (("complete", True), ("compare", True), ("load", False)):
            browser.click(f"#tab-{tab}")
            if run:
                say(browser, f"say {HOSTILE[1]}")
            else:
                browser.wait("document.querySelector('#load .served h2')")
                assert NAME in browser.text("#load")
            check_harmless(browser)


def _turns(texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for text in texts for role in ("user", "assistant")]
