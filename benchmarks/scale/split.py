#!/usr/bin/env python3
"""Milliseconds and bytes per token of a split by layers, beside sent tokens and plain streaming, by round trip.

A verify server in a process of its own for each number of layers, a proxy that delays every byte by half a round trip,
and one device in this process. Arms of one round trip take turns prompt by prompt:

    streams   no drafter: the server writes alone, the device reads
    drafts    the device drafts tokens and sends them
    split N   the device runs the first N layers, drafts with --drafts and sends states of --states

    python benchmarks/scale/split.py smollm2-135m-instruct --split 4 --states int8 --rtt 0 50 200 --prompts 2

Writes one JSON line per round trip and arm to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from end_and_cloud import DelayingProxy, prompts, served

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import machine, now, versions
from draftree.remote.link import Latency

WARM_UP_TOKENS = 6
PINGS = 3


@dataclass(frozen=True)
class Arm:
    """A way to write a text: a name in results, the address after the URL, and a drafter."""

    name: str
    split: int
    query: str
    draft: str | None


def arms_of(given: argparse.Namespace) -> list[Arm]:
    """The arms of a run."""
    found = [Arm("streams", 0, "", None), Arm("drafts", 0, "", given.token_draft)]
    for split in given.split:
        for states in given.states:
            for picks in given.picks:
                for draft in given.drafts:
                    spec = None if draft == "none" else f"early-exit:{split}" if draft == "early-exit" else draft
                    query = f"?split={split}&weights={given.model}&states={states}&picks={picks}"
                    found.append(Arm(f"split {split} {states} {picks} {draft}", split, query, spec))
    return found


def text_of(llm: LLM, prompt: str, tokens: int, temperature: float) -> dict[str, Any]:
    """One text with its seconds and its bytes; those of prompts apart."""
    latency: Any = llm.model.link.latency  # type: ignore[attr-defined]
    before = (latency.bytes_up, latency.bytes_down, latency.prompt_bytes, latency.rounds)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
    start = time.perf_counter()
    (found,) = llm.generate(prompt, params)
    seconds = time.perf_counter() - start
    after = (latency.bytes_up, latency.bytes_down, latency.prompt_bytes, latency.rounds)
    up, down, prompt_bytes, rounds = (end - begin for end, begin in zip(after, before, strict=True))
    return {
        "ids": list(found.token_ids), "seconds": seconds, "up": up, "down": down, "prompt_bytes": prompt_bytes,
        "rounds": rounds,
    }  # fmt: skip


class Proxy(DelayingProxy):
    """A proxy whose delay changes while connections are open."""

    def set_round_trip(self, milliseconds: float) -> None:
        """Delay every byte by half of a round trip from now on."""
        self._delay = milliseconds / 2000


def at_round_trip(loaded: LoadedModel, draft: str | None) -> LLM:
    """A new engine on an open session, whose planner knows the present round trip only."""
    link: Any = loaded.model.link  # type: ignore[attr-defined]
    link.latency = fresh = Latency(pass_seconds=link.latency.pass_seconds, can_stream=link.latency.can_stream)
    for _ in range(PINGS):
        start = time.perf_counter()
        link.request({"t": "ping"})
        fresh.note_trip(time.perf_counter() - start)
    return LLM(loaded, draft)


def by_round_trip(urls: dict[int, str], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows for every round trip and arm."""
    texts, arms = prompts(given.prompts, given.file), arms_of(given)
    with ExitStack() as stack:
        proxies = {split: stack.enter_context(Proxy(url, 0.0)) for split, url in urls.items()}
        loaded = {}
        for arm in arms:
            loaded[arm.name] = load_model(f"remote:{proxies[arm.split or min(proxies)].url}{arm.query}")
            stack.callback(loaded[arm.name].model.disconnect)  # type: ignore[attr-defined]
        for milliseconds in given.rtt:
            for proxy in proxies.values():
                proxy.set_round_trip(milliseconds)
            llms = {arm.name: at_round_trip(loaded[arm.name], arm.draft) for arm in arms}
            for llm in llms.values():
                text_of(llm, texts[-1], WARM_UP_TOKENS, given.temperature)
                llm.forget()
            runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
            for place, prompt in enumerate(texts):
                for arm in arms if place % 2 else arms[::-1]:
                    runs[arm.name].append(text_of(llms[arm.name], prompt, given.tokens, given.temperature))
            for arm in arms:
                yield {"rtt_ms": milliseconds, "arm": arm.name, "draft": arm.draft} | summary(
                    runs[arm.name], runs["streams"], llms[arm.name].model
                )


def summary(runs: list[dict[str, Any]], plain: list[dict[str, Any]], model: Any) -> dict[str, Any]:
    """Sums over the texts of one arm."""
    tokens = sum(len(run["ids"]) for run in runs)
    rounds = sum(run["rounds"] for run in runs)
    return {
        "ms_per_token": 1000 * sum(run["seconds"] for run in runs) / tokens,
        "ms_per_token_by_prompt": [1000 * run["seconds"] / len(run["ids"]) for run in runs],
        "bytes_up_per_token": sum(run["up"] for run in runs) / tokens,
        "bytes_down_per_token": sum(run["down"] for run in runs) / tokens,
        "prompt_bytes": sum(run["prompt_bytes"] for run in runs),
        "tokens_per_round": tokens / rounds if rounds else None,
        "equal": [run["ids"] for run in runs] == [run["ids"] for run in plain],
        "is_exact": model.is_exact,
        "report": model.note,
    }


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--split", type=int, nargs="+", default=[4])
    parser.add_argument("--states", nargs="+", default=["float32", "int8"])
    parser.add_argument("--picks", nargs="+", default=["device", "server"])
    parser.add_argument("--drafts", nargs="+", default=["early-exit", "suffix"], help="early-exit, none or a drafter")
    parser.add_argument("--token-draft", default="suffix", help="drafter of the arm that sends tokens")
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 50, 200], help="milliseconds")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--file", type=Path, help="a workload, as for draftree bench run")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--server-option", action="append", default=[], help="such as --server-option=--threads=1")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = {
        "part": "split",
        "model": given.model,
        "tokens": given.tokens,
        "prompts": given.prompts,
        "temperature": given.temperature,
        "server_options": given.server_option,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "time": now(),
    }
    with ExitStack() as stack:
        urls = {
            split: stack.enter_context(served(given.model, [*given.server_option, f"--split={split}"]))
            for split in given.split
        }
        for row in by_round_trip(urls, given):
            print(json.dumps(row), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
