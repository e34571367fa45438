"""Settings of the server: every option of `draftree serve`, checked before any weights are loaded."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import expanded, shown_name
from draftree.core.host import is_loopback
from draftree.drafters import drafts
from draftree.drafters.learning.store import parse_learning
from draftree.options import AUTO_DRAFT, NO_DRAFT, ModelOptions

DEFAULT_DRAFTS = (AUTO_DRAFT,)
"""Drafters of a model for which none is named: chosen when it is loaded, lossless, and switched off by the planner
where drafting does not pay."""
SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One model to serve; nothing is loaded yet.

    The `source` is as for `LLM`, and never shown to clients. The first of `drafts` is the default; without any, the
    model decodes plainly.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    drafts: tuple[str, ...] = DEFAULT_DRAFTS

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigurationError(f"model '{self.name}' has no source: write NAME=MODEL")
        for name in self.names:
            if not SERVED_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"'{name}' cannot be the name of a served model: use up to 128 letters, digits and . _ : / -, "
                    "and write NAME=MODEL"
                )
        if not all(drafts(draft) for draft in self.drafts):
            raise ConfigurationError(f"model '{self.name}': '{NO_DRAFT}' stands alone; name no other drafter with it")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def choose_models(models: Sequence[str], drafters: Sequence[str] = ()) -> tuple[ModelChoice, ...]:
    """Read models and drafters as the command line spells them.

    `models`: `MODEL`, `NAME=MODEL` or `NAME,ALIAS,…=MODEL`. Without a name, a path is served under its last part.
    `drafters`: specs for all models, or `NAME=SPEC` for one. The first of a model is its default; `none` is plain
    decoding. Without any, `DEFAULT_DRAFTS`.
    """
    if not models:
        raise ConfigurationError("there is no model to serve: name one")
    chosen = [_model(text) for text in models]
    names = [name for choice in chosen for name in choice.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the name '{twice}' is used twice: give each model a name of its own, NAME=MODEL")
    shared, specs_by_name = _split(drafters, names)
    return tuple(dataclasses.replace(choice, drafts=_drafts(choice, shared, specs_by_name)) for choice in chosen)


def _model(text: str) -> ModelChoice:
    before, equals, source = text.partition("=")
    if not equals or expanded(text).exists():
        return ModelChoice(shown_name(text), text)
    name, *aliases = (part.strip() for part in before.split(","))
    return ModelChoice(name, source, tuple(aliases))


def _split(drafters: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    shared: list[str] = []
    specs_by_name: dict[str, list[str]] = {}
    for text in drafters:
        before, equals, spec = text.partition("=")
        if equals and before in names:
            specs_by_name.setdefault(before, []).append(spec)
        elif equals and not set(":,+") & set(before):  # a spec has one of these before its first equals sign
            raise ConfigurationError(f"drafter '{text}': there is no model '{before}': {suggestion(before, names)}")
        else:
            shared.append(text)
    return shared, specs_by_name


def _drafts(choice: ModelChoice, shared: Sequence[str], specs_by_name: dict[str, list[str]]) -> tuple[str, ...]:
    specs = [spec for name in choice.names for spec in specs_by_name.get(name, ())] or list(shared)
    if not specs:
        return DEFAULT_DRAFTS
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"drafter '{twice}' of model '{choice.name}' is given twice: give it once")
    return () if specs == [NO_DRAFT] else tuple(specs)


MEBIBYTE = 2**20
BYTES_WORD = "BYTES"
ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+", re.ASCII)
HOST = re.compile(r"[A-Za-z0-9.\-_:]+", re.ASCII)
MAX_PORT = 65535
MAX_PROMPTS = 128
LOG_FORMATS = ("json", "text")
LOG_LEVELS = ("debug", "info", "warning", "error")


class Group(enum.StrEnum):
    NETWORK = "Network"
    ACCESS = "Access"
    LIMITS = "Limits"
    LOGS = "Logs"


def _option(default: Any, text: str, group: Group, *, word: str | None = None, least: float | None = None) -> Any:
    """Return a field that the command line offers; `word` is the placeholder of its value in the help."""
    return dataclasses.field(default=default, metadata={"help": text, "group": group, "word": word, "least": least})


NETWORK, ACCESS, LIMITS, LOGS = Group
MODEL_OPTIONS = tuple(
    field
    for field in dataclasses.fields(ModelOptions)
    if "help" in field.metadata and field.name not in ("draft", "trust_remote_code", "allow_control_tokens")
)
"""Options of all served models, which are options of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Every option of `draftree serve`. Fields with help in their metadata are options of the command.

    Times are seconds, sizes bytes. The first model is the default of clients that name none.
    """

    models: tuple[ModelChoice, ...]

    host: str = _option("127.0.0.1", "Address to listen on.", NETWORK, word="ADDRESS")
    port: int = _option(8000, "Port to listen on; 0 for a free one.", NETWORK, least=0)
    uds: str | None = _option(None, "Listen on a Unix socket instead of a port.", NETWORK, word="PATH")
    tls_certificate: str | None = _option(
        None, "Serve HTTPS with this certificate chain (PEM); needs --tls-key.", NETWORK, word="FILE"
    )
    tls_key: str | None = _option(None, "Private key of the certificate (PEM).", NETWORK, word="FILE")
    cors_origins: tuple[str, ...] = _option(
        (), "Origin whose pages may call the server from a browser, or '*'; none if not given.", NETWORK, word="ORIGIN"
    )
    allowed_hosts: tuple[str, ...] = _option(
        (), "Name besides localhost for this machine's own address without API keys, or '*'.", NETWORK, word="NAME"
    )
    page: bool = _option(True, "Serve the page at /.", NETWORK)

    api_key_file: str | None = _option(
        None, "File of API keys, one per line; the variable DRAFTREE_API_KEYS adds more.", ACCESS, word="FILE"
    )
    allow_no_key: bool = _option(False, "Serve addresses other than this machine's own without API keys.", ACCESS)

    max_body_bytes: int = _option(8 * MEBIBYTE, "Size of a request body.", LIMITS, word=BYTES_WORD, least=1)
    max_prompt_tokens: int | None = _option(
        None, "Tokens of a prompt; the model's context if not given.", LIMITS, least=1
    )
    max_completion_tokens: int | None = _option(
        None, "Tokens of one text; the model's context if not given.", LIMITS, least=1
    )
    max_choices: int = _option(16, "Texts of one request (n).", LIMITS, least=1)
    image_folder: str | None = _option(
        None, "Folder whose files requests may name as images; data URLs alone if not given.", LIMITS, word="PATH"
    )
    max_audio_seconds: float = _option(1800.0, "Length of a sound file.", LIMITS, word="S", least=0)
    max_beam_tokens: int = _option(
        4096, "Beams times tokens of a text in one beam search; 0 refuses beam searches.", LIMITS, least=0
    )
    max_concurrent_requests: int = _option(32, "Texts of running requests; further requests wait.", LIMITS, least=1)
    max_queue: int = _option(256, "Requests that wait; beyond it 503 with Retry-After.", LIMITS, least=0)
    max_round_readers: int = _option(
        16, "Clients that read /draftree/rounds at the same time; beyond it 429 with Retry-After.", LIMITS, least=0
    )
    key_share: float = _option(
        1.0, "Largest share of running texts and of waiting requests that one API key may hold, above 0 to 1.", LIMITS
    )
    strict_fields: bool = _option(
        False, "Refuse fields that have no effect; by default a Warning header and the log name them.", LIMITS
    )
    request_timeout: float = _option(600.0, "Seconds from arrival to the last token.", LIMITS, word="S", least=0)
    body_timeout: float = _option(30.0, "Seconds in which a request must arrive.", LIMITS, word="S", least=0)
    keep_alive: float = _option(30.0, "Seconds before an idle connection is closed.", LIMITS, word="S", least=0)
    drain_timeout: float = _option(
        30.0, "Seconds that running requests have after SIGTERM or Ctrl-C.", LIMITS, word="S", least=0
    )
    memory: int | None = _option(
        None, "Memory for keys and values of all models together; half of the free memory if not given.",
        LIMITS, word=BYTES_WORD, least=1,
    )  # fmt: skip

    log_format: str = _option("json", "json or text.", LOGS, word="NAME")
    log_level: str = _option("info", "debug, info (one line per request), warning or error.", LOGS, word="NAME")
    log_prompts: bool = _option(False, "Log prompts and texts, too.", LOGS)
    record: str | None = _option(
        None, "A trace of all rounds, with the tokens of all texts; of several models one each, FILE-MODEL.", LOGS,
        word="FILE",
    )  # fmt: skip
    otlp_endpoint: str | None = _option(
        None, "Send a span of every request to this OpenTelemetry collector (OTLP over HTTP), such as "
        "http://localhost:4318/v1/traces; needs the extra 'telemetry'.", LOGS, word="URL",
    )  # fmt: skip

    options: ModelOptions = dataclasses.field(default_factory=lambda: ModelOptions(None))

    @classmethod
    def of(cls, models: tuple[ModelChoice, ...], **values: Any) -> ServerSettings:
        """Return settings from their fields and those of `MODEL_OPTIONS` by name."""
        options = {field.name: values.pop(field.name) for field in MODEL_OPTIONS if field.name in values}
        return cls(models=models, options=ModelOptions(None, **options), **values)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigurationError("there is no model to serve: name one")
        for field in dataclasses.fields(self):
            if field.metadata.get("least") is not None:
                _require_number(field, getattr(self, field.name))
        if self.port > MAX_PORT:
            raise ConfigurationError(f"port is {self.port}: it must be at most {MAX_PORT}; 0 takes a free one")
        if (self.tls_certificate is None) != (self.tls_key is None):
            present, missing = ("tls_key", "tls_certificate")[:: 1 if self.tls_certificate is None else -1]
            raise ConfigurationError(f"{present} is given without {missing}: HTTPS needs both")
        if self.options.is_parallel and len(self.models) > 1:
            raise ConfigurationError(
                f"{self.options.division} divides one model, and {len(self.models)} are named: name one"
            )
        if self.options.download_drafter and not any(AUTO_DRAFT in choice.drafts for choice in self.models):
            raise ConfigurationError(
                f"download_drafter fetches drafters for '{AUTO_DRAFT}', and every model has another one: leave it out"
            )
        if not (isinstance(self.key_share, int | float) and 0 < self.key_share <= 1):
            raise ConfigurationError(f"key_share is {self.key_share!r}: it must be above 0 and at most 1")
        for name, value, allowed in (
            ("log_format", self.log_format, LOG_FORMATS),
            ("log_level", self.log_level, LOG_LEVELS),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name} is {value!r}: {suggestion(str(value), allowed)}")
        if self.options.learn is not None:
            parse_learning(self.options.learn)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigurationError(
                    f"CORS origin '{origin}' is not an origin: write scheme, host and port, such as "
                    "https://example.org:8443"
                )
        for host in self.allowed_hosts:
            if host != "*" and not HOST.fullmatch(host):
                raise ConfigurationError(f"allowed host '{host}' is not a name: write it without scheme and port")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"otlp_endpoint is {self.otlp_endpoint!r}: write a URL such as http://localhost:4318/v1/traces"
            )

    @property
    def is_loopback(self) -> bool:
        return self.uds is not None or is_loopback(self.host.strip("[]"))

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(name for choice in self.models for name in choice.names)

    def options_of(self, choice: ModelChoice) -> ModelOptions:
        return dataclasses.replace(
            self.options,
            model=choice.source,
            draft=choice.drafts or None,
            plan=self.options.plan if choice.drafts else None,
            download_drafter=self.options.download_drafter and AUTO_DRAFT in choice.drafts,
            learn=self.options.learn if self.learns(choice) else None,
            # all sequences of the requests that run may wait, so that only the gate refuses
            max_waiting=self.max_concurrent_requests * self.max_choices * MAX_PROMPTS,
        )

    def learns(self, choice: ModelChoice) -> bool:
        """Return whether drafters of a model learn; imports torch if learning is requested."""
        if self.options.learn is None:
            return False
        from draftree.build import choose_methods

        return any(
            choose_methods(draft, self.options.verify, self.options.plan).traits.learns for draft in choice.drafts
        )

    def require_methods(self) -> None:
        """Check drafters, verifier, planner, device and dtype; imports torch, loads nothing."""
        from draftree.build import choose_methods
        from draftree.core.host import require_affinity
        from draftree.loading.options import resolve_place

        require_affinity(self.options.affinity)
        resolve_place(self.options)
        if self.options.plan is not None and not any(choice.drafts for choice in self.models):
            raise ConfigurationError(
                f"planner '{self.options.plan}' was given, but no model has a drafter: leave it out"
            )
        for choice in self.models:
            for draft in choice.drafts or (None,):
                choose_methods(draft, self.options.verify, self.options.plan if choice.drafts else None)
        if self.options.learn is not None and not any(map(self.learns, self.models)):
            raise ConfigurationError(
                f"learn is '{self.options.learn}', but no model has a drafter that learns: use drafter 'suffix' with "
                "memory or a head that drafts level by level, or leave it out"
            )


def _require_number(field: dataclasses.Field[Any], value: object) -> None:
    least, type_name = field.metadata["least"], str(field.type)
    if value is None and "None" in type_name:
        return
    wanted = "number" if "float" in type_name else "whole number"
    allowed = (int, float) if wanted == "number" else (int,)
    is_number = isinstance(value, allowed) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least:
        raise ConfigurationError(f"{field.name} is {value!r}: it must be a {wanted} of at least {least}")
