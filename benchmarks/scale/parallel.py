"""Cost of dividing a model among processes: bytes of a round's message, and times of messages and passes.

Start it once for each number of processes; each run appends one line of JSON:

    python benchmarks/scale/parallel.py MODEL --threads 2 --output parallel.jsonl
    torchrun --standalone --nproc-per-node 2 benchmarks/scale/parallel.py MODEL --output parallel.jsonl

With as many processes as cores the times show what the exchange costs. With more processes than cores they show the
scheduler of the system, and only the bytes and the equality of the texts mean something.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.parallel.model import ParallelModel

PROMPT = [(7 * place) % 50 + 3 for place in range(48)]
TREE = (-1, 0, 0, 1, 1, 2, 3, 5)
"""Parents of the nodes of the scored tree."""


def pass_times(model: LanguageModel, parents: tuple[int, ...], repeats: int) -> list[float]:
    """Seconds of passes over the nodes of a tree after a prompt."""
    slot = model.open()
    model.run(Pass([Extend(slot, PROMPT, range(-1, len(PROMPT) - 1), logits_at=())]))
    model.commit(slot, range(len(PROMPT)))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.run(Pass([Extend(slot, [5 + node for node in range(len(parents))], parents)]))
        model.synchronize()
        found.append(time.perf_counter() - start)
        model.commit(slot, ())
    model.close(slot)
    return found


def message_times(model: ParallelModel, repeats: int) -> list[float]:
    """Seconds to write and send messages of an edit and no pass."""
    found = []
    slot = model.open()
    for _ in range(repeats):
        model.commit(slot, ())
        start = time.perf_counter()
        model._leader.send(model._writer.take())
        found.append(time.perf_counter() - start)
    model.close(slot)
    return found


def traffic(llm: LLM, draft: str, max_tokens: int) -> dict[str, Any]:
    """Seconds, messages and bytes of one greedy text, and a hash of the text."""
    model, params = llm.model, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    before = (model.num_messages, model.num_bytes_sent) if isinstance(model, ParallelModel) else (0, 0)
    start = time.perf_counter()
    done = llm.generate([PROMPT], params, draft=draft)[0]
    seconds = time.perf_counter() - start
    after = (model.num_messages, model.num_bytes_sent) if isinstance(model, ParallelModel) else (0, 0)
    return {
        "draft": draft,
        "rounds": done.stats.rounds,
        "seconds": seconds,
        "messages": after[0] - before[0],
        "bytes": after[1] - before[1],
        "text": hashlib.sha256(json.dumps(list(done.token_ids)).encode()).hexdigest()[:16],
    }


def main() -> None:
    """Measure one number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--strict-sums", action="store_true")
    parser.add_argument("--pp", type=int, default=1, help="stages; the other processes share their layers")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(given.threads)
    # other ranks do not return from here
    llm = LLM(
        given.model,
        ["suffix,min=1", "none"],
        plan="fixed",
        tp=size // given.pp,
        pp=given.pp,
        strict_sums=given.strict_sums,
        kernels=given.kernels,
        dtype=given.dtype,
        device="cpu",
    )
    model = llm.model
    line: dict[str, Any] = {
        "model": given.model,
        "processes": size,
        "stages": given.pp,
        "threads": given.threads,
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "kernels": llm.kernels,
        "dtype": str(model.dtype).removeprefix("torch."),
        "strict_sums": given.strict_sums,
        "exact": llm.is_exact,
        "load_average": os.getloadavg()[0],
    }
    line["traffic"] = [traffic(llm, draft, given.max_tokens) for draft in ("none", "suffix,min=1")]
    line["row_ms"] = 1000 * median(pass_times(model, (-1,), given.repeats))
    line["tree_ms"] = 1000 * median(pass_times(model, TREE, given.repeats))
    if isinstance(model, ParallelModel):
        line["message_us"] = 1e6 * median(message_times(model, given.repeats))
    with given.output.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
