"""LlamaIndex: chat, streams, a tool that an agent calls, structured output."""

import asyncio

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, max_retries=0)
ask = [ChatMessage(QUESTION)]
assert llm.chat(ask).message.content == ANSWER
assert "".join(chunk.delta or "" for chunk in llm.stream_chat(ask)) == ANSWER
assert llm.as_structured_llm(Weather).chat([ChatMessage(AS_JSON)]).raw == ROME


async def answer() -> str:
    return str(await FunctionAgent(tools=[weather], llm=llm).run(QUESTION))


assert asyncio.run(answer()) == ANSWER
