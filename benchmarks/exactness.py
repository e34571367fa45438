"""Whether drafts change a text by rounding: every token compared with plain decoding of single texts.

    python benchmarks/exactness.py smollm2-135m-instruct --draft ngram --draft suffix --prompts FILE --prompts FILE
    python benchmarks/exactness.py smollm2-135m-instruct --quantization int8 --draft lookahead --out records.jsonl

Plain texts are written alone, drafted ones in batches, greedily and (every second prompt) at temperature 0.8 under a
seed. A drafter that reads predictions is given the plain text with one token in twenty replaced. Exits with 1 if a
single token differs. An adaptive planner hardly calls a useless drafter; `--plan fixed` always does.
`--part 2/4` takes the second of four parts of the prompts, and appends its records to those of other parts in `--out`;
a part that is there already is left out, so that a run which was stopped can be repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftree import LLM, Completion, SamplingParams
from draftree.build import choose_methods
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from draftree.loading.provenance import machine, versions

BATCH = 8
EDITED_EVERY = 20


def prompts_of(llm: LLM, given: argparse.Namespace) -> list[list[int]]:
    """Token ids of all prompts, longest first: a batch holds prompts that are about as long."""
    assert llm.tokenizer is not None, "named models have tokenizers"
    files = [read_workload(file) for file in given.prompts] or [read_workload()]
    tasks = [task for workload in files for task in workload.choose((), given.limit).tasks]
    return sorted((encode(task, llm.tokenizer)[0] for task in tasks), key=len, reverse=True)


def part_of(text: str) -> tuple[int, int]:
    """`2/4` as numbers."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a part such as 2/4")
    return int(number), int(count)


def is_done(out: Path | None, key: dict[str, Any]) -> bool:
    """Whether the file has a record with these values."""
    if out is None or not out.exists():
        return False
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return any(all(record.get(name) == value for name, value in key.items()) for record in records)


def params_of(count: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy and sampled in turns; texts do not end early."""
    return [
        SamplingParams(max_tokens=max_tokens, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        for index in range(count)
    ]


def write(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[Completion]:
    """Texts, so many at once."""
    found: list[Completion] = []
    for start in range(0, len(prompts), batch):
        found += llm.generate(prompts[start : start + batch], params[start : start + batch])
        print(f"\r{len(found)} of {len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def predictions_of(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The texts, with every twentieth token replaced by its neighbour."""
    return [
        [t ^ 1 if place % EDITED_EVERY == EDITED_EVERY - 1 else t for place, t in enumerate(text)] for text in texts
    ]


def main() -> int:
    """Generate, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--plan", help="planner of all drafters; the default of each if none is named")
    parser.add_argument("--prompts", action="append", type=Path, default=[])
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=part_of, default=(1, 1), help="a part of the prompts, such as 2/4")
    given = parser.parse_args()
    number, parts = given.part
    own = {"model": Path(given.model).name, "quantization": given.quantization, "part": f"{number}/{parts}"}
    if parts > 1:
        given.draft = [draft for draft in given.draft if not is_done(given.out, own | {"draft": draft})]
        if not given.draft:
            return 0
    loaded = load_model(given.model, dtype=given.dtype, quantization=given.quantization, kv_dtype=given.kv_dtype)
    plain = LLM(loaded, "none")
    prompts = [ids for ids in prompts_of(plain, given) if len(ids) + given.max_tokens <= plain.model.max_length]
    params = params_of(len(prompts), given.max_tokens)[number - 1 :: parts]
    prompts = prompts[number - 1 :: parts]
    wanted = [text.token_ids for text in write(plain, prompts, params, 1)]
    records: list[dict[str, Any]] = [{"machine": machine(plain.model.device), "versions": versions()}]
    for draft in given.draft:
        start, llm = time.perf_counter(), LLM(loaded, draft, plan=given.plan, max_batch_size=given.batch)
        own_params = params
        if choose_methods(draft, "coupled", given.plan).traits.reads_predictions:
            pairs = zip(params, predictions_of(wanted), strict=True)
            own_params = [replace(one, prediction=prediction) for one, prediction in pairs]
        done = write(llm, prompts, own_params, given.batch)
        found = [text.token_ids for text in done]
        same = [common_length(mine, plain_text) for mine, plain_text in zip(found, wanted, strict=True)]
        records.append(
            {
                **own,
                "dtype": given.dtype,
                "kv_dtype": given.kv_dtype,
                "is_exact": plain.is_exact,
                "draft": draft,
                "plan": given.plan,
                "drafted_tokens": sum(text.stats.draft_tokens for text in done),
                "accepted_tokens": sum(text.stats.accepted_tokens for text in done),
                "batch": given.batch,
                "texts": len(found),
                "tokens": sum(map(len, found)),
                "differing_texts": sum(length < len(text) for length, text in zip(same, wanted, strict=True)),
                "tokens_before_differences": sum(same),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(json.dumps(records[-1]), flush=True)
    if given.out is not None:
        with given.out.open("a" if parts > 1 else "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in records)
    return int(any(record["differing_texts"] for record in records[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
