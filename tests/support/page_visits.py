"""Visits to the page of a scripted server. Not a test itself."""

from __future__ import annotations

from browser import Browser

IDLE = "document.getElementById('stop-run').hidden"
ANSWER = "#log .assistant .text"


def visit(browser: Browser, url: str, fragment: str = "") -> None:
    browser.open(f"{url}/#{fragment}")
    browser.wait("document.getElementById('model').value !== '' || !document.getElementById('error').hidden")


def send(browser: Browser) -> None:
    browser.click("#send")
    browser.wait(f"{IDLE} && document.querySelector('.view:not([hidden]) .text, #error:not([hidden])')")
