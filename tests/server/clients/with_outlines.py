"""outlines: text, streams, JSON; over vLLM's fields also choices and regular expressions."""

from typing import Literal

import openai
import outlines
from asked import ANSWER, AS_JSON, MODEL, QUESTION, ROME, Weather
from outlines.types import Regex

for wrapped in (outlines.from_openai, outlines.from_vllm):
    model = wrapped(openai.OpenAI(), MODEL)
    assert model(QUESTION) == "".join(model.stream(QUESTION)) == ANSWER
    assert Weather.model_validate_json(model(AS_JSON, Weather)) == ROME
assert model(QUESTION, Literal["It is 18 degrees in Rome.", "No."]) == ANSWER
assert model(QUESTION, Regex(r"It is \d+ degrees in Rome\.")) == ANSWER
