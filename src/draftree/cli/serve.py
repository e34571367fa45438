"""`draftree serve`: an OpenAI-compatible HTTP server for one or several models."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.flags import WORDS, Flag, made_of
from draftree.cli.layout import argument, option
from draftree.cli.options import complete_draft, complete_model, import_engine, option_of, require_new, takes
from draftree.cli.render import resolve_with_bar, say
from draftree.core.errors import ConfigurationError, require_extra
from draftree.core.host import parse_bytes
from draftree.loading.resolve import require_sound
from draftree.options import EXECUTION, SPECULATION
from draftree.parallel.entry import leave_to_rank_zero
from draftree.remote.address import PREFIX
from draftree.serve.settings import BYTES_WORD, MODEL_OPTIONS, ServerSettings, choose_models

if TYPE_CHECKING:
    from draftree.serve.access import KeyRing
    from draftree.serve.pool import ServedModel
    from draftree.serve.verify.settings import VerifySettings

HINTS: dict[str, Any] = typing.get_type_hints(ServerSettings)


def serving_flags() -> Iterator[Flag]:
    """Yield a flag for each field of `ServerSettings` that has help."""
    for field in dataclasses.fields(ServerSettings):
        if "help" in field.metadata:
            yield flag_for(field, HINTS[field.name])
    for field in MODEL_OPTIONS:
        shown = option_of(field)
        yield Flag(shown.name, shown.annotation, shown.default)


def flag_for(field: dataclasses.Field[Any], hint: Any) -> Flag:
    text, word, name = field.metadata["help"], field.metadata["word"], "--" + field.name.replace("_", "-")

    def flag(kind: Any, default: Any, *read: Callable[[Any], Any], names: str = name, word: str | None = word) -> Flag:
        return Flag(field.name, kind, option(default, text, word, str(field.metadata["group"]), names=names), *read)

    if word == BYTES_WORD:
        size: Any = field.default
        return flag(
            str | None,
            None if size is None else f"{size >> 20}MiB",
            lambda size: None if size is None else parse_bytes(size),
        )
    if typing.get_origin(hint) is tuple:
        text = text.rstrip(".") + "; repeatable."
        return flag(list[str], [], tuple, names=name.removesuffix("s"))
    if hint is bool:
        return flag(bool, field.default, names=f"{name}/--no-{name[2:]}" if field.default else name, word=None)
    # the dataclass writes `X | None` with X among int, float and str
    (kind,) = [part for part in typing.get_args(hint) or (hint,) if part is not types.NoneType]
    return flag(hint, field.default, word=word or WORDS[kind])


settings_of: Callable[..., dict[str, Any]] = made_of(list(serving_flags()), dict)
"""Function for `takes` that makes the values of `ServerSettings`, by name."""

MODELS: Any = argument(
    ...,
    "Models to serve: a name of 'draftree models', a folder, a GGUF file or a hub id; NAME=MODEL or "
    "NAME,ALIAS=MODEL serves it under other names.",
    "MODEL",
    complete=complete_model,
)
DRAFTS: Any = option(
    [],
    "A drafter, as for 'draftree generate'; repeatable. The first is the default, and requests may choose "
    "another one, or none. NAME=SPEC is for one model. If not given: auto, which is chosen for each model when "
    "it is loaded, and drafts only where the planner finds that it saves time. none for plain decoding.",
    "SPEC",
    SPECULATION,
    complete=complete_draft,
)


@takes("options", settings_of)
def serve(
    models: list[str] = MODELS,
    *,
    draft: list[str] = DRAFTS,
    replicas: str | None = option(
        None,
        "Number of engines on this machine, each with its own weights, or a range such as 1-4 for as many as the "
        "load needs. A request whose replica fails continues on another one. Needs the extra ray; the limits of "
        "running and waiting requests are those of one replica.",
        "N",
        EXECUTION,
    ),
    options: Mapping[str, Any],
) -> None:
    """Serve models with an OpenAI-compatible HTTP API, on this machine only unless --host is given.

    Ctrl-C or SIGTERM finishes running requests, for up to --drain-timeout; a second one ends at once.
    """
    settings = ServerSettings.of(choose_models(models, draft), **options)
    if replicas is None:
        leave_to_rank_zero(replace(settings.options, model=settings.models[0].source))
    require_extra("serve", "'draftree serve' needs", error=ConfigurationError)
    from draftree.serve.access import KeyRing

    require_recordable(settings, replicas)
    keys = KeyRing.load(settings.api_key_file, settings.models)
    require_keys(settings, keys)
    for choice in settings.models:
        require_sound(choice.source)
    import_engine()
    settings.require_methods()
    if replicas is None:
        fetch_and_run(settings, keys)
    else:
        fetch_and_replicate(settings, keys, replicas)


def require_recordable(settings: ServerSettings, replicas: str | None) -> None:
    """Refuse traces and spans that cannot be written, before anything is loaded."""
    from draftree.serve.rounds import trace_paths

    if replicas is not None and (settings.record is not None or settings.otlp_endpoint is not None):
        raise ConfigurationError(
            "--record and --otlp-endpoint are for a server without replicas: leave --replicas or them out"
        )
    for path in trace_paths(settings):
        require_new(path)
    if settings.otlp_endpoint is not None:
        require_extra("telemetry", "--otlp-endpoint needs", error=ConfigurationError)


def require_keys(settings: ServerSettings, keys: KeyRing) -> None:
    """Refuse to serve other machines without keys."""
    if not settings.is_loopback and not keys and not settings.allow_no_key:
        raise ConfigurationError(
            f"--host {settings.host} lets other machines connect, and there are no API keys: "
            "give --api-key-file, or --allow-no-key to serve without keys"
        )
    if settings.allowed_hosts and (keys or not settings.is_loopback):
        raise ConfigurationError("--allowed-host applies only to a loopback address without API keys: remove it")
    if settings.allow_no_key and keys:
        raise ConfigurationError("--allow-no-key has no effect with API keys: leave it out")


def fetch_and_run(settings: ServerSettings, keys: KeyRing, verify: VerifySettings | None = None) -> None:
    """Fetch all models and serve them, also to devices that draft if `verify` has their limits."""
    from draftree.core.host import apply_threads
    from draftree.loading.first_layers import refuse_gguf, require_split
    from draftree.serve.listening import listen
    from draftree.serve.run import run_server

    split = 0 if verify is None else verify.split
    with listen(settings) as listener:  # before the weights: a port that is in use is known at once
        for name in model_names(settings):
            if split:
                refuse_gguf(name)  # before it is described or converted
            resolve_with_bar(name)
            if split:
                require_split(name, split)
        apply_threads(settings.options.threads, settings.options.affinity)

        def announce(url: str, models: Sequence[ServedModel]) -> None:
            devices = "" if verify is None else f"; devices: {device_address(url, split)}"
            say(ready_line(settings, keys, url, {model.name: model.drafts for model in models}) + f"{devices}\n")

        status = run_server(settings, keys, listener=listener, on_ready=announce, verify=verify)
    if status:
        raise typer.Exit(status)


def device_address(url: str, split: int) -> str:
    """Return what devices give as their model; HOST stands for a name of this machine if it listens at all of them."""
    reachable = url.replace("//0.0.0.0:", "//HOST:").replace("//[::]:", "//HOST:")
    return f"{PREFIX}{reachable}" + (f"?split={split}&weights=MODEL" if split else "")


def fetch_and_replicate(settings: ServerSettings, keys: KeyRing, number: str) -> None:
    require_extra("ray", "'draftree serve --replicas' needs", error=ConfigurationError)
    from draftree.serve.listening import listen
    from draftree.serve.ray.options import ReplicaOptions

    replicas = ReplicaOptions.parse(number)
    replicas.require_fit(settings)
    with listen(settings):  # a port that is in use is known at once; Ray opens its own socket
        for name in model_names(settings):
            resolve_with_bar(name)
    from draftree.serve.ray.app import run_replicas

    run_replicas(settings, replicas, on_ready=lambda url: say(ready_line(settings, keys, url) + "\n"))


def model_names(settings: ServerSettings) -> Sequence[str]:
    """Return all models that have to be on this machine, those of drafters included; not those of verify servers."""
    from draftree.build import choose_methods
    from draftree.remote.address import is_remote

    drafters = {draft for choice in settings.models for draft in choice.drafts}
    methods = [choose_methods(draft, settings.options.verify, settings.options.plan) for draft in sorted(drafters)]
    targets = [choice.source for choice in settings.models if not is_remote(choice.source)]
    return list(dict.fromkeys([*targets, *(name for method in methods for name in method.draft_models)]))


def ready_line(
    settings: ServerSettings, keys: KeyRing, url: str, drafters: Mapping[str, Sequence[str]] | None = None
) -> str:
    known = drafters or {choice.name: choice.drafts for choice in settings.models}
    models = ", ".join(f"{choice.name} ({', '.join(known[choice.name]) or 'plain'})" for choice in settings.models)
    access = f"{len(keys.names)} API keys" if keys else "no API key"
    return f"serving {models} at {url}/v1, {access}"
