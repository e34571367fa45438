"""smolagents: agents that call tools and that write code."""

from asked import ANSWER, MODEL, QUESTION, weather
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(MODEL)
for agent in (ToolCallingAgent, CodeAgent):
    assert agent(tools=[tool(weather)], model=model, max_steps=3).run(QUESTION) == ANSWER
