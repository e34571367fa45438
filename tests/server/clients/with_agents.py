"""OpenAI Agents SDK: runs with and without tools, streamed, with structured output; over responses and over chat."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather, weather

set_tracing_disabled(True)


async def main() -> None:
    plain, reporter = Agent("Guide", model=MODEL), Agent("Reporter", model=MODEL, output_type=Weather)
    with_tools = Agent("Guide", model=MODEL, tools=[function_tool(weather)])
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        for agent in (plain, with_tools):
            assert (await Runner.run(agent, QUESTION)).final_output == ANSWER
            run = Runner.run_streamed(agent, QUESTION)
            assert "raw_response_event" in {event.type async for event in run.stream_events()}
            assert run.final_output == ANSWER
        assert (await Runner.run(reporter, AS_JSON)).final_output == ROME


asyncio.run(main())
