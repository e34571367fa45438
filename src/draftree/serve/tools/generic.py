"""Tools for models whose chat template has none: functions, calls and results are written as texts of messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftree.serve.tools.functions import Function

__all__ = ["without_tools"]

INTRODUCTION = """You can call these functions:
{functions}

To call one, answer with its name and its arguments:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


def without_tools(messages: Iterable[Mapping[str, Any]], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Return messages in which functions, calls and results are text.

    The functions are described in the system message, or in the first message, since some templates have no place for a
    system message. Results are messages of the user; those that follow each other are one.

    Args:
        messages: for a chat template.
        functions: those that the model may call.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["role"] == "tool"
        content = _text(message)
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if made and (is_result or message["role"] == "user") and made[-1].get("follows_result"):
            made[-1]["content"] += f"\n{content}"
            made[-1]["follows_result"] = is_result
            continue
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        made.append({**rest, "role": "user" if is_result else message["role"], "content": content})
        made[-1]["follows_result"] = is_result
    for message in made:
        del message["follows_result"]
    if functions:
        lines = "\n".join(json.dumps(function.tool["function"], ensure_ascii=False) for function in functions)
        made[0]["content"] = "\n\n".join(filter(None, (INTRODUCTION.format(functions=lines), made[0]["content"])))
    return made


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message, and its calls after it."""
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else "\n".join(part["text"] for part in content)]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(filter(None, parts))
