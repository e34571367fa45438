"""Draftree compared with other engines: the same prompts, interleaved, one text at a time; medians and ratios.

    python benchmarks/beside.py smollm2-135m-instruct --peer transformers --ours none --ours ngram \\
        --peer 'llama.cpp bf16=PYTHON benchmarks/peers/llama_cpp.py smollm2-bf16.gguf' \\
        --prompts FILE --limit 2 --out benchmarks/results/beside.jsonl

A peer is a command that runs in an environment of its own and answers a request a line (see `peers/`); `transformers`
needs none, nor does `drop-in:DRAFT`, its `generate` with `draftree.generate` inside. For every prompt all engines write
one after the other, in an order that rotates from prompt to prompt. Speeds are tokens after the first one over the
seconds that they took, as each engine reports them.
`ours` takes `DRAFT[@OPTION=VALUE…]`, such as `ngram@quantization=int8`; `--named NAME DRAFT` records the same under a
name. With `--wait FILE` the measurement starts when the file exists, after all engines were loaded, and removes it at
its end: for a machine on which several measurements take turns. The speed of the machine itself is recorded before
every prompt (`machine_state.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from machine_state import state

import draftree
from draftree import LLM, SamplingParams
from draftree.drafters import drafts
from draftree.lab.bench.records import sha256_of
from draftree.lab.bench.workload import Task, encode, read_workload
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import load_average, machine, now, versions
from draftree.loading.resolve import resolve_model
from draftree.text.tokenizer import Tokenizer


class Engine(ABC):
    """Writes greedy texts of a given length."""

    name: str

    @abstractmethod
    def write(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """One text: `seconds`, `decode_seconds` after the first token, `tokens`, `ids`."""

    def close(self) -> None:  # noqa: B027
        """End what was started; most have nothing to end."""


class Ours(Engine):
    """Draftree, with a drafter or without."""

    _loaded: ClassVar[dict[tuple[str, str | None], LoadedModel]] = {}

    def __init__(self, model: str, spec: str, dtype: str, name: str | None = None) -> None:
        draft, *options = spec.split("@")
        given = dict(option.split("=", 1) for option in options)
        quantization = given.pop("quantization", None)
        if given:
            raise SystemExit(f"'{spec}' names options that this script does not know: {', '.join(given)}")
        key = (dtype, quantization)
        if key not in self._loaded:
            self._loaded[key] = load_model(model, dtype=dtype, quantization=quantization)
        self.name = name or f"draftree {quantization or dtype} {draft if drafts(draft) else 'plain'}"
        self._llm = LLM(self._loaded[key], draft)

    def write(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """By `generate`, with nothing remembered of texts before."""
        self._llm.forget()
        start = time.perf_counter()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        done = self._llm.generate([ids], params)[0]
        seconds = time.perf_counter() - start
        stats = done.stats
        found = {"seconds": seconds, "decode_seconds": stats.decode_seconds, "tokens": len(done.token_ids)}
        return {**found, "ids": list(done.token_ids), "acceptance_length": stats.acceptance_length}


class Transformers(Engine):
    """`generate`, plain, with prompt lookup, or with Draftree in its place."""

    _models: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str, dtype: str, *, lookup: int | None = None, draft: str | None = None) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        if dtype not in self._models:
            self._models[dtype] = AutoModelForCausalLM.from_pretrained(
                resolve_model(model), dtype=getattr(torch, dtype), trust_remote_code=False
            ).eval()
        self._model = self._models[dtype]
        self._model.generation_config = GenerationConfig()
        self._more: dict[str, Any] = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        way = "plain" if lookup is None else f"lookup {lookup}"
        if draft is not None:
            self._more, way = {"custom_generate": draftree.generate, "draft": draft}, f"with draftree.generate {draft}"
        self.name = f"transformers {dtype} {way}"

    @torch.inference_mode()
    def write(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """The clock of the first token is a processor that is called before every token."""
        times: list[float] = []

        def note(_: Any, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        start = time.perf_counter()
        written = self._model.generate(
            torch.tensor([ids]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=[note],
            **self._more,
        )
        end = time.perf_counter()
        tokens = written[0, len(ids) :].tolist()
        return {"seconds": end - start, "decode_seconds": end - times[0], "tokens": len(tokens), "ids": tokens}


class Peer(Engine):
    """A process that answers a request a line."""

    def __init__(self, name: str, command: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        print(f"{name}: {self._line()['ready']}", file=sys.stderr)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self.name} ended without an answer: run its command by hand to see why")

    def write(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        found = self._line()
        if found.get("error"):
            raise SystemExit(f"{self.name}: {found['error']}")
        return found

    def close(self) -> None:
        """End of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def engines_of(given: argparse.Namespace) -> list[Engine]:
    """Load all requested engines."""
    found: list[Engine] = [Ours(given.model, spec, given.dtype) for spec in given.ours]
    found += [Ours(given.model, spec, given.dtype, name) for name, spec in given.named]
    for peer in given.peer:
        name, _, command = peer.partition("=")
        if command:
            found.append(Peer(name, command))
        elif name.startswith("transformers"):
            lookup = name.partition(":")[2]
            found.append(Transformers(given.model, given.dtype, lookup=int(lookup) if lookup else None))
        elif name.startswith("drop-in:"):
            found.append(Transformers(given.model, given.dtype, draft=name.partition(":")[2]))
        else:
            raise SystemExit(
                f"peer '{peer}' has no command: write NAME=COMMAND, transformers, transformers:10 or drop-in:ngram"
            )
    return found


def tasks_of(given: argparse.Namespace, tokenizer: Tokenizer) -> list[Task]:
    """Prompts of the files, by category and length."""
    files = [read_workload(file) for file in given.prompts] or [read_workload()]
    found = []
    for file in files:
        counts: Counter[str] = Counter()
        for task in file.choose(given.category).tasks:
            is_short = given.longest is None or len(encode(task, tokenizer)[0]) <= given.longest
            if is_short and counts[task.category] < given.limit:
                counts[task.category] += 1
                found.append(task)
    return found[given.start :]


def table(records: list[dict[str, Any]], base: str) -> str:
    """Median speeds by category, the median of each prompt's ratio to the first engine, and how many texts are its."""
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, list[float]] = defaultdict(list)
    by_task: dict[Any, dict[str, float]] = defaultdict(dict)
    texts: dict[Any, dict[str, str | None]] = defaultdict(dict)
    for record in records:
        texts[record["task"], record["repeat"]][record["engine"]] = record["tokens_sha256"]
        speed = (record["tokens"] - 1) / record["decode_seconds"]
        speeds[record["engine"]][record["category"]].append(speed)
        by_task[record["task"], record["repeat"]][record["engine"]] = speed
    for found in by_task.values():
        for engine, speed in found.items():
            ratios[engine].append(speed / found[base])
    categories = sorted({record["category"] for record in records})
    lines = ["| engine | " + " | ".join(categories) + " | × first | same text |", "|---" * (len(categories) + 3) + "|"]
    for engine, kinds in speeds.items():
        cells = [f"{statistics.median(kinds[kind]):.0f}" if kind in kinds else "" for kind in categories]
        known = [found for found in texts.values() if found.get(engine)]  # some versions of a peer return no tokens
        same = f"{sum(found[engine] == found[base] for found in known)} of {len(known)}" if known else ""
        ratio = f"{statistics.median(ratios[engine]):.2f}"
        lines.append(f"| {engine} | " + " | ".join(cells) + f" | {ratio} | {same} |")
    return "\n".join(lines)


def append(out: Path | None, lines: list[dict[str, Any]]) -> None:
    """Write results at once, so that those of a run that is stopped are kept."""
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    """Run the engines interleaved, record and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ours", action="append", default=[], help="DRAFT[@OPTION=VALUE…]; none is plain decoding")
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=COMMAND, transformers, transformers:10 or drop-in:ngram"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", action="append", type=Path, default=[])
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--named", nargs=2, action="append", default=[], metavar=("NAME", "DRAFT"))
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--longest", type=int, help="leave out prompts of more tokens")
    parser.add_argument("--start", type=int, default=0, help="leave out that many of these prompts")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no prompt is started after this time")
    parser.add_argument("--wait", type=Path, help="start when this file exists, and remove it at the end")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="results are appended")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(given.model))
    assert tokenizer is not None, "named models have tokenizers"
    tasks = tasks_of(given, tokenizer)
    engines = engines_of(given)
    header = {"kind": "header", "job": "beside", "date": now(), "model": Path(given.model).name, "dtype": given.dtype}
    header |= {"machine": machine(torch.device("cpu")), "versions": versions(), "load": load_average()}
    append(given.out, [header])
    records: list[dict[str, Any]] = []
    try:
        for engine in engines:
            engine.write([1, 2, 3, 4], 4)
        while given.wait is not None and not given.wait.exists():
            time.sleep(0.05)
        start = time.perf_counter()
        for repeat in range(given.repeats):
            for number, task in enumerate(tasks):
                if time.perf_counter() - start > given.seconds:
                    break
                new: list[dict[str, Any]] = [{"kind": "state", "task": task.id, "repeat": repeat, **state()}]
                turn = (number + repeat) % len(engines)
                for engine in engines[turn:] + engines[:turn]:
                    found = engine.write(encode(task, tokenizer)[0], given.max_tokens)
                    facts = {"engine": engine.name, "task": task.id, "category": task.category, "repeat": repeat}
                    tokens = found.pop("ids")  # some versions of a peer return none
                    found["tokens_sha256"] = None if tokens is None else sha256_of(tokens)
                    new.append({"kind": "record", **facts, **found})
                append(given.out, new)
                records += new
                print(f"\r{repeat * len(tasks) + number + 1}/{given.repeats * len(tasks)}", end="", file=sys.stderr)
    finally:
        for engine in engines:
            engine.close()
        if given.wait is not None:
            given.wait.unlink(missing_ok=True)
    print(file=sys.stderr)
    print(table([record for record in records if record["kind"] == "record"], engines[0].name))


if __name__ == "__main__":
    main()
