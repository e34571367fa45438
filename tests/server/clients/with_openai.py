"""openai: chat, streams, strict tools with `tool_choice: auto`, structured output, responses, completions."""

from typing import Any

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, THOUGHT, Weather, weather
from openai import NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Call(BaseModel):
    city: str


client = OpenAI(max_retries=0)
ask: list[Any] = [{"role": "user", "content": QUESTION}]
as_json: list[Any] = [{"role": "user", "content": AS_JSON}]

message = client.chat.completions.create(model=MODEL, messages=ask).choices[0].message
assert (message.content, getattr(message, "reasoning_content", None)) == (ANSWER, THOUGHT)
with client.chat.completions.stream(model=MODEL, messages=ask, stream_options={"include_usage": True}) as stream:
    deltas = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
assert "".join(deltas) == final.choices[0].message.content == ANSWER
assert len(deltas) > 1
assert final.usage

tools = [pydantic_function_tool(Call, name="weather")]
with client.chat.completions.stream(model=MODEL, messages=ask, tools=tools) as stream:
    called = stream.get_final_completion().choices[0].message
for message in (called, client.chat.completions.parse(model=MODEL, messages=ask, tools=tools).choices[0].message):
    (call,) = message.tool_calls or []
    assert call.function.parsed_arguments == Call(city="Rome")
result = {"role": "tool", "tool_call_id": call.id, "content": weather("Rome")}
again: list[Any] = [*ask, message, result]
assert client.chat.completions.create(model=MODEL, messages=again, tools=tools).choices[0].message.content == ANSWER

parsed = client.chat.completions.parse(model=MODEL, messages=as_json, response_format=Weather)
assert parsed.choices[0].message.parsed == ROME
assert client.responses.parse(model=MODEL, input=AS_JSON, text_format=Weather).output_parsed == ROME
with client.responses.stream(model=MODEL, input=QUESTION) as responses:
    pieces = [event.delta for event in responses if event.type == "response.output_text.delta"]
    response = responses.get_final_response()
assert "".join(pieces) == response.output_text == ANSWER
assert [item.type for item in response.output] == ["reasoning", "message"]

assert client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=4, echo=True).choices[0].text > QUESTION
assert MODEL in [model.id for model in client.models.list()]
refused = ""
try:
    client.chat.completions.create(model="absent", messages=ask)
except NotFoundError as error:
    refused = str(error)
assert "absent" in refused
