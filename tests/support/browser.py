"""A headless Chromium, driven through chromedriver and the WebDriver protocol. Not a test itself."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Name of the reference to an element, fixed by the protocol."""

KEYS = {
    "Backspace": "\ue003",
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Shift": "\ue008",
    "Escape": "\ue00c",
    "Space": " ",
    "End": "\ue010",
    "Home": "\ue011",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
}
"""Keys without a character of their own."""


@dataclass(frozen=True, slots=True)
class Browser:
    """One window.

    Attributes:
        session: URL of the session at chromedriver.
        client: HTTP client for it.
    """

    session: str
    client: httpx.Client

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST a command, or GET without a body, and return its value."""
        url = f"{self.session}/{path}"
        answer = self.client.get(url) if body is None else self.client.post(url, json=body)
        value = answer.json()["value"]
        if answer.is_error:
            raise RuntimeError(f"{path}: {value['error']}: {value['message']}")
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.call("goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url: str) -> None:
        """Load a page anew, whatever is loaded."""
        self.call("url", {"url": "about:blank"})
        self.call("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript and return what it returns."""
        return self.call("execute/sync", {"script": script, "args": list(arguments)})

    def find(self, css: str) -> str:
        """Return the reference to the first element."""
        return str(self.call("element", {"using": "css selector", "value": css})[ELEMENT])

    def click(self, css: str) -> None:
        """Click the middle of an element; fails if something covers it."""
        self.call(f"element/{self.find(css)}/click", {})

    def hover(self, css: str) -> None:
        """Move the pointer to the middle of an element."""
        origin = {ELEMENT: self.find(css)}
        move = {"type": "pointerMove", "duration": 0, "origin": origin, "x": 0, "y": 0}
        self.call("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def press(self, *keys: str, shift: bool = False) -> None:
        """Press keys of `KEYS` one after another in the focused element."""
        codes = [KEYS[key] for key in keys]
        steps = [{"type": kind, "value": code} for code in codes for kind in ("keyDown", "keyUp")]
        if shift:
            steps = [{"type": "keyDown", "value": KEYS["Shift"]}, *steps, {"type": "keyUp", "value": KEYS["Shift"]}]
        self.call("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def write(self, text: str) -> None:
        """Write characters into the focused element."""
        steps = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        self.call("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def text(self, css: str) -> str:
        """Return the text content of an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def count(self, css: str) -> int:
        """Return how many elements match."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", css))

    def wait(self, condition: str, *arguments: Any, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})", *arguments):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds} s: {condition}; log: {self.log()}")
            time.sleep(0.03)

    def emulate(self, *, width: int = 1280, height: int = 900, scheme: str = "light", motion: str = "reduce") -> None:
        """Set the size of the window, the preferred colours, and whether motion is reduced."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=media)

    def shot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("screenshot")))

    def log(self) -> list[str]:
        """Return new messages of the console: errors and what the content security policy blocked."""
        return [entry["message"] for entry in self.call("se/log", {"type": "browser"}) if entry["level"] != "INFO"]


def programs() -> tuple[str, str] | None:
    """Return the paths of Chromium and chromedriver; None if one is missing."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser with an empty profile. Skips the test if Chromium or chromedriver is not installed."""
    found = programs()
    if found is None:
        pytest.skip("Chromium with chromedriver is not installed; Debian: apt-get install chromium chromium-driver")
    chromium, driver = found
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _running(driver) as url:
        arguments = [*ARGUMENTS, f"--user-data-dir={profile}"]
        options = {"binary": chromium, "args": arguments, "prefs": {"download.prompt_for_download": False}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(trust_env=False, timeout=60) as client:
            answer = client.post(f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer
            browser = Browser(f"{url}/session/{answer['sessionId']}", client)
            browser.emulate()
            try:
                yield browser
            finally:
                client.delete(browser.session)


@contextmanager
def _running(driver: str) -> Iterator[str]:
    """Start chromedriver on a free port and yield its URL."""
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                started = re.search(r"started successfully on port (\d+)", line)
                if started:
                    yield f"http://127.0.0.1:{started[1]}"
                    return
            raise RuntimeError("chromedriver did not start")
        finally:
            process.terminate()
