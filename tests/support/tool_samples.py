"""Definitions of tools, plans for them, and answers read in pieces."""

from __future__ import annotations

from typing import Any

from draftree.serve.tools.deltas import Delta, TextDelta
from draftree.serve.tools.plan import ToolPlan
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level
from tool_templates import TEMPLATES

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "12"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
PARIS = {"city": "Paris", "unit": "C"}


def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer(byte_level(template), name="tiny")


def plan_of(family: str, **options: Any) -> ToolPlan:
    return ToolPlan.of(tokenizer_of(TEMPLATES[family]), TOOLS, **options)


def parsed(plan: ToolPlan, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and the names and arguments of its calls."""
    parser = plan.parser()
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.finish()
    text, calls = "", []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif delta.name is not None:
            assert delta.id
            assert delta.index == len(calls)
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.id is None
            calls[delta.index][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]
