"""Names of remote targets: `remote:URL`, with options after a question mark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from draftree.core.errors import ConfigurationError, DraftreeError, GenerationError, suggestion
from draftree.core.host import is_loopback

PREFIX = "remote:"
FORM = "write remote:http://HOST:PORT or remote:https://HOST"
OPTIONS = ("model", "tokenizer", "transport", "ca", "wait", "split", "weights", "states", "picks")
STATES = ("float32", "bfloat16", "int8")
PICKS = ("device", "server")
SPLIT_OPTIONS = ("weights", "states", "picks")  # options that need `split`
TRANSPORTS = ("auto", "websocket", "post")
MAX_SPLIT = 10_000
WAIT_SECONDS = 60.0  # how long a device waits for a server that does not answer or is full
MAX_WAIT = 86_400
PORTS = {"http": 80, "https": 443}


def is_remote(name: object) -> bool:
    """Return whether a model argument names a remote target."""
    return isinstance(name, str) and name.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A verify server, and how to use it."""

    scheme: str  # "http" or "https"
    host: str  # name or number, an IPv6 number without brackets
    port: int  # TCP port
    path: str = ""  # prefix of all paths, without a slash at its end
    model: str | None = None  # name of the served model; None for the server's first
    tokenizer: str | None = None  # local folder of the target's tokenizer; None to fetch the server's
    transport: str = "auto"  # "websocket", "post", or "auto" for the first that works
    ca: str | None = None  # file with the certificates (PEM) that may sign the server's; None for those of the system
    wait: float = WAIT_SECONDS  # seconds that the device waits for a server that does not answer or is full
    split: int = 0  # layers that the device runs; 0 if it sends tokens
    weights: str = ""  # model whose first layers, embedding and output head the device reads; empty without `split`
    states: str = "float32"  # format of hidden states on the way: "float32", "bfloat16" or "int8"
    picks: str = "device"  # where logits are computed and tokens picked: "device" or "server"

    @classmethod
    def parse(cls, name: str) -> RemoteAddress:
        """Return the address of a name: `remote:URL`, or `remote:URL?OPTION=VALUE&…`."""
        url = name.removeprefix(PREFIX).strip()
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"'{name}' has no valid URL ({error}): {FORM}") from error
        if parts.scheme not in PORTS or not host:
            raise ConfigurationError(f"'{name}' does not name a server by http:// or https://: {FORM}")
        if parts.username is not None or parts.password is not None:
            raise ConfigurationError(
                "the URL of a remote target contains a user or a password: leave them out, and set the API key in "
                "DRAFTREE_API_KEY"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = next((key for key in options if key not in OPTIONS), None)
        if unknown is not None or parts.fragment:
            wrong = unknown if unknown is not None else f"#{parts.fragment}"
            raise ConfigurationError(f"'{name}' has the option '{wrong}': {suggestion(wrong, OPTIONS)}")
        for key, known in (("transport", TRANSPORTS), ("states", STATES), ("picks", PICKS)):
            if options.get(key, known[0]) not in known:
                raise ConfigurationError(f"'{name}' has {key}={options[key]}: {suggestion(options[key], known)}")
        ca = options.get("ca") or None
        if ca is not None and parts.scheme != "https":
            raise ConfigurationError(f"'{name}' has the option 'ca' without encryption: write https:// or leave it out")
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or PORTS[parts.scheme],
            path=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
            model=options.get("model") or None,
            tokenizer=options.get("tokenizer") or None,
            transport=options.get("transport", TRANSPORTS[0]),
            ca=ca,
            wait=_wait(name, options.get("wait")),
            split=_split(name, options),
            weights=options.get("weights", ""),
            states=options.get("states", STATES[0]),
            picks=options.get("picks", PICKS[0]),
        )

    @property
    def is_private(self) -> bool:
        """Whether what is sent cannot be read on the way: TLS, or this machine."""
        return self.scheme == "https" or is_loopback(self.host)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, path: str, *, websocket: bool = False) -> str:
        """Return the URL of a path below the root."""
        scheme = {"http": "ws", "https": "wss"}[self.scheme] if websocket else self.scheme
        return f"{scheme}://{self.authority}{self.path}{path}"

    def __str__(self) -> str:
        return self.url("")


def _wait(name: str, option: str | None) -> float:
    if option is None:
        return WAIT_SECONDS
    try:
        seconds = float(option)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_WAIT:
        raise ConfigurationError(f"'{name}' has wait={option}: give seconds above 0, at most {MAX_WAIT}")
    return seconds


def _split(name: str, options: Mapping[str, str]) -> int:
    """Return the layers of the device; 0 if it sends tokens."""
    option = options.get("split")
    if option is None:
        lonely = next((key for key in SPLIT_OPTIONS if key in options), None)
        if lonely is not None:
            raise ConfigurationError(f"'{name}' has {lonely}={options[lonely]} without split=N: add the layers to run")
        return 0
    if not (option.isascii() and option.isdigit() and 0 < int(option) <= MAX_SPLIT):
        raise ConfigurationError(f"'{name}' has split={option}: give the number of layers that the device runs, from 1")
    if not options.get("weights"):
        raise ConfigurationError(
            f"'{name}' has split={option} without weights: name the model whose first {option} layers this device "
            "runs, such as weights=smollm2-135m-instruct"
        )
    return int(option)


class FrameError(DraftreeError):
    """A frame that cannot be read."""

    def __init__(self, message: str, *, code: str = "bad_frame") -> None:
        super().__init__(message)
        self.code = code  # machine-readable reason


class ConnectionLostError(DraftreeError):
    """A connection ended or timed out; the same frame can be sent again over a new one."""


class UnreachableError(GenerationError):
    """The server did not answer for as long as the client waits."""


class RefusedError(GenerationError):
    """The server refuses a request, and would refuse it again.

    `code`: the server's machine-readable reason. `retry_ms`: milliseconds after which the server may accept it; None if
    it will not.
    """

    def __init__(self, message: str, *, code: str, retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_ms = code, retry_ms


class SessionLostError(DraftreeError):
    """The server does not know the session, or a text of it, any more: texts have to be opened again."""
