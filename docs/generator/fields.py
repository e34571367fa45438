"""Generate docs/guides/fields.md: request fields of OpenAI and other servers, and what this server does with each."""

from __future__ import annotations

import json
from collections.abc import Mapping

from draftree.serve.api.responses import ECHOED, ResponsesBody
from draftree.serve.schema import (
    CHAT,
    COMPLETIONS,
    ELSEWHERE,
    RESPONSES,
    ChatBody,
    CompletionBody,
    Effect,
    SamplingBody,
)
from generator.markdown import code, page, table

__all__ = ["make"]

BODIES: dict[str, type[SamplingBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
}
OWN: dict[str, Mapping[str, Effect]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
}


def make() -> str:
    """The page."""
    return page(
        "# Request fields",
        "<!-- Made by docs/build.py from src/draftree/serve/schema; then `make docs`. -->",
        "What the server does with each field of OpenAI's API and of other servers. The rule: what only asks for less, "
        "asks for nothing, or cannot change the meaning of the response is accepted and named in a `Warning` header "
        "and in the log; what would change it is refused with status 400. A field that no server has is refused with "
        "the closest known name. `--strict-fields` refuses ignored fields, too.",
        "    Warning: 299 draftree \"'keep_alive' is ignored: models stay loaded\"",
        "## Honoured",
        "Their meanings are in [Serving](serving.md#what-is-honoured).",
        table(("endpoint", "fields"), ((code(url), honoured(body)) for url, body in BODIES.items())),
        "## Ignored or refused",
        "*Ignored*: any value is accepted and named. *Refused*: status 400. The listed values ask for nothing and are "
        "accepted silently, as is `null`.",
        *(block for server, effects in ELSEWHERE.items() for block in (f"### {server}", rows(effects))),
        *(block for url, effects in OWN.items() for block in (f"### Only {url}", rows(effects))),
        f"/v1/responses repeats {', '.join(map(code, ECHOED))} in its response, as OpenAI's API does.",
    )


def honoured(body: type[SamplingBody]) -> str:
    names = sorted(field.alias or name for name, field in body.model_fields.items())
    return ", ".join(code(name) for name in names if name not in body.elsewhere)


def rows(effects: Mapping[str, Effect]) -> str:
    return table(
        ("field", "effect", "asks for nothing", "reason, or what to use"),
        (
            (
                code(name),
                "ignored" if effect.is_ignored else "refused",
                ", ".join(code(json.dumps(value)) for value in effect.neutral),
                effect.reason,
            )
            for name, effect in sorted(effects.items())
        ),
    )
