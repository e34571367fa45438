"""langchain-openai: chat, streams, batches, strict tools, structured output, completions."""

import asyncio

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather, weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(model=MODEL, max_retries=0, stream_usage=True)
assert chat.invoke(QUESTION).content == ANSWER
chunks = list(chat.stream(QUESTION))
assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
assert any(chunk.usage_metadata for chunk in chunks)
assert [answer.content for answer in asyncio.run(chat.abatch([QUESTION] * 3))] == [ANSWER] * 3

with_tools = chat.bind_tools([tool(weather)], strict=True)
called = with_tools.invoke(QUESTION)
(call,) = called.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
assert with_tools.invoke([HumanMessage(QUESTION), called, result]).content == ANSWER

for method in ("json_schema", "function_calling"):
    assert chat.with_structured_output(Weather, method=method).invoke(AS_JSON) == ROME
assert chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
assert OpenAI(model=MODEL, max_tokens=4).invoke(QUESTION)
