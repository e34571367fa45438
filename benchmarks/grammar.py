"""Records under a JSON schema: plain, drafted, with and without forced tokens, compared with transformers.

    python benchmarks/grammar.py --out benchmarks/results/smollm2-grammar.jsonl

Peer: `generate` of transformers with xgrammar's own logits processor, on the same grammar (fixed white space). Every
method writes the same records greedily, several times, in turns; the first repeat is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import machine, versions
from draftree.loading.resolve import resolve_model
from draftree.sampling.grammar.guide import GrammarMask, Guide
from draftree.sampling.history import History
from draftree.sampling.logits_processors import RowContext

NAME = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "nationality": {"type": "string", "enum": ["British", "French", "Japanese", "Polish"]},
        "occupation": {"type": "string"},
        "known for": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "nationality", "occupation", "known for"],
}
PEOPLE = [
    "Ada Lovelace, a British mathematician of 36 years, known for the first program",
    "Marie Curie, a Polish physicist of 66 years, known for radium and polonium",
    "Akira Kurosawa, a Japanese film director of 88 years, known for Seven Samurai",
    "Claude Monet, a French painter of 86 years, known for water lilies",
]
TALKS = [[{"role": "user", "content": f"Write this person as a record in JSON: {person}."}] for person in PEOPLE]
DRAFTS = [None, "grammar", "ngram", "suffix", "lookahead"]


class Unforced(Guide):
    """A guide that forces nothing: masks alone."""

    def forced(self, *given: Any, **options: Any) -> list[int]:
        return []


def ours(loaded: LoadedModel, draft: str | None, *, forces: bool, schema: Any) -> Callable[[], list[dict[str, Any]]]:
    """Writes all records, one at a time; an empty memory each time."""
    llm = LLM(loaded, draft)
    params = SamplingParams(max_tokens=96, temperature=0, json_schema=schema)

    def write() -> list[dict[str, Any]]:
        llm.forget()
        forced = Guide.forced
        if not forces:
            Guide.forced = Unforced.forced  # type: ignore[method-assign]
        try:
            done = [llm.chat(talk, params)[0] for talk in TALKS]
        finally:
            Guide.forced = forced  # type: ignore[method-assign]
        return [
            {
                "text": one.text,
                "tokens": len(one.token_ids),
                "rounds": one.stats.rounds,
                "seconds": sum(one.stats.phase_seconds.values()),
                "draft_tokens": one.stats.draft_tokens,
                "accepted_tokens": one.stats.accepted_tokens,
                "accepted_by_source": dict(one.stats.accepted_by_source),
                "drafted_by_source": dict(one.stats.drafted_by_source),
            }
            for one in done
        ]

    return write


def peer(folder: Any) -> Callable[[], list[dict[str, Any]]]:
    """`generate` with xgrammar's processor."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    @torch.inference_mode()
    def write() -> list[dict[str, Any]]:
        found = []
        for talk in TALKS:
            inputs = tokenizer.apply_chat_template(
                talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            start_length = inputs["input_ids"].shape[1]
            processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
            seconds = []
            for most in (1, 96):  # the prompt and the first token are not counted, as in ours
                processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
                start = time.perf_counter()
                ids = model.generate(**inputs, max_new_tokens=most, do_sample=False, logits_processor=[processor])
                seconds.append(time.perf_counter() - start)
            written = ids[0, start_length:]
            text = tokenizer.decode(written, skip_special_tokens=True)
            found.append(
                {"text": text, "tokens": len(written), "rounds": len(written), "seconds": seconds[1] - seconds[0]}
            )
        return found

    return write


def mask_cost(llm: LLM) -> dict[str, float]:
    """Milliseconds to mask a chain of 7 nodes and the root inside of a record, without cached results."""
    (done,) = llm.chat(TALKS[0], SamplingParams(max_tokens=96, temperature=0, json_schema=SCHEMA))
    tokens = list(done.token_ids)
    params = SamplingParams(json_schema=SCHEMA)
    led = llm._requests._spelled_grammars().open(params, [2])
    mask = GrammarMask(led)
    raw = torch.randn(8, llm.model.vocab_size)
    costs, copies = [], []
    for _ in range(3):
        history = History([0])
        for place in range(len(tokens) - 9):
            paths = [tokens[place : place + depth] for depth in range(8)]
            logits = raw.clone()
            start = time.perf_counter()
            mask.apply(logits, RowContext(history, paths))
            costs.append(time.perf_counter() - start)
            start = time.perf_counter()
            raw.clone()
            copies.append(time.perf_counter() - start)
            history.append([tokens[place]])
    return {
        "rows": 8,
        "median_ms": 1000 * statistics.median(costs),
        "p95_ms": 1000 * sorted(costs)[int(0.95 * len(costs))],
        "copy_median_ms": 1000 * statistics.median(copies),
    }


def main() -> None:
    """Run interleaved and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(NAME, dtype="bfloat16")
    methods = {f"{draft or 'plain'}": ours(loaded, draft, forces=True, schema=SCHEMA) for draft in DRAFTS}
    methods |= {
        f"{d}, nothing forced": ours(loaded, d, forces=False, schema=SCHEMA) for d in ("ngram", "suffix", "lookahead")
    }
    methods["plain, no grammar"] = ours(loaded, None, forces=True, schema=None)
    methods["transformers + xgrammar"] = peer(resolve_model(NAME))
    about = {"machine": machine(loaded.model.device), "versions": versions()}
    about |= {"xgrammar": version("xgrammar"), "model": NAME}
    records: list[dict[str, Any]] = []
    with given.out.open("x", encoding="utf-8") as out:

        def keep(record: dict[str, Any]) -> None:
            records.append(record)
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()

        keep(about)
        keep({"masks": mask_cost(LLM(loaded, "none"))})
        for repeat in range(given.repeats + 1):
            for name, write in methods.items():
                done = write()
                if repeat:
                    keep({"method": name, "repeat": repeat, "texts": done})
                print(f"\rrepeat {repeat} of {given.repeats}: {name:30}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(json.dumps(records[1]))
    for name in methods:
        runs = [record["texts"] for record in records if record.get("method") == name]
        tokens = sum(one["tokens"] for one in runs[0])
        each = [1000 * sum(one["seconds"] for one in run) / (tokens - len(run)) for run in runs]
        rounds = sum(one["rounds"] for one in runs[0])
        speed = f"{statistics.median(each):7.2f} ms/token ({min(each):.2f} to {max(each):.2f})"
        drafted = [sum(one.get(kind, 0) for one in runs[0]) for kind in ("draft_tokens", "accepted_tokens")]
        print(f"{name:28} {speed}  {tokens / rounds:.2f} tokens/round, drafted and accepted {drafted}")


if __name__ == "__main__":
    main()
