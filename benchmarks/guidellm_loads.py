"""Loads of `serving.py`: their prompts, their runs of guidellm, and tables of their rows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

OFFLINE = {"HF_HUB_OFFLINE": "1"}
TIMES = {"ttft_ms": "time_to_first_token_ms", "itl_ms": "inter_token_latency_ms", "latency_s": "request_latency"}
"""Columns of a row, and guidellm's names of them."""
HEADINGS = ("load", "server", "requests", "tokens/s", "first token, ms", "between tokens, ms", "whole answer, s")


@dataclass(frozen=True)
class Load:
    """Closed-loop streams or a constant rate.

    Attributes:
        kind: `streams` or `rate`.
        value: how many streams, or requests per second.
        requests: requests of the run.
    """

    kind: str
    value: float
    requests: int

    @property
    def name(self) -> str:
        """As in a row."""
        return f"{self.kind}={self.value:g}"

    @property
    def profile(self) -> dict[str, Any]:
        """guidellm's profile."""
        if self.kind == "streams":
            return {"kind": "concurrent", "streams": [int(self.value)]}
        return {"kind": "constant", "rate": [self.value]}


def loads_of(
    streams: Sequence[int], rates: Sequence[float], *, requests: int, per_stream: int, seconds: float
) -> list[Load]:
    """Return the loads of a server, with their numbers of requests.

    Args:
        streams: numbers of closed-loop streams.
        rates: requests per second.
        requests: smallest number of requests of a load of streams.
        per_stream: smallest number of requests of each stream.
        seconds: how long requests of a rate arrive; at least eight do.
    """
    closed = [Load("streams", count, max(requests, per_stream * count)) for count in streams]
    return closed + [Load("rate", rate, max(8, math.ceil(rate * seconds))) for rate in rates]


def parts_of(prompts: Sequence[str], loads: Sequence[Load], *, warm_up: int) -> tuple[list[list[str]], list[str]]:
    """Return the prompts of every load, and those of the warm-up; no prompt is in two of them.

    Raises:
        ValueError: there are too few prompts.
    """
    needed = sum(load.requests for load in loads) + warm_up
    if needed > len(prompts):
        raise ValueError(f"the loads and the warm-up need {needed} prompts, and the file has {len(prompts)}")
    parts, start = [], 0
    for load in loads:
        parts.append(list(prompts[start : start + load.requests]))
        start += load.requests
    return parts, list(prompts[len(prompts) - warm_up :])


@dataclass(frozen=True)
class Client:
    """guidellm with its settings.

    Attributes:
        command: the program `guidellm`.
        tokenizer: folder of a tokenizer, by which it counts tokens where a server reports none.
        tokens: generated tokens of each request.
    """

    command: Path
    tokenizer: Path
    tokens: int

    def run(self, load: Load, prompts: Sequence[str], *, url: str, model: str, ignore_eos: bool) -> dict[str, Any]:
        """Run one load and return guidellm's report of it.

        Args:
            load: the load.
            prompts: one for each request.
            url: the server.
            model: name of the model in requests.
            ignore_eos: whether requests have the field `ignore_eos`.

        Raises:
            RuntimeError: guidellm failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            report, data = Path(folder) / "report.json", Path(folder) / "prompts.jsonl"
            count = {"output_tokens_count": self.tokens} if ignore_eos else {}  # guidellm adds ignore_eos to a count
            data.write_text("".join(json.dumps({"prompt": text, **count}) + "\n" for text in prompts), "utf-8")
            backend: dict[str, Any] = {
                "kind": "openai_http",
                "target": url,
                "model": model,
                "extras": {"body": {"temperature": 0}},
            }
            if not ignore_eos:
                backend["max_tokens"] = self.tokens
            words = [str(self.command), "run", "--disable-console", "--backend", json.dumps(backend)]
            words += ["--profile", json.dumps(load.profile)]
            words += ["--constraint", f"kind=max_requests,count={load.requests}"]
            words += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
            words += ["--tokenizer", f"kind=huggingface_auto,model={self.tokenizer}"]
            done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **OFFLINE})
            if done.returncode or not report.exists():
                raise RuntimeError(f"guidellm failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            found: dict[str, Any] = json.loads(report.read_text("utf-8"))["benchmarks"][0]
            return found


def row_of(load: Load, found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run that matter."""
    metrics, totals = found["metrics"], found["metrics"]["request_totals"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    times = {}
    for name, key in TIMES.items():
        own, digits = metrics[key]["successful"], 2 if name.endswith("_s") else 1
        times[name] = {"p50": round(own["median"], digits), "p99": round(own["percentiles"]["p99"], digits)}
    return {
        "load": load.name,
        "requests": totals["successful"],
        "errors": totals["errored"] + totals["incomplete"],
        "input_tokens": metrics["prompt_token_count"]["successful"]["total_sum"],
        "output_tokens": tokens,
        "seconds": round(found["duration"], 2),
        "tokens_per_second": round(tokens / found["duration"], 1),
        **times,
    }


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: tokens/s of every repeat; times as p50 (p99), the mean of the repeats."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["server"]), []).append(row)
    lines = [" | ".join(HEADINGS), "| ".join(["--- "] * 2 + ["---: "] * (len(HEADINGS) - 2)).rstrip()]
    order = {load: None for load, _ in groups}
    for load in sorted(order, key=lambda name: (name.split("=")[0] == "rate", float(name.split("=")[1]))):
        for (other, server), repeats in groups.items():
            if other == load:
                requests = "+".join(str(row["requests"]) for row in repeats)
                failed = sum(row["errors"] for row in repeats)
                speeds = ", ".join(f"{row['tokens_per_second']:.1f}" for row in repeats)
                times = [_time(repeats, name) for name in TIMES]
                lines.append(" | ".join([load, server, requests + f", {failed} failed" * (failed > 0), speeds, *times]))
    return "\n".join(f"| {line} |" for line in lines)


def _time(repeats: Sequence[dict[str, Any]], name: str) -> str:
    digits = 2 if name.endswith("_s") else 0 if name == "ttft_ms" else 1
    return "{:.{d}f} ({:.{d}f})".format(*(fmean(row[name][p] for row in repeats) for p in ("p50", "p99")), d=digits)
