"""Drafters with and without learning from served texts, on a stream of prompts whose kind changes.

    python benchmarks/learning.py smollm2-135m-instruct --draft suffix --draft head:FOLDER --out learning.jsonl \\
        --part code=humaneval.jsonl:0-30 --part writing=spec_bench.jsonl:0-20 --part code-again=humaneval.jsonl:30-60

Every part is served by a new engine, as after a restart, one prompt at a time. With learning, engines share a folder;
without it, each begins anew, and `suffix` keeps the answers of its part. Lines of prompt files have `prompt` or
`turns`. Texts with and without learning are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import load_average, machine, now, versions

WARM_UP = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Prompts of one kind.

    Attributes:
        name: name of the part.
        prompts: user messages.
        source: file name and lines, for the record.
    """

    name: str
    prompts: tuple[str, ...]
    source: str


def read_part(text: str) -> Part:
    """Read `NAME=FILE:START-END` or `NAME=FILE:START-END:CATEGORY,CATEGORY`; lines are counted within the categories.

    Raises:
        ValueError: it is malformed.
    """
    name, equals, rest = text.partition("=")
    path, colon, span = rest.partition(":")
    lines, _, categories = span.partition(":")
    first, dash, last = lines.partition("-")
    if not (equals and colon and dash):
        raise ValueError(f"'{text}' is not of the form NAME=FILE:START-END")
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if categories:
        records = [record for record in records if record["category"] in categories.split(",")]
    chosen = records[int(first) : int(last)]
    prompts = tuple(record["prompt"] if "prompt" in record else record["turns"][0] for record in chosen)
    return Part(name, prompts, f"{Path(path).name}:{span}")


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine generated.

    Attributes:
        tokens: number of generated tokens of every prompt.
        rounds: number of rounds of every prompt.
        seconds: wall-clock time of the whole part.
        texts: token ids of every text.
        learned: statistics of what was learned.
    """

    tokens: list[int]
    rounds: list[int]
    seconds: float
    texts: list[tuple[int, ...]]
    learned: list[dict[str, Any]]


def serve(
    loaded: LoadedModel, draft: str, plan: str, part: Part, *, params: SamplingParams, learn: str | None
) -> Served:
    """Serve a part with a new engine."""
    llm = LLM(loaded, draft, plan=plan, learn=learn)
    for sequence in llm.requests.sequences([0, 0], WARM_UP, owner=None):
        list(llm.engine.stream(sequence))
    done, start = [], time.perf_counter()
    for index, prompt in enumerate(part.prompts):
        given = dataclasses.replace(params, seed=index)
        done += llm.chat([{"role": "user", "content": prompt}], given, progress=False)
    seconds = time.perf_counter() - start
    learned = []
    if llm.learned is not None:
        learned = [dataclasses.asdict(stats) for stats in llm.learned.stats]
        llm.learned.close()
    texts = [one.token_ids for one in done]
    return Served([len(text) for text in texts], [one.stats.rounds for one in done], seconds, texts, learned)


def line(part: Part, draft: str, learn: str | None, served: Served, *, same: bool) -> dict[str, object]:
    """Return the record of a part."""
    half = len(part.prompts) // 2
    tokens, rounds = served.tokens, served.rounds
    return {
        "kind": "part",
        "part": part.name,
        "draft": draft,
        "learn": learn,
        "texts": len(tokens),
        "tokens": sum(tokens),
        "rounds": sum(rounds),
        "acceptance_length": sum(tokens) / sum(rounds),
        "acceptance_length_of_halves": [
            sum(tokens[:half]) / max(1, sum(rounds[:half])),
            sum(tokens[half:]) / max(1, sum(rounds[half:])),
        ],
        "tokens_per_second": sum(tokens) / served.seconds,
        "same_texts": same,
        "learned": served.learned,
    }


def measure(loaded: LoadedModel, arguments: argparse.Namespace, parts: Sequence[Part]) -> Iterator[dict[str, object]]:
    """Yield the records of all drafters, each without and with learning."""
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    for spec in arguments.draft:
        draft, _, plan = spec.partition("@")
        wanted: dict[str, list[tuple[int, ...]]] = {}
        for learns in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                learn = f"server,folder={folder}{arguments.options}" if learns else None
                for part in parts:
                    served = serve(loaded, draft, plan or "fixed", part, params=params, learn=learn)
                    same = wanted.setdefault(part.name, served.texts) == served.texts
                    shown = draft.replace(arguments.head_name, "HEAD") if arguments.head_name else draft
                    yield line(part, f"{shown}@{plan or 'fixed'}", "server" if learns else None, served, same=same)


def main() -> None:
    """Measure, print and write all records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", required=True, help="a drafter, SPEC or SPEC@PLAN; repeatable")
    parser.add_argument("--part", action="append", required=True, type=read_part, help="NAME=FILE:START-END[:CATEGORY]")
    parser.add_argument("--options", default="", help="options of learning, with a comma before each")
    parser.add_argument("--head-name", default="", help="folder of a head that is written as HEAD in the record")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    header = {
        "kind": "header",
        "format": 1,
        "job": "learning",
        "date": now(),
        "machine": machine(loaded.model.device),
        "versions": versions(),
        "model": {"name": arguments.model},
        "kernels": loaded.kernels,
        "threads": torch.get_num_threads(),
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "options": arguments.options,
        "parts": {part.name: part.source for part in arguments.part},
        "load_average": load_average(),
    }
    with arguments.out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(header) + "\n")
        for record in measure(loaded, arguments, arguments.part):
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            print(
                f"{record['draft']} learn={record['learn']} {record['part']}: {record['acceptance_length']:.3f} "
                f"tokens/round, {record['tokens_per_second']:.1f} tokens/s, same texts: {record['same_texts']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
