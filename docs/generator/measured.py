"""Measured rows of every method, computed from the results files that its page names."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftree.lab.bench.records import OURS, read_results
from draftree.lab.bench.summary import MethodSummary, Report
from generator.markdown import code, table

__all__ = ["FILES", "NOTES", "RESULTS", "blocks"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SWEEP = Path(__file__).parents[1] / "figures" / "temperature-rules.csv"
HEAD = ("run", "method", "tokens/s", "tokens/round", "x plain", "texts as plain")

FILES: dict[str, tuple[str, ...]] = {
    "drafter early-exit": ("smollm2-self-drafting-zen4", "tinyllama-self-drafting-bfloat16"),
    "drafter grammar": ("smollm2-grammar",),
    "drafter head": ("smollm2-auto-head-greedy", "smollm2-auto-head-0.8"),
    "drafter layer-skip": ("smollm2-self-drafting-zen4", "tinyllama-self-drafting-bfloat16"),
    "drafter lookahead": ("smollm2-kinds-spec-bench", "smollm2-kinds-humaneval"),
    "drafter prediction": ("smollm2-predictions",),
    "drafter model": ("tinyllama-widths-story-greedy", "tinyllama-chat-greedy", "smollm2-kinds-spec-bench"),
    "drafter ngram": ("smollm2-kinds-spec-bench", "smollm2-kinds-humaneval", "smollm2-int8-open"),
    "drafter quantized": ("offload-tinyllama", "offload-copy-tinyllama"),
    "drafter suffix": ("smollm2-kinds-spec-bench", "smollm2-kinds-humaneval", "smollm2-int8-open"),
    "drafter synthetic": ("smollm2-auto",),
    "verifier soft": ("smollm2-lossy-rules",),
    "verifier typical": ("smollm2-lossy-rules",),
    "planner additive": ("smollm2-ngram-planners", "tinyllama-lengths-story-greedy"),
    "planner adaptive": ("smollm2-ngram-planners", "tinyllama-lengths-story-greedy", "smollm2-auto"),
    "planner fixed": ("smollm2-ngram-planners", "smollm2-auto"),
    "planner heuristic": ("smollm2-ngram-planners", "tinyllama-lengths-story-greedy"),
    "planner threshold": ("tinyllama-lengths-story-greedy",),
    "planner watch": ("smollm2-lossy-rules",),
}
"""Results files of a method; a method without any is not measured in a run."""

NOTES: dict[str, str] = {
    "drafter lookahead": "Options and windows: [lab note](../lab/lookups.md#lookahead).",
    "drafter prediction": "Rewritten code, with the code of the prompt as prediction. `suffix` reads the prompt as "
    "well and is faster in this run: 8.89 tokens/round. Tokens per round of replayed texts: "
    "[lab note](../lab/lookups.md).",
    "drafter quantized": "The target's weights are streamed from a file here. With 4 bits, weights and copy take no "
    "more memory than the weights of plain decoding may; the first 24 tokens of each text are compared. "
    "With the target in memory: accepted tokens only, "
    "[lab note](../lab/four-bits.md#a-4-bit-copy-as-a-drafter).",
    "drafter synthetic": "A drafter that is always wrong, to measure what a planner loses on it.",
    "planner watch": "It scores no draft: the text is that of plain decoding, and every draft is an additional cost.",
    "verifier soft": "More tokens per round of a lossy rule are other texts.",
    "verifier typical": "More tokens per round of a lossy rule are other texts.",
}
"""What is known beyond the rows, or instead of them."""


def blocks(seam: str, name: str) -> Iterator[str]:
    """The section of a method's page: rows with their files, a note, or that nothing was measured.

    Args:
        seam: "drafter", "verifier" or "planner".
        name: of the method.
    """
    key = f"{seam} {name}"
    yield "## Measured"
    rows = [row for file in FILES.get(key, ()) for row in rows_of(file, seam, name)]
    if rows:
        yield "Conditions: [index](README.md#measured)."
        yield table(HEAD, without_repeats(rows))
    swept = sweep(name) if seam == "verifier" else ""
    if swept:
        yield swept
    if key in NOTES:
        yield NOTES[key]
    elif not rows and not swept:
        yield "Not measured: no results file has this method."


def without_repeats(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The rows, with the run named once."""
    last = ""
    for run, *rest in rows:
        yield "" if run == last else run, *rest
        last = run


def sweep(rule: str) -> str:
    """Tokens per round of a rule and of `coupled` by temperature, in the data of the gallery's figure."""
    with SWEEP.open(encoding="utf-8", newline="") as lines:
        found = {(row["rule"], row["temperature"]): f"{float(row['tokens']):.2f}" for row in csv.DictReader(lines)}
    heats = [heat for name, heat in found if name == rule]
    if not heats:
        return ""
    tokens, coupled = (", ".join(found[name, heat] for heat in heats) for name in (rule, "coupled"))
    beside = "" if rule == "coupled" else f" (`coupled`: {coupled})"
    more = " Chains and trees at five temperatures: [lab note](../lab/trees.md#temperature)."
    more = "" if f"verifier {rule}" in FILES else more
    return (
        f"Tokens per round at temperature {', '.join(heats)}: {tokens}{beside}, from the "
        f"[gallery](../gallery.md#acceptance).{more}"
    )


def rows_of(file: str, seam: str, name: str) -> list[tuple[str, ...]]:
    """Rows of a method in a results file.

    Raises:
        ValueError: the file has no row of the method.
    """
    path = RESULTS / f"{file}.jsonl"
    read = READERS.get(file, text_rows)
    found = [cells for method, cells in read(path) if belongs(method, seam, name)]
    if not found:
        raise ValueError(f"{path} has no row of {seam} '{name}'")
    return [(f"[{run}](../../benchmarks/results/{path.name})", *cells) for run, *cells in found]


def belongs(method: str, seam: str, name: str) -> bool:
    """Whether a method of a run, `draft@plan@verify`, shows a drafter, rule or planner by itself."""
    draft, plan, verify = (*method.split("@"), "", "")[:3]
    if seam == "drafter":
        return "+" not in draft and draft.partition(",")[0].partition(":")[0] == name and verify == ""
    if seam == "verifier":
        return "+" not in draft and (verify or "coupled") == name and draft not in ("plain", "none")
    return "+" not in draft and plan.partition(":")[0] == name and verify == ""


Found = list[tuple[str, tuple[str, ...]]]
"""A method of a run, and the run with the cells of its row."""


@functools.cache
def text_rows(path: Path) -> Found:
    """Rows of `draftree bench run`."""
    results = read_results(path)
    header = results.header
    machine = header["machine"]
    cpu = "AMX" if "amx_tile" in machine["cpu_flags"] else "no AMX"
    kind = header["quantization"] or header["dtype"]
    temperature = "greedy" if header["temperature"] == 0 else f"temperature {header['temperature']:g}"
    categories = list(dict.fromkeys(record.category for record in results.records))
    texts = " and ".join(categories) if len(categories) < 3 else f"{len(categories)} categories"
    threads = ", one thread" if header.get("threads") == 1 else ""
    run = f"{header['model']['name']}, {kind}, {temperature}, {texts}, {cpu}{threads}"
    ours = [row for row in Report(results).rows() if row.method["engine"] == OURS and row.method["job"] != "plain"]
    return [(row.method["name"], (run, *cells(row))) for row in ours]


def cells(row: MethodSummary) -> tuple[str, ...]:
    speed = "" if row.decoding is None else f"{row.decoding:.1f}"
    ratio = "" if row.against_plain is None else f"{row.against_plain.median:.2f}"
    equal = "not promised" if row.num_equal is None else f"{row.num_equal} of {row.num_prompts}"
    return code(row.method["name"]), speed, f"{row.acceptance_length:.2f}", ratio, equal


def grammar_rows(path: Path) -> Found:
    """Rows of `benchmarks/grammar.py`."""
    return repeat_rows(path, "smollm2-135m-instruct, bfloat16, greedy, records under a JSON schema, AMX")


def prediction_rows(path: Path) -> Found:
    """Rows of `benchmarks/predictions.py`."""
    return repeat_rows(path, "smollm2-135m-instruct, bfloat16, greedy, rewrite-code, no AMX, one thread")


@functools.cache
def repeat_rows(path: Path, run: str) -> Found:
    """Rows of a file with a line for each method and repeat: sums over repeats of whole texts."""
    lines = parsed(path)
    sums: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "texts" in line and "method" in line:
            sums.setdefault(line["method"], []).append(line)
    plain = sums["plain"]
    found: Found = []
    for method, repeats in sums.items():
        tokens, rounds = total(repeats, "tokens"), total(repeats, "rounds")
        if method == "plain" or not rounds:
            continue
        speed = tokens / total(repeats, "seconds")
        base = total(plain, "tokens") / total(plain, "seconds")
        same = [text["text"] for text in repeats[0]["texts"]] == [text["text"] for text in plain[0]["texts"]]
        num = len(plain[0]["texts"])
        equal = f"{num} of {num}" if same else ""
        found.append(
            (method, (run, code(method), f"{speed:.1f}", f"{tokens / rounds:.2f}", f"{speed / base:.2f}", equal))
        )
    return found


def total(repeats: list[dict[str, Any]], name: str) -> float:
    return sum(text.get(name) or 0 for repeat in repeats for text in repeat["texts"])


@functools.cache
def offload_rows(path: Path) -> Found:
    """Rows of `benchmarks/offload.py`."""
    found: Found = []
    for line in parsed(path):
        run = f"{line['model']}, {line['dtype']}, weights from a file, greedy, {line['prompts']} prompts, no AMX"
        speed, equal = f"{1e3 / line['ms_per_token']:.1f}", "all" if line["same_text"] else "not all"
        cell = (code(line["draft"]), speed, f"{line['tokens_per_round']:.2f}", f"{line['speedup']:.2f}", equal)
        found.append((line["draft"], (run, *cell)))
    return found


def offload_copy_rows(path: Path) -> Found:
    """Rows of `benchmarks/scale/offload.py` with a copy of the target: of all texts, first pass excluded."""

    def milliseconds(line: dict[str, Any]) -> float:
        return 1e3 * (line["seconds"] - line["first_seconds"]) / (line["tokens"] - line["first_tokens"])

    lines = parsed(path)
    plain = {line["prompt"]: line for line in lines if line["draft"] == "none"}
    own = [line for line in lines if line["draft"] != "none"]
    first, count = own[0], len(own)
    run = f"{first['model']}, {first['dtype']}, weights from a file, greedy, {count} prompts, no AMX"
    speed = count * 1e3 / sum(map(milliseconds, own))
    gain = math.prod(milliseconds(plain[line["prompt"]]) / milliseconds(line) for line in own) ** (1 / count)
    same = [line["token_ids"][: plain[line["prompt"]]["tokens"]] == plain[line["prompt"]]["token_ids"] for line in own]
    per_round = sum(line["tokens"] for line in own) / sum(line["rounds"] for line in own)
    method = f"{first['draft']}@{first['plan']}"
    numbers = (f"{speed:.1f}", f"{per_round:.2f}", f"{gain:.2f}", f"{sum(same)} of {count}")
    return [(first["draft"], (run, code(method), *numbers))]


READERS = {
    "offload-copy-tinyllama": offload_copy_rows,
    "offload-tinyllama": offload_rows,
    "smollm2-grammar": grammar_rows,
    "smollm2-predictions": prediction_rows,
}
"""Readers of files that are not of `draftree bench run`."""


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
