"""Starts the processes of a parallel model, and runs jobs in them. Not a test itself.

Run as a program, it is one of these processes: `parallel_jobs.py RANK SIZE FOLDER`, where FOLDER holds `jobs.json`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked

SECONDS = 420
CHUNK = 20
"""Prompt tokens of a pass: long prompts are read in several."""


def environment(rank: int, size: int, **others: str) -> dict[str, str]:
    """The variables that torchrun sets, and those of the tests."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **{key: str(value) for key, value in own.items()}, **fixed, **others}


def start(size: int, folder: Path, jobs: Any, **others: str) -> list[subprocess.Popen[str]]:
    """Start all processes; their output goes to pipes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return [
        subprocess.Popen(
            [*forked.python(), __file__, str(rank), str(size), str(folder)],
            env=environment(rank, size, **others),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all processes; return status, output and errors of each. A process that hangs is killed."""
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=SECONDS)
            found.append((process.returncode, out, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found


def run(size: int, folder: Path, jobs: Any, **others: str) -> Any:
    """Run jobs in processes that all end with status 0; return what rank 0 found."""
    results = ended(start(size, folder, jobs, **others))
    assert [status for status, _, _ in results] == [0] * size, "\n".join(errors for _, _, errors in results)
    return json.loads((folder / "found.json").read_text())


def texts(llm: Any, case: dict[str, Any]) -> list[list[int]]:
    """Texts of a case: its prompts as a batch, again with cached prefixes, and each alone after cancelled ones."""
    from draftree import SamplingParams

    params = [SamplingParams(**one) for one in case["params"]]
    done = [*llm.generate(case["prompts"], params), *llm.generate(case["prompts"], params)]
    cancelled = llm.stream_updates(case["prompts"][0][::-1], replace(params[1], max_tokens=40))
    next(cancelled)
    beside = llm.stream_updates([*case["prompts"][1], 17], replace(params[1], max_tokens=40))
    next(beside)
    cancelled.close()
    next(beside)
    beside.close()
    done += [llm.generate([prompt], one)[0] for prompt, one in zip(case["prompts"], params, strict=True)]
    return [list(one.token_ids) for one in done]


def all_texts(loaded: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Texts of a job's drafters with one loaded model, and facts of the model."""
    from draftree import LLM

    found: dict[str, Any] = {}
    for draft in job["drafts"]:
        llm = LLM(loaded, draft=draft, prefill_chunk_size=CHUNK, **({} if draft is None else {"plan": "fixed"}))
        found[str(draft)] = texts(llm, job)
        llm.engine.check_integrity()
        llm.forget()
    model = loaded.model
    facts = {"exact": model.is_exact, "fingerprint": model.fingerprint, "length": model.max_length}
    facts["token_bytes"] = model.footprint.token
    return {"texts": found, **facts, "open": model.num_open, "kernels": loaded.kernels}


def digest(model: Any) -> str:
    """A hash of the logits of a prefix and of a tree after it."""
    from draftree.models.base import Extend, Pass

    slot = model.open()
    chain = model.run(Pass([Extend(slot, list(range(3, 60)), range(-1, 56))])).logits.tensor().clone()
    model.commit(slot, range(57))
    tree = model.run(Pass([Extend(slot, [5, 6, 7, 8], [-1, 0, 0, -1])])).logits.tensor()
    model.close(slot)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in (chain, tree))).hexdigest()


def sums_alike() -> list[bool]:
    """Whether a row's sum has the same bits alone and in passes of more rows: ordered, and as gloo adds."""
    import torch
    import torch.distributed as dist

    from draftree.parallel.load import ordered_sum

    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(64, 2048, generator=generator)

    def gloo(part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part)
        return part

    found = []
    for add in (lambda part: ordered_sum(part, None), gloo):
        alone = add(rows[:1].clone())
        found.append(all(torch.equal(add(rows[:count].clone())[:1], alone) for count in (2, 5, 33, 64)))
    return found


SAMPLED = {"max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
"""Parameters of `never_end`, without the seed."""


def never_end(job: dict[str, Any]) -> None:
    """Generate, or wait, until this process is ended. Nothing of another rank's drafter, planner or seed is used."""
    import time

    from draftree import LLM, SamplingParams

    is_first = os.environ["RANK"] == "0"
    how = ("suffix,min=1", "fixed") if is_first else ("early-exit:1,tree=2-1", "adaptive")
    llm = LLM(job["model"], how[0], plan=how[1], tp=2, dtype="float32", device="cpu")
    params = SamplingParams(**SAMPLED, seed=1 if is_first else 2)
    print(json.dumps(llm.generate("Hello", params)[0].token_ids), flush=True)
    while True:
        if job["endless"] == "idle":
            time.sleep(600)
        llm.generate("Hello", params)


async def never_close(job: dict[str, Any]) -> None:
    """Generate on an event loop until another rank has ended; then print what requests get."""
    from draftree import AsyncLLM, SamplingParams
    from draftree.core.errors import DraftreeError

    loop, answers = asyncio.get_running_loop(), []

    async def answer() -> None:
        answers.append(True)

    def ask(record: object) -> None:
        # on the engine's thread: the round ends only after the event loop has run a coroutine
        asyncio.run_coroutine_threadsafe(answer(), loop).result(SECONDS)

    prompt, params = job.get("prompt", "Hello"), SamplingParams(**SAMPLED, seed=1)
    async with AsyncLLM(job["model"], "suffix,min=1", **job["options"], **job["settings"]) as llm:
        stop = llm.on_round(ask)
        found = await asyncio.gather(*(llm.generate(prompt, params) for _ in range(3)))
        stop()
        print(json.dumps([len(answers) > 3, [list(done.token_ids) for (done,) in found]]), flush=True)
        errors = []
        for _ in range(2):
            try:
                while True:
                    await asyncio.gather(*(llm.generate(prompt, params) for _ in range(3)))
            except DraftreeError as error:
                errors.append([type(error).__name__, str(error)])
        print(json.dumps([errors, llm.is_alive, type(llm.failure).__name__]), flush=True)


def main(rank: int, size: int, folder: Path) -> None:
    import torch
    from torch.distributed import FileStore

    from draftree.options import ModelOptions
    from draftree.parallel import world as worlds
    from draftree.parallel.channel import Member
    from draftree.parallel.load import attend, lead

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    faulthandler.dump_traceback_later(SECONDS - 60, exit=True)  # what a process that hangs waits for
    torch.set_num_threads(1)
    world = worlds.World(rank, size, rank, size, FileStore(str(folder / "store"), size))
    worlds._current = world
    jobs = json.loads((folder / "jobs.json").read_text())
    if "endless" in jobs:
        if jobs["endless"] == "async":
            asyncio.run(never_close(jobs))
            return
        never_end(jobs)
    found = []
    for job in jobs:
        options = ModelOptions(job["model"], **job["options"], **job["settings"])
        if rank:
            attend(world, Member(world), options)
            if job.get("sums"):
                sums_alike()
            continue
        loaded = lead(world, options)
        found.append(all_texts(loaded, job))
        if job.get("digest"):
            found[-1]["digest"] = digest(loaded.model)
            heads = [loaded.model.input_embedding(), loaded.model.output_head()]
            found[-1]["heads"] = [hashlib.sha256(one.float().numpy().tobytes()).hexdigest() for one in heads]
        found[-1]["bytes"], found[-1]["messages"] = loaded.model.num_bytes_sent, loaded.model.num_messages
        loaded.model.stop()
        if job.get("sums"):
            found[-1]["sums"] = sums_alike()
    if not rank:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
