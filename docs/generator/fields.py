"""Generate docs/guides/fields.md: request fields of OpenAI and other servers, and what this server does with each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

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
        table(("endpoint", "fields"), honoured()),
        "## Ignored",
        "Any value is accepted and named; those in brackets, and `null`, ask for nothing and are accepted silently.",
        rows(everywhere(), is_ignored=True),
        "## Refused",
        "Status 400, except for values that ask for nothing, as above.",
        rows(everywhere(), is_ignored=False),
        *(block for url, effects in OWN.items() for block in (f"## Only {url}", *both(effects))),
        f"/v1/responses repeats {', '.join(map(code, ECHOED))} in its response, as OpenAI's API does.",
    )


def honoured() -> Iterator[tuple[str, str]]:
    """Fields of all endpoints, and further ones of each."""
    fields = {
        url: {field.alias or name for name, field in body.model_fields.items()} - set(body.elsewhere)
        for url, body in BODIES.items()
    }
    common = set.intersection(*fields.values())
    yield "all", ", ".join(map(code, sorted(common)))
    for url, names in fields.items():
        yield code(url), ", ".join(map(code, sorted(names - common)))


def everywhere() -> dict[str, Effect]:
    """Fields of other servers and of OpenAI, for all endpoints."""
    return {name: effect for effects in ELSEWHERE.values() for name, effect in effects.items()}


def both(effects: Mapping[str, Effect]) -> Iterator[str]:
    for is_ignored, title in ((True, "Ignored:"), (False, "Refused:")):
        if any(effect.is_ignored == is_ignored for effect in effects.values()):
            yield title
            yield rows(effects, is_ignored=is_ignored)


def rows(effects: Mapping[str, Effect], *, is_ignored: bool) -> str:
    """A row for all fields with one reason."""
    fields: dict[str, list[str]] = {}
    for name, effect in sorted(effects.items()):
        if effect.is_ignored == is_ignored:
            neutral = ", ".join(code(json.dumps(value)) for value in effect.neutral)
            fields.setdefault(effect.reason, []).append(code(name) + (f" ({neutral})" if neutral else ""))
    return table(("fields", "reason, or what to use"), ((", ".join(names), why) for why, names in fields.items()))
