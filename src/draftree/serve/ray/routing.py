"""Requests as values between proxy and replicas, and the choice of a replica by prefix and load. Needs no ray."""

from __future__ import annotations

import asyncio
import bisect
import json
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, final

BLOCK_CHARACTERS = 64  # characters per block, about 16 tokens
MAX_BLOCKS = 1024
FIELDS = ("model", "tools", "instructions", "system", "messages", "input", "input_prefix", "prompt")
"""Fields of request bodies in the order in which chat templates place them. Lists extend the prefix item by item."""

Blocks = tuple[bytes, ...]  # chained hashes of the blocks of a prompt, from its beginning


def prefix_blocks(body: Mapping[str, Any]) -> Blocks:
    """Return the chained hashes of a request's prompt; empty if it is shorter than a block.

    Values of wrong types are hashed as they are: the replica refuses them.
    """
    text = "".join(_parts(body))[: BLOCK_CHARACTERS * MAX_BLOCKS]
    blocks: list[bytes] = []
    before = b""
    for start, end in pairwise(range(0, len(text) + 1, BLOCK_CHARACTERS)):
        before = blake2b(before + text[start:end].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        blocks.append(before)
    return tuple(blocks)


def _parts(body: Mapping[str, Any]) -> Iterator[str]:
    for name in FIELDS:
        value = body.get(name)
        if value is None:
            continue
        yield f"\x1e{name}\x1f"
        for item in value if isinstance(value, list) else [value]:
            yield item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, sort_keys=True)
            yield "\x1f"


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Constants of the choice."""

    min_match: float = 0.1  # least share of a prompt's blocks that counts as a match, 0 to 1
    # matched blocks that are worth one more ongoing request than the least busy replica has
    blocks_per_request: int = 8
    max_imbalance: int = 4  # maximum of those additional requests
    max_blocks: int = 65536  # blocks remembered per replica


@final
class PrefixIndex:
    """Prefixes served by each replica; the least recently used blocks are dropped first.

    A block is always more recent than the blocks that extend it. What is kept of a prompt is therefore a beginning.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._served: dict[str, OrderedDict[bytes, None]] = {}

    def record(self, replica: str, blocks: Blocks) -> None:
        served = self._served.setdefault(replica, OrderedDict())
        for block in reversed(blocks):
            served[block] = None
            served.move_to_end(block)
        while len(served) > self._max_blocks:
            served.popitem(last=False)

    def num_matched(self, replica: str, blocks: Blocks) -> int:
        """Return how many of a prompt's first blocks the replica served."""
        served = self._served.get(replica, ())
        return bisect.bisect_left(blocks, True, key=lambda block: block not in served)

    def keep_only(self, replicas: Collection[str]) -> None:
        self._served = {replica: served for replica, served in self._served.items() if replica in replicas}


@final
class PrefixRouting:
    """Ranks replicas for a prompt by what each served lately and by its load.

    A prompt is cut into blocks, and the hash of a block includes the hash of the block before it. Two prompts with an
    equal beginning therefore share the hashes of that beginning, and a replica that served one of them has its keys and
    values in the prefix cache. The request goes to the replica with the longest known beginning, unless that replica is
    busier than the least busy one by more than the saved prefill is worth. Without a match it goes to the less busy one
    of two random replicas (power of two choices).
    """

    def __init__(self, policy: RoutingPolicy, seed: int | None = None) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self.index = PrefixIndex(policy.max_blocks)

    def rank(
        self, blocks: Blocks, loads: Mapping[str, int], *, avoid: Collection[str] = (), holder: str = ""
    ) -> list[list[str]]:
        """Return groups of replicas in order of preference; the least busy one of a group is to be used.

        Those to `avoid` are used if there are no others. The `holder` stores the conversation which the request
        continues: no other is used while it is available.
        """
        usable = {replica: load for replica, load in loads.items() if replica not in avoid} or dict(loads)
        self.index.keep_only(loads)
        if holder in usable:
            return [[holder]]
        best = self._best_match(blocks, usable)
        two = self._random.sample(list(usable), min(2, len(usable)))
        others = [sorted(two, key=lambda replica: usable[replica])] if usable else []
        return others if best is None else [[best], *others]

    def _best_match(self, blocks: Blocks, loads: Mapping[str, int]) -> str | None:
        if not blocks or not loads:
            return None
        matched = {replica: self.index.num_matched(replica, blocks) for replica in loads}
        best = max(loads, key=lambda replica: (matched[replica], -loads[replica]))
        if matched[best] < max(1, self._policy.min_match * len(blocks)):
            return None
        allowed = min(self._policy.max_imbalance, matched[best] // self._policy.blocks_per_request)
        return best if loads[best] - min(loads.values()) <= allowed else None


def holder_of(body: Mapping[str, Any]) -> str:
    """Return the id of the replica that stores the response or item to which a request refers; empty if it names none.

    A replica ends the ids of its responses and their items with its own id.
    """
    items = body.get("input")
    named = (
        [item.get("id") for item in items if isinstance(item, dict) and item.get("type") == "item_reference"]
        if (isinstance(items, list))
        else []
    )
    return next(
        (name.rpartition("-")[2] for name in (body.get("previous_response_id"), *named) if isinstance(name, str)), ""
    )


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CANCELLING_SECONDS = 5.0  # time that an app gets to end a request after the client left; then its task is cancelled


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request with its whole body, and what the router needs of it.

    `blocks` are hashes of the prompt's beginning; `avoid` are replicas that failed the request, and `holder` stores
    the conversation which it continues.
    """

    scope: dict[str, Any]
    body: bytes
    blocks: Blocks = ()
    avoid: frozenset[str] = field(default=frozenset())
    holder: str = ""


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Status and headers of an answer, and the id of the replica that gives it."""

    status: int
    headers: Headers
    replica: str


Part = AnswerStart | bytes


def picklable_scope(scope: Scope) -> dict[str, Any]:
    """Return the fields of a scope that describe the request; the rest belongs to the server that received it."""
    kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    fields = {name: scope[name] for name in kept if name in scope}
    return fields | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]], "root_path": ""}


async def call_app(app: App, request: HttpRequest, *, replica: str) -> AsyncGenerator[Part, None]:
    """Call an ASGI app and yield its answer. Closing the generator disconnects the client of the app."""
    parts: asyncio.Queue[Part | None] = asyncio.Queue()
    left = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            parts.put_nowait(AnswerStart(message["status"], headers, replica))
        elif message["type"] == "http.response.body" and message.get("body"):
            parts.put_nowait(bytes(message["body"]))

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, send)
        finally:
            parts.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            if isinstance(part, AnswerStart):
                yield part
                continue
            # the chunks that wait are sent as one
            waiting = [part, *(parts.get_nowait() for _ in range(parts.qsize()))]
            yield b"".join(chunk for chunk in waiting if isinstance(chunk, bytes))
            if waiting[-1] is None:
                break
        await task
    finally:
        left.set()
        if not task.done():
            await asyncio.wait([task], timeout=CANCELLING_SECONDS)
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
