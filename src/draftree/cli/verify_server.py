"""`draftree verify-server`: a server to which devices send drafts, and that answers with the model's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftree.cli.layout import option
from draftree.cli.options import import_engine, takes, values_of
from draftree.cli.serve import DRAFTS, MODELS, fetch_and_run, require_keys, settings_of
from draftree.core.errors import ConfigurationError, require_extra
from draftree.loading.resolve import require_sound
from draftree.remote.address import is_remote
from draftree.serve.settings import Group, ServerSettings, choose_models
from draftree.serve.verify import MAX_NODES, VerifySettings

if TYPE_CHECKING:
    pass


LIMITS = str(Group.LIMITS)


class LimitOptions:
    max_sessions: int = option(64, "Devices at the same time; others retry later.", "N", LIMITS)
    max_texts: int = option(8, "Open texts of one device.", "N", LIMITS)
    max_nodes: int = option(MAX_NODES, f"Drafted tokens of a text in one round, at most {MAX_NODES}.", "N", LIMITS)
    max_rows: int = option(
        256, "Drafted tokens of all texts in one pass; with many texts, devices are told to draft fewer.", "N", LIMITS
    )
    lease: float = option(
        120.0,
        "Seconds without a request after which a device's session ends; it resumes with the same text.",
        "S",
        LIMITS,
    )
    park: float = option(20.0, "Seconds without a draft after which the memory of a text is freed.", "S", LIMITS)
    split: int = option(
        0,
        "First layers that devices may run themselves, to send hidden states in place of tokens; 0 for none.",
        "N",
        LIMITS,
    )


@takes("options", settings_of)
@takes("limits", values_of(LimitOptions))
def verify_server(
    models: list[str] = MODELS,
    *,
    draft: list[str] = DRAFTS,
    limits: dict[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Serve models to devices that draft: 'draftree generate remote:URL --draft SPEC'.

    Devices send tokens and get tokens. With --split they may send hidden states of their first layers. The HTTP API of
    'draftree serve' is there, too. --draft names the drafters of texts that the server writes alone.
    """
    settings = ServerSettings.of(choose_models(models, draft), **options)
    verify = VerifySettings(**limits)
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
    fetch_and_run(settings, keys, verify)
