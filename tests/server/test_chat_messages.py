"""Messages as chat templates get them: any role and field that the template reads; others are noted."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.serve.api.chat import template_messages
from draftree.serve.errors import ApiError
from draftree.serve.records import keep_record, record_of
from draftree.serve.schema import Message

PLAIN = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
READS = PLAIN + "{{ m.mood }} {{ m.name }} {% if m.role == 'developer' %}"


def read(template: str, **message: Any) -> tuple[dict[str, Any], list[str]]:
    """A message for the template, and the fields that it does not read."""
    scope: dict[str, Any] = {}
    record = record_of(scope)
    keep_record(scope, record)
    (found,) = template_messages([Message.model_validate(message)], template)
    return found, list(record.notes)


@pytest.mark.parametrize(
    ("message", "found", "noted"),
    [
        ({"role": "wizard", "content": "a"}, {"role": "wizard", "content": "a"}, []),
        ({"role": "user", "content": "a", "mood": {"x": 1}}, {"role": "user", "content": "a"}, ["messages.mood"]),
        ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "a"}, ["messages.name"]),
        ({"role": "assistant", "content": None, "refusal": None}, {"role": "assistant", "content": ""}, []),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}, []),
        (
            {"role": "tool", "content": "a", "tool_call_id": "x", "name": "f"},
            {"role": "tool", "content": "a", "tool_call_id": "x", "name": "f"},
            [],
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            ["cache_control"],
        ),
    ],
)
def test_fields_that_the_template_does_not_read_are_noted(
    message: dict[str, Any], found: dict[str, Any], noted: list[str]
) -> None:
    assert read(PLAIN, **message) == (found, noted)


def test_fields_that_the_template_reads_are_kept() -> None:
    message = {"role": "developer", "content": "a", "mood": {"x": 1}, "name": "Ann"}
    assert read(READS, **message) == (message, [])


@pytest.mark.parametrize("field", ["contents", "tool_call", "nam"])
def test_misspelt_fields_are_refused(field: str) -> None:
    with pytest.raises(ApiError, match="did you mean") as caught:
        read(PLAIN, **{"role": "user", "content": "a", field: "b"})
    assert caught.value.param == f"messages[0].{field}"
