"""ollama against a server: PYTHON with_ollama.py URL MODEL. Prints JSON."""

import json
import sys
from typing import Any

import ollama

ASK: Any = [{"role": "user", "content": "How is Rome?"}]


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"18 degrees in {city}"


def main(url: str, model: str) -> None:
    client = ollama.Client(host=url)
    fields: Any = {"model": model, "options": {"temperature": 0, "num_predict": 200}}
    whole = client.chat(**fields, messages=ASK, tools=[weather])
    chunks = list(client.chat(**fields, messages=ASK, tools=[weather], stream=True))
    results: Any = [
        {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
        for call in whole.message.tool_calls or []
    ]
    second = client.chat(**fields, messages=[*ASK, whole.message, *results], tools=[weather])
    generated = client.generate(**fields, prompt="How is Rome?")
    pieces = [chunk.response for chunk in client.generate(**fields, prompt="How is Rome?", stream=True)]
    try:
        client.chat(model="absent", messages=ASK)
        refused = ""
    except ollama.ResponseError as error:
        refused = f"{error.status_code} {error.error}"
    print(
        json.dumps(
            {
                "content": whole.message.content,
                "thinking": whole.message.thinking,
                "calls": [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []],
                "streamed": "".join(chunk.message.content or "" for chunk in chunks),
                "streamed_calls": sum(len(chunk.message.tool_calls or []) for chunk in chunks),
                "counts": [whole.eval_count, chunks[-1].eval_count],
                "second": second.prompt_eval_count,
                "first": whole.prompt_eval_count,
                "generated": generated.response,
                "generated_pieces": "".join(filter(None, pieces)),
                "models": [one.model for one in client.list().models],
                "capabilities": client.show(model).capabilities,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
