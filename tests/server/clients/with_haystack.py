"""Haystack: chat, streams, an agent with strict tools, structured output."""

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather, weather
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

ask, pieces = [ChatMessage.from_user(QUESTION)], []
assert OpenAIChatGenerator(model=MODEL).run(ask)["replies"][0].text == ANSWER
OpenAIChatGenerator(model=MODEL, streaming_callback=lambda chunk: pieces.append(chunk.content)).run(ask)
assert "".join(pieces) == ANSWER
as_json = {"response_format": Weather}
reply = OpenAIChatGenerator(model=MODEL, generation_kwargs=as_json).run([ChatMessage.from_user(AS_JSON)])["replies"][0]
assert Weather.model_validate_json(reply.text) == ROME
tools = [create_tool_from_function(weather)]
agent = Agent(chat_generator=OpenAIChatGenerator(model=MODEL, tools_strict=True), tools=tools)
assert agent.run(messages=ask)["last_message"].text == ANSWER
