"""A real model calls a forced function with arguments from the conversation, and reads the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from real_weights import folder_of
from serving import Running, running_server
from tool_templates import HERMES

pytestmark = pytest.mark.weights
NAME = "smollm2-135m-instruct"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    folder = folder_of(NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # the model's own template reads no tools
    tokenizer.chat_template = HERMES
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with running_server([ServedModel(NAME, AsyncLLM(model, "ngram", tokenizer=tokenizer), (), ("ngram",))]) as running:
        yield running


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_forced_call_has_the_city_of_the_question(client: openai.OpenAI, draft: str) -> None:
    items: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    fields: Any = {
        "model": NAME,
        "tools": [TOOL],
        "temperature": 0,
        "max_output_tokens": 60,
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(input=items, tool_choice="required", **fields, extra_body={"draft": draft})
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += [item.model_dump() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 18 degrees"})
    final = client.responses.create(input=items, tool_choice="none", **fields)
    assert "sunny" in final.output_text.lower()
