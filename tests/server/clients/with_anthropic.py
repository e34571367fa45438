"""anthropic: messages with thinking, streams, tools, structured output, counts of tokens."""

from typing import Any

import anthropic
from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, THOUGHT, Weather, weather

client = anthropic.Anthropic(max_retries=0)
ask: list[Any] = [{"role": "user", "content": QUESTION}]
fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
tool: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

thinking, text = client.messages.create(**fields, messages=ask).content
assert (thinking.thinking, text.text) == (THOUGHT, ANSWER)
with client.messages.stream(**fields, messages=ask) as stream:
    pieces = list(stream.text_stream)
assert "".join(pieces) == ANSWER
assert len(pieces) > 1

with client.messages.stream(**fields, messages=ask, tools=[tool]) as stream:
    called = stream.get_final_message()
_, call = called.content
assert (called.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
history = [*ask, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
final = client.messages.create(**fields, messages=history, tools=[tool])
assert final.content[-1].text == ANSWER
counted = client.messages.count_tokens(model=MODEL, messages=history, tools=[tool])
assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)

as_json: list[Any] = [{"role": "user", "content": AS_JSON}]
assert client.messages.parse(**fields, messages=as_json, output_format=Weather).parsed_output == ROME
refused = ""
try:
    client.messages.create(**{**fields, "model": "absent"}, messages=ask)
except anthropic.NotFoundError as error:
    refused = str(error)
assert "absent" in refused
