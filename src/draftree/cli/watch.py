"""`draftree watch`: the load and the rounds of a running server, live or once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftree.cli.layout import OUTPUT, argument, option, refuse
from draftree.cli.render import is_terminal, say
from draftree.core.errors import ConfigurationError, DraftreeError, harmless
from draftree.core.files import parse_json

FORM = "give the address that 'draftree serve' prints, such as http://127.0.0.1:8000"
API_PATH = "/v1"


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    host: str
    port: int
    path: str  # prefix of all paths, without a slash at its end; usually empty

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address of a URL. `/v1` at its end, which clients of the API need, is left out."""
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"'{url}' is not a URL ({error}): {FORM}") from error
        if parts.scheme not in ("http", "https"):
            raise ConfigurationError(f"'{url}' does not begin with http:// or https://: {FORM}")
        if not host:
            raise ConfigurationError(f"'{url}' names no host: {FORM}")
        if parts.username is not None or parts.password is not None:
            raise ConfigurationError("the URL contains a user or a password: leave it out, and give keys with --key")
        if parts.query or parts.fragment or not (parts.path + host).isascii() or " " in parts.path + host:
            raise ConfigurationError(f"'{url}' is not the root of a server: {FORM}")
        path = parts.path.rstrip("/").removesuffix(API_PATH).rstrip("/")
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


STATUS_PATH, ROUNDS_PATH = "/draftree/status", "/draftree/rounds"
TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A stream of rounds that is silent for longer is opened again; the server sends a comment more often."""
MAX_BYTES = 4_000_000  # largest answer or event that is read
UNAUTHORIZED, FORBIDDEN = 401, 403
OK, SERVER_ERROR = 200, 500


class UnreachableError(DraftreeError):
    """The server does not answer; a later attempt may succeed."""


class RefusedError(DraftreeError):
    """The server answers, but not with what is needed; a later attempt gives the same answer."""


class ServerClient:
    """Reads the status and the rounds of one server."""

    def __init__(self, address: Address, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise ConfigurationError("the API key is empty, or contains spaces around it or characters beyond ASCII")
        self.address = address
        self._key = key

    def status(self) -> dict[str, Any]:
        with self._opened(STATUS_PATH, TIMEOUT_SECONDS) as (_, response), self._sentences():
            raw = response.read(MAX_BYTES + 1)
        return self._parsed(raw)

    @contextlib.contextmanager
    def rounds(self) -> Iterator[tuple[socket.socket, Iterator[dict[str, Any]]]]:
        """Yield the stream of rounds and its socket, whose shutdown in another thread ends it."""
        with self._opened(ROUNDS_PATH, SILENCE_SECONDS) as (sock, response):
            yield sock, self._events(response)

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        data: list[bytes] = []
        while True:
            with self._sentences():
                line = response.readline(MAX_BYTES + 1)
            if not line:
                return
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").strip())
            elif not line.strip() and data:
                yield self._parsed(b"\n".join(data))
                data = []

    @contextlib.contextmanager
    def _opened(self, path: str, timeout: float) -> Iterator[tuple[socket.socket, HTTPResponse]]:
        kind = HTTPSConnection if self.address.scheme == "https" else HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=timeout)
        headers = {"Accept": "application/json, text/event-stream"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with self._sentences():
                connection.request("GET", self.address.path + path, headers=headers)
                sock = connection.sock  # the connection drops it if the answer ends with it
                response = connection.getresponse()
            self._require_ok(response.status)
            with response:
                yield sock, response
        finally:
            connection.close()

    def _require_ok(self, status: int) -> None:
        if status == OK:
            return
        if status in (UNAUTHORIZED, FORBIDDEN):
            case = "requires an API key" if self._key is None else "refuses this API key"
            raise RefusedError(f"{self.address} {case}: give the right one with DRAFTREE_API_KEY or --key")
        if status >= SERVER_ERROR:
            raise UnreachableError(f"{self.address} answers with status {status}: try again later")
        raise RefusedError(
            f"{self.address} answers with status {status}, so it is not a Draftree server: check the URL"
        )

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn failures of the network into one sentence."""
        try:
            yield
        except (OSError, HTTPException) as error:
            match error:
                case ConnectionRefusedError():
                    text = f"nothing listens at {self.address}: check host and port, or start 'draftree serve MODEL'"
                case socket.gaierror():
                    text = f"the host '{self.address.host}' is unknown: check the URL"
                case TimeoutError():
                    text = f"{self.address} does not answer in time: check that the server runs"
                case HTTPException():
                    name = type(error).__name__
                    text = f"{self.address} does not speak HTTP ({name}): check the scheme and the port"
                case _:
                    text = f"{self.address} cannot be reached: {error.strerror or error}"
            raise UnreachableError(text) from error

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            values = parse_json(raw) if len(raw) <= MAX_BYTES else None
        except ValueError:  # also wrong UTF-8
            values = None
        if not isinstance(values, dict):
            raise RefusedError(f"{self.address} does not answer as a Draftree server does: check the URL")
        return values


# A server may report anything: these read a value of a report as what the view expects.


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    return [mapping(item) for item in value] if isinstance(value, list) else []


def text(values: Mapping[str, Any], name: str) -> str:
    """Return a text in one line that is safe to show."""
    value = values.get(name)
    return " ".join(harmless(value).split()) if isinstance(value, str) else ""


def number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def count(values: Mapping[str, Any], name: str) -> int:
    return max(0, int(number(values, name) or 0))


RATES, ROUNDS = 60, 200  # remembered rates of a model, and rounds of all models


class History:
    """The last reports of a server, the oldest first. Mutated from any thread."""

    def __init__(self) -> None:
        self.status: Mapping[str, Any] | None = None
        self.rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RATES))  # tokens per second by model
        self.rounds: deque[Mapping[str, Any]] = deque(maxlen=ROUNDS)
        self.trouble = ""  # why the server cannot be read now; empty if it can

    @property
    def models(self) -> list[Mapping[str, Any]]:
        return mappings((self.status or {}).get("models"))

    def add_status(self, status: Mapping[str, Any]) -> None:
        """Remember a status; models that are gone are forgotten."""
        self.status = status
        self.trouble = ""
        for name in set(self.rates) - {text(model, "name") for model in self.models}:
            del self.rates[name]
        for model in self.models:
            self.rates[text(model, "name")].append(number(model, "tokens_per_second") or 0.0)


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0


def pauses() -> Iterator[float]:
    """Yield the seconds between attempts, each twice as long as the one before."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class RoundListener:
    """Reads rounds until it is closed, and adds each on its thread.

    A refusal ends it: the status meets the same one and reports it.
    """

    def __init__(self, client: ServerClient, add: Callable[[dict[str, Any]], None]) -> None:
        self._client = client
        self._add = add
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="draftree-watch-rounds", daemon=True)

    def __enter__(self) -> RoundListener:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        with self._lock:
            self._end_if_closed()
        self._thread.join(timeout=1)  # an attempt to connect cannot be interrupted, and the thread is a daemon

    def _run(self) -> None:
        waits = pauses()
        while not self._closed.is_set():
            try:
                with self._client.rounds() as (sock, rounds):
                    self._hold(sock)
                    for values in rounds:
                        waits = pauses()
                        self._add(values)
            except RefusedError:
                return
            except UnreachableError:
                pass
            finally:
                self._hold(None)
            self._closed.wait(next(waits))

    def _hold(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock
            self._end_if_closed()

    def _end_if_closed(self) -> None:
        """End the stream; its iteration in the other thread ends or raises."""
        if self._socket is not None and self._closed.is_set():
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


LEVELS = "▁▂▃▄▅▆▇█"
PHASE_WIDTH, MAX_BAR = 14, 16
PHASE_STYLES = {"plan": "blue", "draft": "green", "score": "magenta", "verify": "cyan", "commit": "yellow"}
NOTHING = "–"
FIXED_LINES = 10  # lines of the view besides those of models and rounds
LEAST_ROUNDS = 3


def view(url: str, history: History, *, width: int, height: int) -> RenderableType:
    parts: list[RenderableType] = [heading(url, history)]
    if history.status is None:
        return Group(*parts)
    parts += [Text(), models_table(history.models), Text()]
    details = [line for model in history.models for line in model_lines(model, history, width)]
    used = FIXED_LINES + len(history.models) + sum(1 + line.cell_len // width for line in details)
    # another thread adds rounds
    rounds = list(history.rounds)
    parts += [*details, phases_line(rounds), Text(), *rounds_lines(rounds, max(LEAST_ROUNDS, height - used))]
    return Group(*parts)


def heading(url: str, history: History) -> Text:
    line = Text(url, style="bold")
    status = history.status
    if status is not None:
        up = duration(number(status, "uptime_seconds"))
        line.append(f"  draftree {text(status, 'version')}, up {up}{queue(status)}", style="not bold")
    if history.trouble:
        line.append(f"\n{history.trouble}", style="bold red")
    return line


def queue(status: Mapping[str, Any]) -> str:
    counts = mapping(status.get("queue"))
    words = []
    for name in ("running", "waiting", "places"):
        if name in counts:
            limit = number(counts, f"max_{name}")
            words.append(f"{name} {figure(number(counts, name))}" + ("" if limit is None else f" of {figure(limit)}"))
    return f"\nrequests: {', '.join(words)}" if words else ""


def models_table(models: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("model")
    table.add_column("drafters")
    for title in ("tokens/s", "running", "waiting", "length", "accepted"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in models:
        rate, drafts = number(model, "acceptance_rate"), model.get("drafts")
        names = [harmless(str(draft)) for draft in drafts] if isinstance(drafts, list) else []
        table.add_row(
            cut(text(model, "name"), style="bold"),
            cut(", ".join(names) or NOTHING),
            figure(number(model, "tokens_per_second"), digits=1),
            str(count(model, "running")),
            str(count(model, "waiting")),
            figure(number(model, "acceptance_length"), digits=2),
            NOTHING if rate is None else f"{rate:.0%}",
        )
    return table


def model_lines(model: Mapping[str, Any], history: History, width: int) -> list[Text]:
    """Return the rates of a model over time, and the planner's reason."""
    name, explain = text(model, "name"), text(model, "explain")
    line = cut(f"{name}  tokens/s  ", style="dim")
    room = max(1, width - line.cell_len)
    line.append(sparkline(history.rates.get(name, ()), room), style="not dim green")
    return [line, Text("  planner: ", style="dim").append(explain, style="not dim")] if explain else [line]


def cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def phases_line(rounds: Sequence[Mapping[str, Any]]) -> Text:
    """Return the shares of the phases as one bar with its legend."""
    line = cut("phases  ", style="dim")
    if not rounds:
        return line.append("no rounds yet")
    sums = {
        phase: sum(number(mapping(record.get("seconds")), phase) or 0.0 for record in rounds) for phase in PHASE_STYLES
    }
    total = sum(sums.values()) or 1.0
    reached = 0.0
    for phase, style in PHASE_STYLES.items():
        begin, reached = round(reached * PHASE_WIDTH), reached + sums[phase] / total
        line.append("█" * (round(reached * PHASE_WIDTH) - begin), style=f"not dim {style}")
    for phase, style in PHASE_STYLES.items():
        line.append(f"  {phase} {sums[phase] / total:.0%}", style=f"not dim {style}")
    return line


def rounds_lines(rounds: Sequence[Mapping[str, Any]], count: int) -> list[Text]:
    """Return one line for each of the last rounds, the newest first."""
    legend = cut("rounds  ", style="dim")
    legend.append("█ accepted", style="not dim green").append(" ░ drafted", style="not dim red")
    legend.append(" · none drafted; newest first")
    return [legend, *(round_line(record) for record in reversed(rounds[-count:]))]


def round_line(done: Mapping[str, Any]) -> Text:
    seconds, rows = mapping(done.get("seconds")), mappings(done.get("sequences"))
    total = number(seconds, "total") or sum(number(seconds, phase) or 0.0 for phase in PHASE_STYLES)
    line = cut("")
    line.append(f"{1000 * total:7.1f} ms  ", style="dim")
    line.append(f"{sum(count(row, 'num_written') for row in rows):4d} tokens  ")
    for row in rows:
        line.append_text(bar(count(row, "num_drafted"), count(row, "num_accepted"))).append(" ")
    return line.append(f" {text(done, 'model')}", style="dim")


def bar(num_drafted: int, num_accepted: int) -> Text:
    """Return accepted and other drafted tokens of a sequence as blocks; long drafts are shown to scale."""
    drafted = max(num_drafted, num_accepted)
    if not drafted:
        return Text("·", style="dim")
    scale = min(1.0, MAX_BAR / drafted)
    accepted = round(num_accepted * scale)
    width = max(1, round(drafted * scale))
    return Text("█" * accepted, style="green").append("░" * (width - accepted), style="red")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as one line of blocks between zero and the largest of them."""
    last = list(values)[-width:]
    most = max(last, default=0.0)
    if most <= 0:
        return LEVELS[0] * len(last)
    return "".join(LEVELS[min(len(LEVELS) - 1, int(value / most * len(LEVELS)))] for value in last)


def figure(value: float | None, *, digits: int = 0) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


KEY_VARIABLE = "DRAFTREE_API_KEY"
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 3600.0
ONCE_HEIGHT = 30


def watch(
    url: str = argument(..., "Address of the server, such as http://127.0.0.1:8000.", "URL"),
    *,
    key: str | None = option(
        None, f"API key; other users of this machine can see it, the variable {KEY_VARIABLE} is safer.", "KEY"
    ),
    interval: float = option(1.0, "Seconds between two readings of the status.", "SECONDS"),
    once: bool = option(
        False, "Print one snapshot with the rounds of one interval, and exit.", panel=OUTPUT, names="--once"
    ),
    as_json: bool = option(False, "Print the snapshot as one JSON object.", panel=OUTPUT, names="--json"),
) -> None:
    """Show the load and the rounds of a running server. Ctrl-C leaves."""
    if not SHORTEST_SECONDS <= interval <= LONGEST_SECONDS:
        raise ConfigurationError(
            f"--interval is {interval}: it must be from {SHORTEST_SECONDS} to {LONGEST_SECONDS:.0f} seconds"
        )
    refuse(as_json and not once, "--json", "the object of --json is one snapshot: add --once")
    refuse(not once and not is_terminal(sys.stdout), "--once", "standard output is not a terminal: add --once")
    client = ServerClient(Address.parse(url), key if key is not None else os.environ.get(KEY_VARIABLE) or None)
    if once:
        print_snapshot(client, interval, as_json=as_json)
    else:
        show_live(client, interval)


def print_snapshot(client: ServerClient, interval: float, *, as_json: bool) -> None:
    client.status()  # wrong addresses and keys are reported before the wait
    history = History()
    raw: list[dict[str, Any]] = []
    with RoundListener(client, raw.append):
        time.sleep(interval)
    status = client.status()
    if as_json:
        say(json.dumps({"url": str(client.address), "status": status, "rounds": raw}, ensure_ascii=False) + "\n")
        return
    history.add_status(status)
    history.rounds.extend(raw)
    console = Console(highlight=False)
    console.print(view(str(client.address), history, width=console.width, height=ONCE_HEIGHT))


def show_live(client: ServerClient, interval: float) -> None:
    """Show the server until Ctrl-C; a server that stops answering is tried again."""
    history = History()
    waits = pauses()
    console = Console(highlight=False)
    history.add_status(client.status())
    with (
        RoundListener(client, history.rounds.append),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        pause = interval
        while True:
            shown = view(str(client.address), history, width=console.width, height=console.height)
            live.update(shown, refresh=True)
            time.sleep(pause)
            pause = interval
            try:
                history.add_status(client.status())
                waits = pauses()
            except UnreachableError as error:
                pause = next(waits)
                history.trouble = f"{error} (next attempt in {pause:.1f} s)"
