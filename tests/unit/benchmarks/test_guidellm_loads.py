"""Loads of servers by guidellm: their prompts, what guidellm is asked for, and tables of the rows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import script

REPORTER = """#!{python}
import json, sys
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
data = options["--data"].split("path=")[1]
prompts = [json.loads(line) for line in open(data)]
spread = {{"successful": {{"median": 12.345, "percentiles": {{"p99": 67.89}}, "total_sum": 128.0}}}}
names = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "output_token_count")
metrics = {{name: spread for name in (*names, "prompt_token_count")}}
metrics["request_totals"] = {{"successful": len(prompts), "errored": 1, "incomplete": 2}}
found = {{"duration": 4.0, "metrics": metrics, "options": options, "prompts": prompts}}
open(options["--output"].split("path=")[1], "w").write(json.dumps({{"benchmarks": [found]}}))
"""
"""Stands for guidellm: reports its options and prompts with fixed figures."""


@pytest.fixture
def reporter(tmp_path: Path) -> Path:
    program = tmp_path / "guidellm"
    program.write_text(REPORTER.format(python=sys.executable), "utf-8")
    program.chmod(0o755)
    return program


def run(reporter: Path, *, ignore_eos: bool) -> dict[str, Any]:
    loads = script("guidellm_loads")
    client = loads.Client(reporter, Path("model"), 64)
    load = loads.Load("rate", 0.5, 2)
    found: dict[str, Any] = client.run(load, ["a", "b"], url="http://x", model="m", ignore_eos=ignore_eos)
    return found


def test_loads_have_enough_requests_for_each_stream_and_for_the_seconds_of_a_rate() -> None:
    loads = script("guidellm_loads").loads_of([1, 16], [0.25, 4], requests=12, per_stream=3, seconds=20)
    assert [(load.name, load.requests) for load in loads] == [
        ("streams=1", 12),
        ("streams=16", 48),
        ("rate=0.25", 8),
        ("rate=4", 80),
    ]
    assert [load.profile for load in loads[1:3]] == [
        {"kind": "concurrent", "streams": [16]},
        {"kind": "constant", "rate": [0.25]},
    ]


def test_no_prompt_is_in_two_loads_or_in_the_warm_up() -> None:
    module = script("guidellm_loads")
    loads = [module.Load("streams", 1, 3), module.Load("streams", 4, 5)]
    prompts = [str(number) for number in range(12)]
    parts, first = module.parts_of(prompts, loads, warm_up=4)
    assert [*parts[0], *parts[1], *first] == prompts
    assert list(map(len, parts)) == [3, 5]
    with pytest.raises(ValueError, match="need 12 prompts, and the file has 11"):
        module.parts_of(prompts[:11], loads, warm_up=4)


@pytest.mark.skipif(os.name != "posix", reason="the program is a script")
def test_requests_are_greedy_and_of_equal_length_with_and_without_ignore_eos(reporter: Path) -> None:
    found = run(reporter, ignore_eos=True)
    backend = json.loads(found["options"]["--backend"])
    assert backend["extras"] == {"body": {"temperature": 0}}
    assert "max_tokens" not in backend
    assert found["prompts"] == [{"prompt": text, "output_tokens_count": 64} for text in "ab"]
    found = run(reporter, ignore_eos=False)
    assert json.loads(found["options"]["--backend"])["max_tokens"] == 64
    assert found["prompts"] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.skipif(os.name != "posix", reason="the program is a script")
def test_a_row_has_the_figures_and_counts_unfinished_requests_as_errors(reporter: Path) -> None:
    module = script("guidellm_loads")
    row = module.row_of(module.Load("rate", 0.5, 2), run(reporter, ignore_eos=True))
    assert row == {
        "load": "rate=0.5",
        "requests": 2,
        "errors": 3,
        "input_tokens": 128.0,
        "output_tokens": 128.0,
        "seconds": 4.0,
        "tokens_per_second": 32.0,
        "ttft_ms": {"p50": 12.3, "p99": 67.9},
        "itl_ms": {"p50": 12.3, "p99": 67.9},
        "latency_s": {"p50": 12.35, "p99": 67.89},
    }


def test_a_failed_run_raises_with_the_output_of_guidellm(tmp_path: Path) -> None:
    program = tmp_path / "guidellm"
    program.write_text("#!/bin/sh\necho no server >&2\nexit 3\n", "utf-8")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="no server"):
        run(program, ignore_eos=True)


def test_a_table_groups_repeats_and_orders_streams_before_rates() -> None:
    def row(load: str, speed: float, **changed: Any) -> dict[str, Any]:
        times = {"ttft_ms": {"p50": 100, "p99": 300}, "itl_ms": {"p50": 10, "p99": 20}}
        base = {"server": "ours", "load": load, "requests": 4, "errors": 0, "tokens_per_second": speed}
        return {**base, **times, "latency_s": {"p50": 1.0, "p99": 2.0}, **changed}

    rows = [row("rate=0.5", 30), row("streams=16", 200), row("streams=2", 80, errors=1)]
    rows.append(row("streams=16", 210.55, ttft_ms={"p50": 200, "p99": 500}))
    heading, _, *table = script("guidellm_loads").table_of(rows).splitlines()
    assert heading.startswith("| load | server | requests | tokens/s |")
    assert table == [
        "| streams=2 | ours | 4, 1 failed | 80.0 | 100 (300) | 10.0 (20.0) | 1.00 (2.00) |",
        "| streams=16 | ours | 4+4 | 200.0, 210.6 | 150 (400) | 10.0 (20.0) | 1.00 (2.00) |",
        "| rate=0.5 | ours | 4 | 30.0 | 100 (300) | 10.0 (20.0) | 1.00 (2.00) |",
    ]
