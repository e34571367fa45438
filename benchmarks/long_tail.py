"""Costs besides fast decoding: start, memory, long prompts, long prefixes, batches.

    python benchmarks/long_tail.py JOB smollm2-135m-instruct --output FILE

`start`: fresh processes, their first token and the peak of their memory, and the command line; `prompts`: time to
the first token of long prompts; `prefixes`: a pass after longer and longer texts; `batches`: a pass over more and
more texts.

Draftree and transformers do the first three interleaved, in the same run; results are JSON lines after a header.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from one_start import CACHE, folder_of, one_start, weights

KINDS = ("float32", "bfloat16", "int8")
ENGINES = ("draftree", "transformers")
PREFIXES = (256, 1024, 4096, 8000)
PROMPTS = (1024, 2048, 8000)
BATCHES = (1, 2, 4, 8, 16)
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["start", "prompts", "prefixes", "batches", "one-start"])
    parser.add_argument("model")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--engine", default=ENGINES[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--lengths", default="")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.lengths = tuple(int(length) for length in given.lengths.split(",") if length)
    if given.job == "one-start":
        print(json.dumps(one_start(given.model, given.kinds, given.engine)))
        return
    jobs: dict[str, Callable[[Any], Iterator[dict[str, Any]]]] = {
        "start": starts,
        "prompts": prompts,
        "prefixes": prefixes,
        "batches": batches,
    }
    records = jobs[given.job](given)
    lines = []
    for record in records:
        print(json.dumps(record), flush=True)
        lines.append(record)
    if given.output is not None:
        given.output.write_text("".join(json.dumps(line) + "\n" for line in [header(given), *lines]))


def header(given: Any) -> dict[str, Any]:
    import torch

    from draftree.loading.provenance import load_average, machine, model_facts, now, versions
    from draftree.loading.resolve import resolve_model

    return {
        "kind": "header",
        "job": given.job,
        "date": now(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "model": model_facts(given.model, resolve_model(given.model)),
        "threads": torch.get_num_threads(),
        "repeats": given.repeats,
        "load_average": load_average(),
    }


def starts(given: Any) -> Iterator[dict[str, Any]]:
    """The same short text in fresh processes, in turns; ours with nothing kept of earlier starts, and with it."""
    for repeat in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"DRAFTREE_CACHE": folder}
            for name in ("models", "native"):
                (CACHE / name).mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).symlink_to(CACHE / name)
            for kind in given.kinds.split(","):
                for start in ("first", "second", "transformers"):
                    if (kind, start) == ("int8", "transformers"):
                        continue
                    engine = "transformers" if start == "transformers" else "draftree"
                    command = [sys.executable, __file__, "one-start", given.model, "--kinds", kind, "--engine", engine]
                    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                    yield json.loads(done.stdout.splitlines()[-1]) | {"start": start, "repeat": repeat}
            for start in ("third", "fourth"):
                yield one_command(given.model, environment) | {"start": start, "repeat": repeat}


def one_command(model: str, environment: dict[str, str]) -> dict[str, Any]:
    """Wall time of the command line: until its first text, and until it is gone."""
    line = "import sys; from draftree.cli.main import main; main(sys.argv[1:])"
    words = ["generate", model, "The capital of France is", "--max-tokens", "1", "--stream"]
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", line, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return {"kind": "command", "first_text_seconds": first, "exit_seconds": time.perf_counter() - start}


def peer_of(name: str, kind: str) -> Any:
    """The model by transformers, which has no 8-bit weights: None for those."""
    import torch
    from transformers import AutoModelForCausalLM

    if kind == "int8":
        return None
    return AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=getattr(torch, kind), trust_remote_code=False)


def token_ids(count: int) -> list[int]:
    return [(7 + 31 * place) % 9000 for place in range(count)]


def prompts(given: Any) -> Iterator[dict[str, Any]]:
    """Time to first token after a prompt of this length."""
    import torch

    from draftree import LLM, SamplingParams

    def first_token(llm: LLM, ids: list[int]) -> None:
        llm.forget()  # or it would be read once, and copied then
        llm.generate([ids], params)

    for kind in given.kinds.split(","):
        llm, peer = LLM(given.model, "none", **weights(kind)), peer_of(given.model, kind)
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        lengths = [length for length in given.lengths or PROMPTS if length < llm.model.max_length]
        for length in lengths:
            ids = token_ids(length)
            works: dict[str, Callable[[], Any]] = {"draftree": partial(first_token, llm, ids)}
            if peer is not None:
                rows = torch.tensor([ids])
                mask = torch.ones_like(rows)
                works["transformers"] = partial(
                    peer.generate, rows, max_new_tokens=1, do_sample=False, attention_mask=mask
                )
            yield from timed(works, given.repeats, {"kind": "prompt", "weights": kind, "tokens": length})


def timed(works: dict[str, Callable[[], Any]], repeats: int, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds of works in turns; the first turn does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    for name, found in seconds.items():
        yield fields | {"engine": name, "seconds": found, "median": statistics.median(found)}


def prefixes(given: Any) -> Iterator[dict[str, Any]]:
    """A pass over one token and over eight, after a prefix."""
    import torch
    from transformers import DynamicCache

    from draftree.lab.bench.passes import time_passes
    from draftree.loading.load import load_model
    from draftree.models.torch.inspection import cache_name

    for kind in given.kinds.split(","):
        model, peer = load_model(given.model, **weights(kind)).model, peer_of(given.model, kind)
        for length in (n for n in given.lengths or PREFIXES if n + 8 <= model.max_length):
            fields = {"kind": "prefix", "weights": kind, "tokens": length}
            for record in time_passes(model, (1, 8), prefix=length, repeats=given.repeats):
                found = [value / 1e3 for value in record.milliseconds]
                rows = fields | {"rows": record.rows, "engine": "draftree"}
                yield rows | {"seconds": found, "median": statistics.median(found)}
            if peer is None:
                continue
            with torch.inference_mode():
                cache, name = DynamicCache(config=peer.config), cache_name(peer.forward)
                peer(torch.tensor([token_ids(length)]), logits_to_keep=1, **{name: cache})

                def step(cache: Any = cache, peer: Any = peer, name: str = name) -> None:
                    peer(torch.tensor([[7]]), **{name: cache})
                    cache.crop(-1)

                yield from timed({"transformers": step}, given.repeats, fields | {"rows": 1})


def batches(given: Any) -> Iterator[dict[str, Any]]:
    """A pass over one token of each of so many texts, and over eight of each, after 256 tokens."""
    from draftree.loading.load import load_model
    from draftree.models.base import Extend, Pass

    prefix = 256
    for kind in given.kinds.split(","):
        model = load_model(given.model, **weights(kind)).model
        prefix = min(prefix, model.max_length - 16)
        model.reserve(BATCHES[-1], prefix + 8)
        slots = [model.open() for _ in range(BATCHES[-1])]
        for slot in slots:
            model.run(Pass([Extend(slot, token_ids(prefix), range(-1, prefix - 1), logits_at=())]))
            model.commit(slot, range(prefix))
        for rows in (1, 8):
            for count in BATCHES:
                fields = {"kind": "batch", "weights": kind, "texts": count, "rows": rows}
                yield from timed({"draftree": partial(batch_pass, model, slots[:count], rows)}, given.repeats, fields)


def batch_pass(model: Any, slots: list[Any], rows: int) -> None:
    from draftree.models.base import Extend, Pass

    model.run(Pass([Extend(slot, token_ids(rows), range(-1, rows - 1)) for slot in slots]))
    for slot in slots:
        model.commit(slot, ())


if __name__ == "__main__":
    main()
