"""Models beside llama.cpp on the same GGUF files: single tokens, passes of a few rows, prompts.

    python benchmarks/four_bits.py --ours 'Q4_0=tinyllama-q4_0.gguf' --ours 'int4=tinyllama-1.1b-chat@int4' \\
        --peer 'llama.cpp Q4_0=PYTHON benchmarks/peers/llama_cpp.py tinyllama-q4_0.gguf --threads 2' \\
        --llama-bench 'llama.cpp=build/peers/llama.cpp/build/bin/llama-bench tinyllama-q4_0.gguf -fa 1 --no-warmup' \\
        --llama-bench 'ik_llama.cpp=IK/bin/llama-bench tinyllama-q4_0.gguf -fa 1 -rtr 1' \\
        --out benchmarks/results/four-bits.jsonl

All engines are measured in turns, and stay loaded, except `llama-bench`, a process for each measurement. `write` is the
time per token after the first one of a text, `rows 8` a pass over a chain of 8 rows with all logits (of peers: a prompt
of 8 tokens, with one row of logits), `tree 8` one over a binary tree, `prompt 512` a prompt until its first token.
Milliseconds; medians are printed. No measurement starts after `--seconds`. The speed of the machine itself is recorded
before every turn (`machine_state.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine_state import state

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from draftree.loading.provenance import load_average, machine, now, versions
from draftree.models.base import Extend, Pass

TEXT, START = 32, 64
"""Tokens of a text, and of the prompt before it."""
WARM = 6


def tokens(count: int, turn: int) -> list[int]:
    return [(11 + 37 * place + 1009 * turn) % 29000 + 300 for place in range(count)]


class Engine(ABC):
    """Measured in turns."""

    name: str

    @abstractmethod
    def write(self, turn: int) -> float:
        """Milliseconds per token."""

    @abstractmethod
    def rows(self, count: int, turn: int) -> float:
        """Milliseconds of a pass over a few rows."""

    def tree(self, count: int, turn: int) -> float:
        """Milliseconds of a pass over the rows of a binary tree; nan for an engine without trees."""
        return math.nan

    @abstractmethod
    def prompt(self, count: int, turn: int) -> float:
        """Milliseconds until the first token."""

    def weight_bytes(self) -> int | None:
        """Bytes of the weights in memory."""
        return None


class Ours(Engine):
    """Draftree."""

    def __init__(self, spec: str) -> None:
        self.name, _, rest = spec.partition("=")
        model, _, quantization = rest.partition("@")
        start = time.perf_counter()
        self._loaded = load_model(model, quantization=quantization or None)
        self.load_seconds = time.perf_counter() - start
        self._llm = LLM(self._loaded, "none")

    def _generate(self, count: int, turn: int, most: int) -> Any:
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        return self._llm.generate([tokens(count, turn)], params)[0].stats

    def write(self, turn: int) -> float:
        stats = self._generate(START, turn, TEXT)
        return 1e3 * stats.decode_seconds / (TEXT - 1)

    def rows(self, count: int, turn: int) -> float:
        return self._pass(range(-1, count - 1), turn)

    def tree(self, count: int, turn: int) -> float:
        return self._pass([(row - 1) // 2 if row else -1 for row in range(count)], turn)

    def _pass(self, parents: Sequence[int], turn: int) -> float:
        model, count = self._loaded.model, len(parents)
        slot = model.open()
        ids = tokens(START + count, turn)
        model.run(Pass([Extend(slot, ids[:START], range(-1, START - 1), logits_at=[START - 1])]))
        model.commit(slot, range(START))
        job = Extend(slot, ids[START:], parents)
        found = []
        for _ in range(3):
            start = time.perf_counter()
            model.run(Pass([job]))
            found.append(time.perf_counter() - start)
            model.commit(slot, ())
        model.close(slot)
        return 1e3 * min(found)

    def prompt(self, count: int, turn: int) -> float:
        return 1e3 * float(self._generate(count, turn, 1).prefill_seconds)

    def weight_bytes(self) -> int | None:
        return int(self._loaded.model.footprint.weights)


class Peer(Engine):
    """A command that answers a request a line, see `peers/answering.py`."""

    def __init__(self, spec: str) -> None:
        self.name, _, command = spec.partition("=")
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ready = json.loads(self._line())["ready"]

    def _line(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name} ended")
            if line.startswith("{"):
                return line

    def _ask(self, ids: list[int], most: int) -> dict[str, Any]:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps({"ids": ids, "max_tokens": most}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        if found.get("error"):
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found

    def write(self, turn: int) -> float:
        found = self._ask(tokens(START, turn), TEXT)
        return 1e3 * float(found["decode_seconds"]) / (TEXT - 1)

    def rows(self, count: int, turn: int) -> float:
        return min(1e3 * float(self._ask(tokens(count, turn + step), 1)["prompt_seconds"]) for step in range(3))

    def prompt(self, count: int, turn: int) -> float:
        return 1e3 * float(self._ask(tokens(count, turn), 1)["prompt_seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait(timeout=20)


class LlamaBench(Engine):
    """The benchmark program of llama.cpp or of ik_llama.cpp, started for each measurement; its texts have no prompt."""

    def __init__(self, spec: str, threads: int) -> None:
        self.name, _, command = spec.partition("=")
        program, model, *options = shlex.split(command)
        self._command = [program, "-m", model, "-t", str(threads), "-o", "json", *options]

    def _seconds(self, *options: str) -> float:
        result = subprocess.run([*self._command, *options], capture_output=True, text=True, check=True)
        return min(json.loads(result.stdout)[-1]["samples_ns"]) / 1e9

    def write(self, turn: int) -> float:
        return 1e3 * self._seconds("-p", "0", "-n", str(TEXT), "-r", "2") / TEXT

    def rows(self, count: int, turn: int) -> float:
        return 1e3 * self._seconds("-p", str(count), "-n", "0", "-r", "3")

    def prompt(self, count: int, turn: int) -> float:
        return 1e3 * self._seconds("-p", str(count), "-n", "0", "-r", "1")


def main() -> None:
    """Measure in turns, print medians, write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--llama-bench", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90.0, help="no new measurement after this time")
    parser.add_argument("--prompt", type=int, action="append", help="tokens of a prompt; 512 if none is given")
    parser.add_argument("--kind", action="append", help="measure only these, such as 'write' and 'rows 1'")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engines: list[Engine] = [*map(Ours, given.ours), *map(Peer, given.peer)]
    engines += [LlamaBench(spec, given.threads) for spec in given.llama_bench]
    kinds: dict[str, Any] = {
        "write": lambda engine, turn: engine.write(turn),
        "rows 1": lambda engine, turn: engine.rows(1, turn),
        "rows 8": lambda engine, turn: engine.rows(8, turn),
        "rows 16": lambda engine, turn: engine.rows(16, turn),
        "tree 8": lambda engine, turn: engine.tree(8, turn),
    }
    for count in given.prompt or [512]:
        kinds[f"prompt {count}"] = lambda engine, turn, count=count: engine.prompt(count, turn)
    if given.kind:
        kinds = {kind: measure for kind, measure in kinds.items() if kind in given.kind}
    for engine in engines:
        engine.rows(WARM, 0)
    found: dict[tuple[str, str], list[float]] = {(engine.name, kind): [] for engine in engines for kind in kinds}
    states, start = [], time.perf_counter()
    for turn in range(given.repeats):
        states.append(state())
        for kind, measure in kinds.items():
            if turn and time.perf_counter() - start > given.seconds:
                break
            for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
                found[engine.name, kind].append(measure(engine, turn))
            print(turn, kind, [round(found[engine.name, kind][-1], 2) for engine in engines], flush=True)
    print("states", states)
    for engine in engines:
        medians = {kind: statistics.median(found[engine.name, kind]) for kind in kinds if found[engine.name, kind]}
        print(engine.name, {kind: round(value, 2) for kind, value in medians.items()}, engine.weight_bytes())
        if isinstance(engine, Peer):
            engine.close()
    if given.out is not None:
        header = {"job": "four-bits", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
        header |= {"threads": given.threads, "text": TEXT, "start": START, "load_average": load_average()}
        header["states"] = states
        peers = {engine.name: engine.ready for engine in engines if isinstance(engine, Peer)}
        with given.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(header | {"peers": peers}) + "\n")
            for engine in engines:
                own = {kind: [round(value, 3) for value in found[engine.name, kind]] for kind in kinds}
                out.write(json.dumps({"engine": engine.name, "weights": engine.weight_bytes(), "ms": own}) + "\n")


if __name__ == "__main__":
    main()
