"""ollama: chat with thinking, streams, tools, structured output, completions, models."""

from typing import Any

import ollama
from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, THOUGHT, Weather, weather

ask: list[Any] = [{"role": "user", "content": QUESTION}]
message = ollama.chat(MODEL, ask).message
assert (message.content, message.thinking) == (ANSWER, THOUGHT)
chunks = list(ollama.chat(MODEL, ask, stream=True))
assert "".join(chunk.message.content or "" for chunk in chunks) == ANSWER
assert chunks[-1].eval_count

called = ollama.chat(MODEL, ask, tools=[weather]).message
(call,) = called.tool_calls or []
assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
streamed = ollama.chat(MODEL, ask, tools=[weather], stream=True)
assert [c.function.name for chunk in streamed for c in chunk.message.tool_calls or []] == ["weather"]
result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
assert ollama.chat(MODEL, [*ask, called, result], tools=[weather]).message.content == ANSWER

as_json = ollama.chat(MODEL, [{"role": "user", "content": AS_JSON}], format=Weather.model_json_schema()).message
assert Weather.model_validate_json(as_json.content or "") == ROME
assert ollama.generate(MODEL, QUESTION).response == ANSWER
assert MODEL in [model.model for model in ollama.list().models]
assert ollama.show(MODEL).capabilities == ["completion", "tools", "thinking"]
refused = 0
try:
    ollama.chat("absent", ask)
except ollama.ResponseError as error:
    refused = error.status_code
assert refused == 404
