"""`draftree verify-server`: a server to which devices send drafts, and that answers with the model's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.layout import option
from draftree.cli.options import import_engine, takes
from draftree.cli.serve import Drafts, Models, model_names, ready_line, require_keys, settings_of
from draftree.core.errors import ConfigurationError, require_extra
from draftree.loading.resolve import require_sound
from draftree.remote.address import PREFIX, is_remote
from draftree.serve.settings import Group, ServerSettings, choose_models
from draftree.serve.verify import MAX_NODES, VerifySettings

if TYPE_CHECKING:
    from draftree.serve.access import KeyRing
    from draftree.serve.pool import ServedModel


LIMITS = str(Group.LIMITS)


@takes("options", settings_of)
def verify_server(
    models: Models,
    *,
    draft: Drafts = [],  # noqa: B006, read only
    max_sessions: Annotated[int, option("Devices at the same time; others retry later.", "N", LIMITS)] = 64,
    max_texts: Annotated[int, option("Open texts of one device.", "N", LIMITS)] = 8,
    max_nodes: Annotated[
        int, option(f"Drafted tokens of a text in one round, at most {MAX_NODES}.", "N", LIMITS)
    ] = MAX_NODES,
    max_rows: Annotated[
        int,
        option(
            "Drafted tokens of all texts in one pass; with many texts, devices are told to draft fewer.", "N", LIMITS
        ),
    ] = 256,
    lease: Annotated[
        float,
        option(
            "Seconds without a request after which a device's session ends; it resumes with the same text.", "S", LIMITS
        ),
    ] = 120.0,
    park: Annotated[
        float, option("Seconds without a draft after which the memory of a text is freed.", "S", LIMITS)
    ] = 20.0,
    split: Annotated[
        int,
        option(
            "First layers that devices may run themselves, to send hidden states in place of tokens; 0 for none.",
            "N",
            LIMITS,
        ),
    ] = 0,
    options: Mapping[str, Any],
) -> None:
    """Serve models to devices that draft: 'draftree generate remote:URL --draft SPEC'.

    Devices send tokens and get tokens. With --split they may send hidden states of their first layers. The HTTP API of
    'draftree serve' is there, too. --draft names the drafters of texts that the server writes alone.
    """
    settings = ServerSettings.of(choose_models(models, draft), **options)
    limits = VerifySettings(
        max_sessions=max_sessions,
        max_texts=max_texts,
        max_nodes=max_nodes,
        max_rows=max_rows,
        lease=lease,
        park=park,
        split=split,
    )
    for extra in ("serve", "remote"):
        require_extra(extra, "'draftree verify-server' needs", error=ConfigurationError)
    from draftree.serve.access import KeyRing

    keys = KeyRing.load(settings.api_key_file, settings.models)
    require_keys(settings, keys)
    for choice in settings.models:
        if is_remote(choice.source):
            raise ConfigurationError(
                f"'{choice.source}' is a verify server: name a model, or forward requests of other clients to it by "
                f"'draftree serve NAME={choice.source}'"
            )
        require_sound(choice.source)
    import_engine()
    settings.require_methods()
    status = fetch_and_run(settings, keys, limits)
    if status:
        raise typer.Exit(status)


def fetch_and_run(settings: ServerSettings, keys: KeyRing, limits: VerifySettings) -> int:
    from draftree.cli.render import resolve_with_bar, say
    from draftree.core.host import apply_threads
    from draftree.loading.first_layers import refuse_gguf, require_split
    from draftree.serve.listening import listen
    from draftree.serve.run import run_server

    with listen(settings) as listener:  # before the weights: a port that is in use is known at once
        for name in model_names(settings):
            if limits.split:
                refuse_gguf(name)  # before it is described or converted
            resolve_with_bar(name)
            if limits.split:
                require_split(name, limits.split)
        apply_threads(settings.options.threads, settings.options.affinity)

        def announce(url: str, models: Sequence[ServedModel]) -> None:
            drafters = {model.name: model.drafts for model in models}
            say(f"{ready_line(settings, keys, url, drafters)}; devices: {device_address(url, limits.split)}\n")

        return run_server(settings, keys, listener=listener, on_ready=announce, verify=limits)


def device_address(url: str, split: int) -> str:
    """Return what devices give as their model; HOST stands for a name of this machine if it listens at all of them."""
    reachable = url.replace("//0.0.0.0:", "//HOST:").replace("//[::]:", "//HOST:")
    return f"{PREFIX}{reachable}" + (f"?split={split}&weights=MODEL" if split else "")
