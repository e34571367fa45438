"""The full benchmark: repeats every measurement of the lab notes, each into its own file.

    python benchmarks/full.py --to build/bench --prompts spec_bench.jsonl --prompts humaneval.jsonl
    python benchmarks/full.py --to build/bench --only beside --peers build/peers

A measurement whose file exists already is not repeated, so that an interrupted run continues.
Peers take part if `--peers` names the folder that `benchmarks/peers/install.sh` made. All of it takes some hours on two
cores, and is worth nothing on a machine that does something else meanwhile.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftree.loading.resolve import resolve_model

HERE = Path(__file__).parent
DRAFTREE = (sys.executable, "-W", "ignore", "-c", "from draftree.cli.main import main; main()")
SMALL, LARGE, DRAFTER = "smollm2-135m-instruct", "tinyllama-1.1b-chat", "model:stories15m"
KINDS = ("ngram", "suffix", "lookahead", "suffix+lookahead", DRAFTER, "early-exit:20,k=2")
LLAMA_LOOKUPS = ("simple --draft 8 --match 3", "simple --draft 16 --match 2", "map --draft 8 --match 3", "cache")
VLLM_LOOKUPS = ("--draft 5 --match 3", "--draft 10 --match 3")
OPENVINO_LOOKUPS = ("--draft 5 --match 3", "--draft 10 --match 3", "--draft 10 --match 2")


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement.

    Attributes:
        name: of its file, without the ending.
        command: what is run.
        prints: whether it prints its result; else it is given the file's name as the last word.
    """

    name: str
    command: tuple[str, ...]
    prints: bool = False


def script(name: str, *arguments: str, out: str = "--out") -> tuple[str, ...]:
    """A script of this folder."""
    return (sys.executable, "-W", "ignore", str(HERE / f"{name}.py"), *arguments, out)


def bench(*arguments: str) -> tuple[str, ...]:
    """`draftree bench …`."""
    return (*DRAFTREE, "bench", *arguments, "--output")


def repeated(option: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The option once for each value."""
    return tuple(word for value in values for word in (option, value))


def peers_of(folder: Path | None) -> tuple[str, ...]:
    """transformers, and the engines in the folder, each with several settings of its lookup."""
    found = ["transformers", "transformers:3", "transformers:10", "drop-in:ngram", "drop-in:suffix"]
    if folder is None:
        return tuple(found)
    llama, openvino = folder / "llama/bin/python", folder / "openvino/bin/python"
    for weights in ("bf16", "q8_0"):
        command = f"{llama} {HERE / 'peers/llama_cpp.py'} {folder / 'weights' / f'smollm2-{weights}.gguf'}"
        found.append(f"llama.cpp {weights}={command}")
        found += [f"llama.cpp {weights} {way}={command} --lookup {way}" for way in LLAMA_LOOKUPS]
    for weights in ("fp16", "int8"):
        command = f"{openvino} {HERE / 'peers/openvino_llm.py'} {folder / 'weights' / f'openvino-{weights}'}"
        found.append(f"OpenVINO {weights}={command}")
        found += [f"OpenVINO {weights} {way}={command} --lookup {way}" for way in OPENVINO_LOOKUPS]
    command = f"{folder / 'vllm/bin/python'} {HERE / 'peers/vllm_llm.py'} {resolve_model(SMALL)}"
    found += [f"vLLM={command}", *(f"vLLM {way}={command} --lookup {way}" for way in VLLM_LOOKUPS)]
    return tuple(found)


def jobs_of(prompts: tuple[Path, ...], peers: tuple[str, ...]) -> Iterator[Job]:
    """All measurements, the short ones first."""
    files = repeated("--prompts", tuple(map(str, prompts)))
    yield Job("doctor", (*DRAFTREE, "doctor", SMALL, "--measure", "--json"), prints=True)
    for model in (SMALL, LARGE):
        yield Job(f"passes-{model}", bench("passes", model))
        yield Job(f"trees-{model}", script("trees", model, "--trees", "2-2-2,3-3-1-1,4-2-2-1", out="--output"))
        yield Job(f"start-{model}", script("long_tail", "start", model, out="--output"))
    for part in ("prompts", "prefixes", "batches"):
        yield Job(f"long-{part}", script("long_tail", part, SMALL, out="--output"))
    yield Job("grammar", script("grammar"))
    ours = repeated("--ours", ("none", *KINDS[:3], "none@quantization=int8", "suffix@quantization=int8"))
    yield Job("beside", script("beside", SMALL, *ours, *repeated("--peer", peers)))
    for number, file in enumerate(prompts or (None,)):
        given = () if file is None else ("--prompts", str(file))
        methods = repeated("--draft", KINDS)
        yield Job(
            f"kinds-{number}", bench("run", SMALL, *methods, "--peer", "--limit", "5", "--max-tokens", "64", *given)
        )
    trees = ("k=2", "k=3", "k=4", "tree=2-2-1-1", "tree=best-15,k=4", "tree=best-31,k=4")
    fixed = repeated("--draft", tuple(f"{DRAFTER},{tree}@fixed" for tree in trees))
    planned = repeated("--draft", (f"{DRAFTER},tree=best-15,k=4", f"ngram+{DRAFTER},tree=best-15,k=4"))
    for category in ("story", "chat"):
        of = ("--category", category, "--max-tokens", "48")
        yield Job(f"trees-{category}", bench("run", LARGE, *fixed, *planned, *of))
    yield Job(
        "distributions",
        script(
            *("distributions", LARGE, "--draft-model", "stories15m", "--category", "story", "--category", "chat"),
            out="--output",
        ),
    )
    for scenario in ("at-once", "beside", "costs"):
        yield Job(f"load-{scenario}", script("load", SMALL, "--scenario", scenario))
    for weights in ((), ("--quantization", "int8")):
        drafts = repeated("--draft", ("ngram", "suffix", "lookahead", f"suffix+{DRAFTER},tree=best-8,k=3"))
        yield Job("-".join(("exactness", *weights[1:])), script("exactness", SMALL, *drafts, *files, *weights))


def measure(job: Job, to: Path) -> bool:
    """Run it, unless its file is there; whether it is there now."""
    file = to / f"{job.name}.jsonl"
    if file.exists():
        print(f"{job.name}: is there already")
        return True
    unfinished = to / f"{job.name}.unfinished.jsonl"
    unfinished.unlink(missing_ok=True)
    start, command = time.perf_counter(), job.command if job.prints else (*job.command, str(unfinished))
    with (to / f"{job.name}.log").open("w", encoding="utf-8") as log:
        log.write(shlex.join(command) + "\n")
        log.flush()
        output = unfinished.open("w", encoding="utf-8") if job.prints else log
        done = subprocess.run(command, stdout=output, stderr=log, check=False)
    succeeded = done.returncode == 0 and unfinished.exists()
    if succeeded:
        unfinished.rename(file)
    state = f"{time.perf_counter() - start:.0f} s" if succeeded else f"failed, see {to / f'{job.name}.log'}"
    print(f"{job.name}: {state}", flush=True)
    return succeeded


def main() -> int:
    """Run the requested measurements; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="a folder for the results")
    parser.add_argument(
        "--prompts", action="append", type=Path, default=[], help="JSON lines, repeatable; our own if not given"
    )
    parser.add_argument("--peers", type=Path, help="what benchmarks/peers/install.sh made")
    parser.add_argument("--only", action="append", default=[], help="names, or how they begin; repeatable")
    given = parser.parse_args()
    jobs = list(jobs_of(tuple(given.prompts), peers_of(given.peers)))
    chosen = [job for job in jobs if not given.only or job.name.startswith(tuple(given.only))]
    if not chosen:
        parser.error(f"nothing is called {', '.join(given.only)}: there are {', '.join(job.name for job in jobs)}")
    for path in (*given.prompts, *([given.peers] if given.peers else [])):
        if not path.exists():
            parser.error(f"'{path}' is not there")
    given.to.mkdir(parents=True, exist_ok=True)
    failed = [job.name for job in chosen if not measure(job, given.to)]
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
