"""Event streams of the server with one text, cut into pieces and named by a seed. Not a test itself."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

TEXTS = ["Once upon a time, there was a “red” ball. 🙂 It rolled\u2028down\x85the hill", "Tom saw it.\n\nTom ran."]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(1, 9)))})
    return [text[start:end] for start, end in pairwise(places)]


def sse(data: dict[str, Any], name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}"


def chat_events(seed: int, texts: list[str] = TEXTS) -> list[str]:
    """The events of one chat with two answers; the seed draws ids, times and the borders of the pieces."""
    rng = random.Random(seed)
    head = {"id": f"chatcmpl-{rng.random()}", "object": "chat.completion.chunk", "created": seed, "model": "m"}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return head | {"choices": [choice], "usage": None}

    queues = []
    for index, text in enumerate(texts):
        events = [chunk(index, {"role": "assistant", "content": ""})]
        for piece in cut(text, rng):
            logprobs = {"content": [{"token": letter, "logprob": rng.random()} for letter in piece]}
            made = chunk(index, {"content": piece}, logprobs=logprobs)
            events.append(made | {"draftree": {"pieces": [{"index": index, "text": piece, "origin": "drafted"}]}})
        call = {"index": 0, "id": f"call_{rng.random()}", "type": "function"}
        events.append(chunk(index, {"tool_calls": [call | {"function": {"name": "f", "arguments": ""}}]}))
        for piece in cut('{"city": "Bern"}', rng):
            events.append(chunk(index, {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
        queues.append([*events, chunk(index, {}, finish_reason="stop")])
    order = [index for index, queue in enumerate(queues) for _ in queue]
    rng.shuffle(order)
    mixed = [sse(queues[index].pop(0)) for index in order]
    usage = head | {"choices": [], "usage": {"completion_tokens": 9}}
    return [*mixed, sse(usage), "data: [DONE]"]


def response_events(seed: int) -> list[str]:
    """The events of the responses API for one text."""
    rng = random.Random(seed)
    response, item = {"id": f"resp_{rng.random()}", "created_at": seed}, {"id": f"msg_{rng.random()}"}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        *({"type": "response.output_text.delta", **place, "delta": piece} for piece in cut(TEXTS[0], rng)),
        {"type": "response.output_text.done", **place, "text": TEXTS[0]},
        {"type": "response.completed", "response": response | {"output": [item | {"text": TEXTS[0]}]}},
    ]
    return [sse(event | {"sequence_number": n}, event["type"]) for n, event in enumerate(events)]


def data_of(events: list[str]) -> list[Any]:
    lines = [line.removeprefix("data: ") for event in events for line in event.splitlines() if line.startswith("data")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def summary_of(events: list[str]) -> Any:
    """What a client composes of a chat: strings are appended, as official clients do."""
    answers: dict[int, dict[str, Any]] = {}
    usages, ids = [], set()
    for chunk in data_of(events):
        ids.add((chunk["id"], chunk["created"]))
        usages += [chunk["usage"]] if chunk["usage"] else []
        for choice in chunk["choices"]:
            answer = answers.setdefault(
                choice["index"], {"role": "", "content": "", "tokens": "", "name": "", "type": "", "arguments": ""}
            )
            answer["role"] += choice["delta"].get("role") or ""
            answer["content"] += choice["delta"].get("content") or ""
            answer["tokens"] += "".join(t["token"] for t in (choice.get("logprobs") or {}).get("content") or [])
            for call in choice["delta"].get("tool_calls") or []:
                answer.setdefault("ids", []).extend([call["id"]] if "id" in call else [])
                answer["type"] += call.get("type", "")
                answer["name"] += call["function"].get("name", "")
                answer["arguments"] += call["function"].get("arguments", "")
            answer.setdefault("ends", []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
        for piece in chunk.get("draftree", {}).get("pieces", []):
            answers[piece["index"]].setdefault("pieces", []).append(piece["text"])
    for answer in answers.values():
        answer["pieces"] = "".join(answer.get("pieces", []))
    return answers, usages, ids, events[-1]
