"""Rank 0 and a rank that follows, as two threads with a whole model each: the follower repeats every operation."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import ConfigurationError, RankError, UnsupportedModelError
from draftree.models.base import ALL_LAYERS, Close, Commit, Extend, Fork, LayerSubset, Pass, Truncate
from draftree.models.table import TableLM, hashed
from draftree.models.torch.hf import HFModel
from draftree.parallel import channel
from draftree.parallel.channel import HEADER, VERSION, Leader, Member, MessageError, MessageReader, MessageWriter
from draftree.parallel.model import ParallelModel, follow
from draftree.parallel.world import World
from families import fresh

PROMPTS = [[4, 5, 6, 4, 5, 6, 4, 5], [11, 12], [9, 9, 9, 7, 7]]
PARAMS = [SamplingParams(max_tokens=14, temperature=0.7 * (place % 2), seed=place) for place in range(len(PROMPTS))]


class Pair:
    """Both ends. The follower's model is whole here, so it must hold what rank 0's holds."""

    def __init__(self, **settings: Any) -> None:
        store = HashStore()
        self.ours, self.theirs = HFModel(fresh("llama")), HFModel(fresh("llama"))
        self.error: Exception | None = None
        self.worlds = [World(rank, 2, rank, 2, store) for rank in range(2)]
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()
        self.leader = Leader(self.worlds[0])
        self.model = ParallelModel(self.ours, self.leader, **settings)

    def _follow(self) -> None:
        member = Member(self.worlds[1])
        try:
            follow(self.theirs, member)
        except Exception as error:
            self.error = error
        member.close()

    def stop(self) -> None:
        self.model.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends live in this process, which must not end with one of them."""
    monkeypatch.setattr(channel, "leave", lambda status: None)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.stop()
    assert made.error is None


def texts(model: Any, draft: str | None) -> tuple[list[list[int]], LLM]:
    llm = LLM(model, draft, **({} if draft is None else {"plan": "fixed"}))
    done = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]
    llm.engine.check_integrity()
    return [list(one.token_ids) for one in done], llm


def test_an_idle_event_loop_survives_the_loss_of_a_rank() -> None:
    pair = Pair()
    llm = AsyncLLM(pair.model, "none")
    pair.leader.lifelines._peers[1].shutdown(socket.SHUT_RDWR)
    pair.thread.join(60)
    assert isinstance(pair.error, RankError), "rank 0 ends the others"
    assert isinstance(llm.failure, RankError)
    assert "rank 1 ended without a word" in str(llm.failure)
    asyncio.run(llm.close())
    pair.leader.lifelines.wait(60)
    assert not pair.leader.lifelines._thread.is_alive(), "it does not end this process"
    pair.stop()


VANISHING = """
import os, subprocess, threading
from torch.distributed import HashStore
from draftree.parallel import channel
from draftree.parallel.world import World

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
channel.PROBE_SECONDS, channel.PROBES = 1, 1
channel.GRACE_SECONDS = 3600.0
store, members = HashStore(), []
thread = threading.Thread(target=lambda: members.append(channel.Member(World(1, 2, 1, 2, store))))
thread.start()
leader = channel.Leader(World(0, 2, 0, 2, store))
thread.join()
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)  # no packet arrives any more, not even an end
leader.lifelines._has_failed.wait()
print(leader.lifelines.failure, flush=True)
os._exit(0)
"""
ISOLATED = ("unshare", "--map-root-user", "--net")
"""Runs a command with a network of its own."""


@pytest.mark.skipif(
    shutil.which("ip") is None
    or shutil.which("unshare") is None
    or subprocess.run([*ISOLATED, "true"], check=False).returncode != 0,
    reason="the test needs a network of its own",
)
def test_a_machine_that_vanishes_is_noticed() -> None:
    command = [*ISOLATED, sys.executable, "-c", VANISHING]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout == b"rank 1 ended without a word\n"


@pytest.mark.parametrize("draft", [None, "suffix,min=1", "early-exit:1,tree=1-2", "early-exit:1,k=2+ngram,min=1"])
def test_a_follower_holds_the_same_keys(pair: Pair, draft: str | None) -> None:
    found, llm = texts(pair.model, draft)
    assert found == texts(HFModel(fresh("llama")), None)[0]
    job = Extend(pair.model.open(), [3], [-1])
    pair.model.run(Pass([job]))  # edits are sent with a pass
    pair.stop()
    assert pair.theirs.num_open == pair.ours.num_open > 1, "cached prefixes are open"
    assert llm.engine.prefix_stats.kept > 0
    for slot, other in zip(pair.ours._pool._open.values(), pair.theirs._pool._open.values(), strict=True):
        assert (slot.length, slot.num_tentative) == (other.length, other.num_tentative)
        end = slot.length + slot.num_tentative
        for layer in range(2):
            mine, copy = (one._pool.memory.keys[layer][slot.index, :, :end] for one in (pair.ours, pair.theirs))
            assert torch.equal(mine, copy)


def test_a_round_is_one_short_message(pair: Pair) -> None:
    llm = LLM(pair.model, "suffix,min=1", plan="fixed")
    before = pair.leader.num_messages
    done = llm.generate([PROMPTS[0]], PARAMS[0])[0]
    count = pair.leader.num_messages - before
    assert count == done.stats.rounds
    assert pair.leader.num_bytes < 1000 * count


def test_embedding_head_and_norm_are_asked_from_all(pair: Pair) -> None:
    states = torch.randn(3, 32)
    assert torch.equal(pair.model.input_embedding(), pair.ours.input_embedding())
    assert torch.equal(pair.model.output_head(), pair.ours.output_head())
    assert pair.model.embedding_facts().logit_scale == pair.ours.embedding_facts().logit_scale
    for _ in range(2):
        assert torch.equal(pair.model.final_norm(states), pair.ours.final_norm(states))
    assert pair.model.footprint == pair.ours.footprint
    with pytest.raises(ConfigurationError, match="layer 9 cannot be captured"):
        pair.model.require_capture([9])


def test_a_model_in_stages_refuses_what_one_process_lacks() -> None:
    made = Pair(has_embeddings=False)
    for call in (
        made.model.input_embedding,
        made.model.output_head,
        made.model.embedding_facts,
        lambda: made.model.final_norm(torch.zeros(1, 32)),
        lambda: made.model.require_capture([0]),
    ):
        with pytest.raises(UnsupportedModelError, match="divided into stages"):
            call()
    made.model.require_capture([])
    made.stop()


def test_slots_that_differ_are_noticed() -> None:
    made = Pair()
    made.theirs.open()
    slot = made.model.open()
    made.model.run(Pass([Extend(slot, [3], [-1])]))
    made.thread.join(60)
    assert isinstance(made.error, MessageError)
    assert "slot 0, which is not open" in str(made.error)
    with pytest.raises(RankError, match="start all processes again"):
        for _ in range(100):  # the first messages may still fit into the buffers of the connection
            made.model.run(Pass([Extend(made.model.open(), [3], [-1])]))
    assert not made.leader.is_open
    with pytest.raises(RankError):
        made.model.run(Pass([]))
    made.model.stop()


def test_an_error_in_a_pass_ends_the_group() -> None:
    made = Pair()
    made.ours.run = lambda pass_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(RankError, match="rank 0 failed: division by zero"):
        made.model.run(Pass([Extend(made.model.open(), [3], [-1])]))
    made.thread.join(60)
    assert isinstance(made.error, RankError)
    assert "rank 0 ended" in str(made.error)


@pytest.fixture
def slots() -> dict[int, Any]:
    model = TableLM(hashed(5, seed=1))
    return {slot.id: slot for slot in (model.open(), model.open(), model.open())}


def read(reader: MessageReader, message: bytes, slots: dict[int, Any]) -> tuple[bool, list[Any]]:
    header, rest = message[: HEADER.size], message[HEADER.size :]
    assert MessageReader.rest_of(header) == len(rest)
    is_last, operations = reader.read(header, rest, slots)
    return is_last, list(operations)


def test_operations_are_read_as_they_were_written(slots: dict[int, Any]) -> None:
    writer, reader = MessageWriter(), MessageReader()
    edits = [Commit(slots[1], [0, 1, 3], [4, 6]), Truncate(slots[2], 7), Fork(slots[0], 5), Close(slots[1])]
    jobs = [
        Extend(slots[0], [7, 7, 9], [-1, 0, 1], logits_at=[0, 1, 2]),
        Extend(slots[2], [4, 5, 6, 1], [-1, 0, 0, 1]),
        Extend(slots[1], [3], [-1], logits_at=[]),
    ]
    part = LayerSubset(3, frozenset({1}), frozenset({0, 2}))
    writer.add("open")
    writer.add("reserve", 4, 200)
    writer.edits(edits)
    writer.add("ask", "final_norm", 64)
    writer.run(Pass(jobs, part, (0, 5)), 3)
    assert len(writer) == 8
    is_last, found = read(reader, writer.take(), slots)
    assert not is_last
    assert found[:2] == [("open",), ("reserve", 4, 200)]
    assert found[2:] == [*edits, ("ask", "final_norm", 64), ("run", Pass(jobs, part, (0, 5)), 3)]
    writer.run(Pass([jobs[0]]), 3)
    _, found = read(reader, writer.take(), slots)
    assert found[0][1].layers == ALL_LAYERS
    assert read(reader, writer.take(is_last=True), slots) == (True, [])


def message(content: bytes, *, version: int = VERSION, number: int = 0) -> bytes:
    magic = HEADER.unpack(MessageWriter().take()[: HEADER.size])[0]
    return HEADER.pack(magic, version, number, len(content)) + content


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (message(b"[false,[]]", version=VERSION + 1), "same version"),
        (HEADER.pack(1, VERSION, 0, 0), "same version"),
        (message(b"[false,[]]", number=1), "instead of message 0"),
        (message(b"[false"), "cannot be read"),
        (message(b"[false,[],1]"), "cannot be read"),
        (message(b'[false,[["sing"]]]'), "does not exist"),
        (message(b'[false,[["open",1]]]'), "does not exist"),
        (message(b'[false,[["close",88]]]'), "slot 88, which is not open"),
        (message(b'[false,[["fork",0,1,2]]]'), "cannot be read"),
        (message(b'[false,[["run",1,[[88,[5],[-1],null]],[null,[],[]],[]]]]'), "slot 88, which is not open"),
        (message(b'[false,[["run",1,[[0,[5]]],[null,[],[]],[]]]]'), "cannot be read"),
    ],
)
def test_malformed_messages_are_refused(wrong: bytes, reason: str, slots: dict[int, Any]) -> None:
    with pytest.raises(MessageError, match=reason):
        read(MessageReader(), wrong, slots)
