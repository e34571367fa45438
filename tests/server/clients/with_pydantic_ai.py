"""pydantic-ai: an agent with a tool, streams, and output by a tool and by a schema, over chat and over responses."""

from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather, weather
from pydantic_ai import Agent, NativeOutput

for api in ("openai-chat", "openai-responses"):
    name = f"{api}:{MODEL}"
    assert Agent(name).run_sync(QUESTION).output == ANSWER
    assert Agent(name, tools=[weather]).run_sync(QUESTION).output == ANSWER
    streamed = Agent(name).run_stream_sync(QUESTION)
    assert list(streamed.stream_text())[-1] == ANSWER
    for output in (Weather, NativeOutput(Weather)):
        assert Agent(name, output_type=output).run_sync(AS_JSON).output == ROME
