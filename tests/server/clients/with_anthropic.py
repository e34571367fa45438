"""anthropic, and litellm over its protocol, against a server: PYTHON with_anthropic.py URL MODEL. Prints JSON."""

import json
import sys
from typing import Any

import anthropic
import litellm

TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: Any = [{"role": "user", "content": "How is Rome?"}]


def blocks(message: Any) -> list[Any]:
    shown = ("type", "thinking", "text", "name", "input")
    return [{key: block[key] for key in shown if key in block} for block in message.model_dump()["content"]]


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    fields: Any = {
        "model": model,
        "max_tokens": 200,
        "messages": ASK,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        events = {event.type for event in stream}
        final = stream.get_final_message()
    calls = [block for block in whole.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"} for call in calls]
    history = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    second = client.messages.create(**fields | {"messages": history})
    counted = client.messages.count_tokens(model=model, messages=history, tools=[TOOL])
    try:
        client.messages.create(**fields | {"model": "absent"})
        refused = ""
    except anthropic.NotFoundError as error:
        refused = error.message
    litellm.suppress_debug_info = True
    function = {"name": "weather", "parameters": TOOL["input_schema"]}
    other: Any = {
        "model": f"anthropic/{model}",
        "api_base": url,
        "api_key": "any",
        "messages": ASK,
        "temperature": 0,
        "tools": [{"type": "function", "function": function}],
    }
    answer = litellm.completion(**other).choices[0].message
    chunks = list(litellm.completion(**other, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    print(
        json.dumps(
            {
                "whole": blocks(whole),
                "streamed": blocks(final),
                "stop_reason": whole.stop_reason,
                "events": sorted(events),
                "second": second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0),
                "counted": counted.input_tokens,
                "refused": refused,
                "litellm": [answer.content, answer.tool_calls[0].function.arguments],
                "litellm_reasoning": getattr(answer, "reasoning_content", None),
                "litellm_streamed": "".join(delta.content or "" for delta in deltas),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
