"""Clients of the soak test of a server: good, bad, slow and vanishing ones."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

PROMPTS = (
    "Name three rivers.",
    "Write a short story about a dog with a red ball.",
    "Explain recursion to a child, with an example.",
    "Repeat this list twice: apple, pear, plum, cherry.",
    "Return JSON with the keys name and age.",
)


EXPECTED_REFUSALS = {
    "unknown field": 400,
    "wrong type": 400,
    "wrong model": 404,
    "no messages": 400,
    "broken JSON": 400,
    "too long": 400,
    "wrong path": 404,
    "wrong method": 405,
    "too large": 413,
}


BUSY = (429, 503)


def body_of(model: str, number: int) -> dict[str, Any]:
    """The chat request of a number, whose text is determined by its seed."""
    rng = random.Random(number)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "max_tokens": rng.choice((1, 12, 40)),
        "temperature": rng.choice((0, 0.8)),
        "seed": number,
    }
    if body["temperature"]:
        body["n"] = rng.choice((1, 1, 2))
    if rng.random() < 0.3:
        body["draft"] = "none"
    if rng.random() < 0.2:
        body["logprobs"], body["top_logprobs"] = True, 2
    return body


class Soak:
    """Clients of one server.

    Args:
        url: of the server.
        model: served name.
        num_requests: different requests of good clients.
    """

    def __init__(self, url: str, model: str, num_requests: int) -> None:
        self.url, self.model = url, model
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.bodies = [body_of(model, number) for number in range(num_requests)]
        self.texts: list[list[str]] = []
        self.address = url.removeprefix("http://").split(":")

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Note the text of every request while nothing else runs."""
        for body in self.bodies:
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            self.texts.append([choice["message"]["content"] for choice in answer.json()["choices"]])

    async def good(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A request, streamed or not, whose text must be the one that was noted."""
        number = rng.randrange(len(self.bodies))
        if rng.random() < 0.5:
            answer = await client.post("/v1/chat/completions", json=self.bodies[number])
            if answer.status_code in BUSY:
                return await self._retry_later(answer)
            found = [choice["message"]["content"] for choice in answer.json()["choices"]]
        else:
            found = await self._streamed(client, number, pause=0.0)
        self._compare(number, found)
        return None

    async def slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A streamed request that is read with pauses."""
        number = rng.randrange(len(self.bodies))
        self._compare(number, await self._streamed(client, number, pause=rng.choice((0.05, 0.5))))

    async def _streamed(self, client: httpx.AsyncClient, number: int, *, pause: float) -> list[str]:
        body = {**self.bodies[number], "stream": True}
        found = [""] * body.get("n", 1)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code in BUSY:
                await answer.aread()
                await self._retry_later(answer)
                return []
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        found[choice["index"]] += choice["delta"].get("content") or ""
                    await asyncio.sleep(pause)
        return found

    async def _retry_later(self, answer: httpx.Response) -> None:
        self.counts[f"busy {answer.status_code}"] += 1
        if "retry-after" not in answer.headers:
            self.problems.append(f"{answer.status_code} without Retry-After")
        await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 1))))

    def _compare(self, number: int, found: list[str]) -> None:
        if not found:
            return
        self.counts["texts"] += len(found)
        if found != self.texts[number]:
            self.problems.append(f"request {number}: {found!r} instead of {self.texts[number]!r}")

    async def bad(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A request that must be refused with a certain status, in the shape of OpenAI's errors."""
        kind = rng.choice(sorted(EXPECTED_REFUSALS))
        good = self.bodies[0]
        path, method, content = "/v1/chat/completions", "POST", ""
        if kind == "broken JSON":
            content = '{"model": '
        elif kind == "wrong path":
            path = "/v1/chat/nothing"
        elif kind == "wrong method":
            method = "DELETE"
        else:
            changes: dict[str, dict[str, Any]] = {
                "unknown field": {"temprature": 1},
                "wrong type": {"max_tokens": "many"},
                "wrong model": {"model": "absent"},
                "no messages": {"messages": []},
                "too long": {"messages": [{"role": "user", "content": "word " * 20000}]},
                "too large": {"messages": [{"role": "user", "content": "x" * (9 * 2**20)}]},
            }
            content = json.dumps({**good, **changes[kind]})
        headers = {"content-type": "application/json"}
        answer = await client.request(method, path, content=content or json.dumps(good), headers=headers)
        self.counts["refused"] += 1
        if answer.status_code in BUSY:
            return
        if answer.status_code != EXPECTED_REFUSALS[kind] or "error" not in answer.json():
            self.problems.append(f"{kind}: {answer.status_code} {answer.text[:200]}")

    async def vanishing(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """A client that closes its connection: in its request, before the answer, or while it streams."""
        reader, writer = await asyncio.open_connection(self.address[0], int(self.address[1]))
        body = json.dumps({**rng.choice(self.bodies), "max_tokens": 200, "stream": rng.random() < 0.7}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        stage = rng.choice(("head", "body", "sent", "reading"))
        parts = {"head": head[:40], "body": head + body[:50], "sent": head + body, "reading": head + body}
        writer.write(parts[stage])
        await writer.drain()
        if stage == "reading":
            await reader.read(rng.choice((10, 800)))
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)))
        self.counts[f"vanished in {stage}"] += 1
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def client(self, seed: int, until: float) -> None:
        """One client after the other, of all kinds, until the time is over."""
        rng = random.Random(seed)
        kinds: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]]
        kinds = [self.good, self.good, self.good, self.slow, self.bad, self.vanishing]
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            while time.monotonic() < until:
                try:
                    await rng.choice(kinds)(http, rng)
                except (httpx.WriteError, httpx.ReadError, ConnectionError):
                    # a server that refuses a body closes the connection while the client still writes
                    self.counts["connections closed by the server"] += 1
