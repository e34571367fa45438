"""Prefix-aware routing, without ray: blocks of prompts, memory of replicas, choices, and a simulation of chats."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from draftree.serve.ray.routing import (
    BLOCK_CHARACTERS,
    MAX_BLOCKS,
    PrefixIndex,
    PrefixRouting,
    RoutingPolicy,
    prefix_blocks,
)

REPLICAS = ["a", "b", "c", "d"]


def chat(*contents: str) -> dict[str, Any]:
    roles = cycle(["user", "assistant"])
    return {"model": "m", "messages": [{"role": next(roles), "content": content} for content in contents]}


def test_a_longer_conversation_begins_with_the_blocks_of_the_shorter_one() -> None:
    first, second = prefix_blocks(chat("x" * 300)), prefix_blocks(chat("x" * 300, "y" * 300, "z"))
    assert len(first) >= 4
    assert second[: len(first)] == first
    assert len(second) > len(first)


@pytest.mark.parametrize(
    "other",
    [
        chat("X" + "x" * 299),
        chat("x" * 300) | {"model": "other"},
        chat("x" * 300) | {"tools": [{"type": "function"}]},
        {"model": "m", "prompt": "x" * 300},
    ],
)
def test_another_beginning_shares_no_block(other: dict[str, Any]) -> None:
    assert not set(prefix_blocks(chat("x" * 300))) & set(prefix_blocks(other))


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"prompt": None}, {"messages": [None]}, {"input": "short"}])
def test_short_or_malformed_prompts_have_no_blocks(body: dict[str, Any]) -> None:
    assert prefix_blocks(body) == ()


def test_lone_surrogates_and_very_long_prompts_are_hashed() -> None:
    assert len(prefix_blocks({"prompt": "\ud800" * BLOCK_CHARACTERS})) == 1
    assert len(prefix_blocks({"prompt": "x" * BLOCK_CHARACTERS * MAX_BLOCKS * 2})) == MAX_BLOCKS


def test_memory_is_bounded_and_keeps_beginnings() -> None:
    index = PrefixIndex(max_blocks=20)
    system = tuple(bytes([0, n]) for n in range(5))
    for chat_number in range(1, 30):
        index.record("a", system + tuple(bytes([chat_number, n]) for n in range(10)))
    last = system + tuple(bytes([29, n]) for n in range(10))
    assert index.num_matched("a", last) == 15
    assert index.num_matched("a", system + tuple(bytes([28, n]) for n in range(10))) == 10  # its first five remain
    assert index.num_matched("a", system + tuple(bytes([1, n]) for n in range(10))) == 5
    assert index.num_matched("b", last) == 0


def test_a_prompt_longer_than_the_memory_keeps_its_beginning() -> None:
    index = PrefixIndex(max_blocks=3)
    blocks = tuple(bytes([n]) for n in range(10))
    index.record("a", blocks)
    assert index.num_matched("a", blocks) == 3


def test_the_replica_with_the_longest_beginning_comes_first() -> None:
    routing = PrefixRouting(RoutingPolicy(), seed=0)
    blocks = prefix_blocks(chat("x" * 1000))
    routing.index.record("b", blocks[:5])
    routing.index.record("c", blocks)
    assert routing.rank(blocks, dict.fromkeys(REPLICAS, 0))[0] == ["c"]
    assert routing.rank(blocks, dict.fromkeys(REPLICAS, 0), avoid={"c"})[0] == ["b"]


def test_an_overloaded_match_is_left_for_the_less_busy_of_two() -> None:
    routing = PrefixRouting(RoutingPolicy(max_imbalance=3), seed=0)
    blocks = prefix_blocks(chat("x" * 3000))
    routing.index.record("a", blocks)
    assert routing.rank(blocks, {"a": 3, "b": 0})[0] == ["a"]
    assert routing.rank(blocks, {"a": 4, "b": 0}) == [["b", "a"]]


@pytest.mark.parametrize(("num_matched", "allowed"), [(7, 0), (8, 1), (23, 2)])
def test_a_longer_match_is_worth_more_load(num_matched: int, allowed: int) -> None:
    routing = PrefixRouting(RoutingPolicy(blocks_per_request=8), seed=0)
    blocks = prefix_blocks(chat("x" * 2000))
    routing.index.record("a", blocks[:num_matched])
    assert routing.rank(blocks, {"a": allowed, "b": 0})[0] == ["a"]
    assert routing.rank(blocks, {"a": allowed + 1, "b": 0}) == [["b", "a"]]


def test_a_small_match_does_not_count() -> None:
    routing = PrefixRouting(RoutingPolicy(min_match=0.5), seed=0)
    blocks = prefix_blocks(chat("x" * 2000))
    routing.index.record("a", blocks[:3])
    assert routing.rank(blocks, {"a": 1, "b": 0}) == [["b", "a"]]


def test_removed_replicas_are_forgotten_and_failed_ones_are_the_last_resort() -> None:
    routing = PrefixRouting(RoutingPolicy(), seed=0)
    blocks = prefix_blocks(chat("x" * 1000))
    routing.index.record("gone", blocks)
    assert routing.rank(blocks, {"a": 0}) == [["a"]]
    assert routing.index.num_matched("gone", blocks) == 0
    assert routing.rank(blocks, {"a": 0}, avoid={"a"}) == [["a"]]
    assert routing.rank(blocks, {}) == []


class Simulation:
    """Chats of several turns on replicas whose prefix caches hold few of them.

    Each tick one chat submits its next turn; a turn occupies its replica for `SERVICE` ticks.
    """

    CHATS, TURNS, SERVICE, CACHED_BLOCKS = 40, 6, 12, 400

    def __init__(self, choose: Callable[[tuple[bytes, ...], dict[str, int]], str]) -> None:
        self.choose = choose
        self.caches = {replica: PrefixIndex(self.CACHED_BLOCKS) for replica in REPLICAS}
        self.ongoing: deque[tuple[int, str]] = deque()
        self.hits = self.total = self.highest_load = 0

    def run(self) -> Simulation:
        random_turns = random.Random(1)
        chats = [[f"system prompt {number % 3} " * 20] for number in range(self.CHATS)]
        turns = [number for number in range(self.CHATS) for _ in range(self.TURNS)]
        random_turns.shuffle(turns)
        for tick, number in enumerate(turns):
            while self.ongoing and self.ongoing[0][0] <= tick:
                self.ongoing.popleft()
            chats[number].append(f"question {number} {random_turns.random()} " * 12)
            self.serve(prefix_blocks(chat(*chats[number])), tick)
            chats[number].append(f"answer {number} {random_turns.random()} " * 12)
        return self

    def serve(self, blocks: tuple[bytes, ...], tick: int) -> None:
        loads = dict.fromkeys(REPLICAS, 0)
        for _, replica in self.ongoing:
            loads[replica] += 1
        chosen = self.choose(blocks, loads)
        self.hits += self.caches[chosen].num_matched(chosen, blocks)
        self.total += len(blocks)
        self.caches[chosen].record(chosen, blocks)
        self.ongoing.append((tick + self.SERVICE, chosen))
        self.highest_load = max(self.highest_load, loads[chosen] + 1)


def test_chats_hit_more_cached_prefixes_than_with_round_robin_and_no_replica_is_overloaded() -> None:
    turn = cycle(REPLICAS)
    robin = Simulation(lambda blocks, loads: next(turn)).run()
    policy = RoutingPolicy(max_imbalance=3)
    routing = PrefixRouting(policy, seed=2)

    def choose(blocks: tuple[bytes, ...], loads: dict[str, int]) -> str:
        chosen = routing.rank(blocks, loads)[0][0]
        routing.index.record(chosen, blocks)
        return chosen

    routed = Simulation(choose).run()
    assert routed.total == robin.total
    assert routed.hits / routed.total > 1.5 * robin.hits / robin.total
    # a fair share of the ongoing turns, the imbalance that the policy allows, and the turn itself
    assert routed.highest_load <= Simulation.SERVICE / len(REPLICAS) + policy.max_imbalance + 1
