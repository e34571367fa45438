"""litellm over OpenAI's, Anthropic's and Ollama's protocols: chat, reasoning, streams, tools, structured output."""

import os
from typing import Any

import litellm
from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, THOUGHT, Weather

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ask: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
as_json: dict[str, Any] = {"messages": [{"role": "user", "content": AS_JSON}]}
protocols = {
    f"openai/{MODEL}": {},
    f"hosted_vllm/{MODEL}": {"api_base": os.environ["OPENAI_BASE_URL"]},
    f"anthropic/{MODEL}": {},
    f"ollama_chat/{MODEL}": {"api_base": os.environ["OLLAMA_HOST"]},
}
for name, base in protocols.items():
    message = litellm.completion(name, **ask, **base).choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT), name
    chunks = [chunk.choices[0].delta for chunk in litellm.completion(name, **ask, **base, stream=True)]
    assert "".join(delta.content or "" for delta in chunks) == ANSWER, name
    (call,) = litellm.completion(name, **ask, **base, tools=[TOOL]).choices[0].message.tool_calls
    assert call.function.arguments.replace(" ", "") == '{"city":"Rome"}', name
    parsed = litellm.completion(name, **as_json, **base, response_format=Weather).choices[0].message.content
    assert Weather.model_validate_json(parsed) == ROME, name
refused = ""
try:
    litellm.completion("openai/absent", **ask)
except litellm.NotFoundError as error:
    refused = str(error)
assert "absent" in refused
