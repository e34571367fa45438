"""Devices without a processor of their own: they replay recorded drafts to a verify server, or read what it writes.

A device waits for as long as its draft and the network take. Its frames are encoded before it begins, so that many
devices in one process hardly delay each other; `Device.late` has how late it sent.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from draftree import LLM, SamplingParams
from draftree.core.tree import TokenTree
from draftree.lab.fleet.simulation import RoundOutcome
from draftree.remote.protocol import VERSION, DraftedText, decode, encode, pack_draft, sendable_params, unpack_walk

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
Pattern = Sequence[tuple[int, int]]
"""Drafted and written tokens of every round of a text."""


@dataclass(frozen=True)
class Text:
    """A recorded text.

    Attributes:
        prompt: its tokens.
        output: the text.
        trees: drafted tokens and parents of every round.
        written: tokens of every round.
    """

    prompt: list[int]
    output: list[int]
    trees: list[TokenTree]
    written: list[int]

    @property
    def pattern(self) -> Pattern:
        """Drafted and written tokens of every round."""
        return [(len(tree), count) for tree, count in zip(self.trees, self.written, strict=True)]

    def outcomes(self, draft_seconds: float) -> tuple[RoundOutcome, ...]:
        """Return the outcomes for the simulator."""
        return tuple(RoundOutcome(nodes, tokens, draft_seconds) for nodes, tokens in self.pattern)

    def frames(self) -> list[bytes]:
        """Return the frame of every round; the session's first text is opened by its first request."""
        starts = accumulate(self.written, initial=0)
        tokens, found = [*self.prompt, *self.output], []
        for number, (tree, start) in enumerate(zip(self.trees, starts, strict=False), 2):
            known = tokens[: len(self.prompt) + start]
            crc = zlib.crc32(np.asarray(known, dtype="<i4").tobytes())
            drafted = pack_draft(DraftedText(1, len(known), crc, tree))
            found.append(encode({"t": "verify", "x": [drafted], "id": number}))
        return found


@dataclass(frozen=True)
class Recording:
    """Texts of one drafter.

    Attributes:
        draft: its spec.
        draft_seconds: of a round.
        texts: the texts.
    """

    draft: str
    draft_seconds: float
    texts: list[Text]

    @classmethod
    def read(cls, path: Path, milliseconds: float | None) -> Recording:
        """Read a file; its drafts take the median of the recorded times, unless milliseconds are given."""
        found, times, draft = list[Text](), list[float](), ""
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            trees = [TokenTree(tuple(tokens), tuple(parents)) for tokens, parents, _ in row["rounds"]]
            found.append(Text(row["prompt"], row["output"], trees, [one[2] for one in row["rounds"]]))
            times.append(row["draft_ms"])
            draft = row["draft"]
        seconds = (statistics.median(times) if milliseconds is None else milliseconds) / 1000
        return cls(draft, seconds, found)

    def line(self) -> dict[str, Any]:
        """Return what a simulation needs; without the folders of models."""
        from end_and_cloud import shown_spec

        found = {"kind": "texts", "draft": shown_spec(self.draft), "draft_ms": 1000 * self.draft_seconds}
        found["rounds"] = [text.pattern for text in self.texts]
        return found | {"prompt_tokens": [len(x.prompt) for x in self.texts], "output": len(self.texts[0].output)}


def read_patterns(path: Path) -> list[Pattern]:
    """Read the pattern of every text of a recording, or of results that have them (`"kind": "texts"`)."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    kept = next((row for row in rows if row.get("kind") == "texts"), None)
    if kept is not None:
        return [[(nodes, tokens) for nodes, tokens in text] for text in kept["rounds"]]
    return [text.pattern for text in Recording.read(path, None).texts]


def replayed(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, patterns: Sequence[Pattern]) -> list[Text]:
    """Return a model's own texts with recorded patterns of drafts: chains, right as far as they were accepted."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    done, found = llm.generate(list(prompts), params, progress=False), list[Text]()
    for place, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
        output, own = list(one.token_ids), patterns[place % len(patterns)]
        trees, written, start = list[TokenTree](), list[int](), 0
        while start < max_tokens:
            drafted, accepted = own[len(trees) % len(own)]
            right = min(accepted - 1, max_tokens - start - 1)
            nodes = max(right, min(drafted, max_tokens - start - 1))
            tokens = output[start : start + right]
            wrong = [(token + 1) % llm.model.vocab_size for token in output[start + right : start + nodes]]
            trees.append(TokenTree((*tokens, *wrong), tuple(range(-1, nodes - 1))))
            written.append(right + 1)
            start += right + 1
        found.append(Text(list(prompt), output, trees, written))
    return found


@dataclass
class Device:
    """A device that replays a text.

    Attributes:
        url: of the server.
        text: what it writes.
        round_trip: seconds on the network.
        draft_seconds: that its drafts would take.
        passed: seconds of the server's rounds.
        late: seconds between the time at which a message was due and the time at which it was sent.
    """

    url: str
    text: Text
    round_trip: float
    draft_seconds: float
    passed: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    _num_reads: int = 0
    _replied: float = 0.0

    async def run(self, together: asyncio.Barrier, offset: float, *, drafts: bool) -> float:
        """Write the text; return the seconds from the start to the last token, as a device sees them.

        The first half of the opening's round trip and the second half of the last one are added and not waited for.

        Args:
            together: where all devices meet before the first text and after the last one.
            offset: seconds after which this one begins.
            drafts: whether it drafts; else it reads.
        """
        text, frames = self.text, self.text.frames() if drafts else []
        opening = {
            "t": "open", "text": 1, "prompt": text.prompt, "output": [], "params": sendable_params(GREEDY),
            "seed": 0, "limit": max(1, len(text.output)), "plain": not drafts, "id": 1,
        }  # fmt: skip
        url = self.url.replace("http", "ws", 1) + "/v1/verify"
        async with connect(url, compression=None, proxy=None) as socket:
            await self._reply(socket, encode({"t": "hello", "v": VERSION, "model": None}))
            first = encode(opening)
            await together.wait()
            await asyncio.sleep(offset)
            begin = time.perf_counter()
            await self._reply(socket, first)
            found = await (self._drafted(socket, frames) if drafts else self._read(socket))
            seconds = time.perf_counter() - begin + self.round_trip
            assert found == text.output, "the server writes the recorded text"
            await together.wait()
            number = 2 + max(len(frames), self._num_reads)
            await self._reply(socket, encode({"t": "bye", "id": number}))
            return seconds

    async def _drafted(self, socket: ClientConnection, frames: Sequence[bytes]) -> list[int]:
        replies = []
        for frame in frames:
            await self._wait(self.round_trip + self.draft_seconds)
            replies.append(await self._reply(socket, frame))
        found: list[int] = []
        for reply, tree in zip(replies, self.text.trees, strict=True):
            walk = unpack_walk(reply["x"][0])
            self.passed.append(reply["us"][1] * 1e-6)
            found += [*(tree.tokens[node] for node in walk.path), walk.bonus]
        return found[: len(self.text.output)]

    async def _read(self, socket: ClientConnection) -> list[int]:
        found: list[int] = []
        while len(found) < len(self.text.output):
            await self._wait(self.round_trip)
            self._num_reads += 1
            message = {"t": "read", "text": 1, "start": len(found), "id": 1 + self._num_reads}
            found += (await self._reply(socket, encode(message)))["x"]
        return found

    async def _wait(self, seconds: float) -> None:
        """Wait after a reply for as long as network and draft take."""
        if seconds > 0:
            due = self._replied + seconds
            await asyncio.sleep(due - time.perf_counter())
            self.late.append(time.perf_counter() - due)

    async def _reply(self, socket: ClientConnection, frame: bytes) -> dict[str, Any]:
        await socket.send(frame)
        received = await socket.recv(decode=False)
        self._replied = time.perf_counter()
        reply = decode(received, max_bytes=1 << 22)
        assert reply["t"] != "error", reply
        return reply


async def run_devices(devices: Sequence[Device], offsets: Sequence[float], *, drafts: bool) -> list[float]:
    """Let devices write at the same time, each begun by its offset in seconds; return the seconds of each."""
    together = asyncio.Barrier(len(devices))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(one.run(together, offset, drafts=drafts))
            for one, offset in zip(devices, offsets, strict=True)
        ]
    return [task.result() for task in tasks]
