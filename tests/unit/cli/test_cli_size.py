"""`draftree size`: tables and JSON of simulated fleets, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.core.tree import TokenTree
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.engine.trace import TraceHeader, TraceWriter

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SMALL = ["--model-size", "135M", "--rate", "1"]
MEASURED = ["--measured", str(RESULTS / "costs-smollm2.jsonl")]
DEMAND = ["size", "--model-size", "8B", "--rate", "2", "--prompt", "100", "--output", "50"]


def test_json_has_a_fleet_for_each_degree_of_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DEMAND, "--devices", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["tensor_parallel"] for one in found] == [1, 2, 4]
    assert all(one["serves"] and one["devices"] <= 4 for one in found)


def test_a_drafter_lowers_the_time_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for drafter in ([], ["--nodes", "8", "--tokens-per-round", "2.5"]):
        assert run([*DEMAND, *drafter, "--devices", "1", "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)[0]["seconds_per_token"]["0.5"])
    assert times[1] < 0.6 * times[0]


def test_the_table_says_that_nothing_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DEMAND, "--devices", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 h100" in out
    assert "nothing was run" in out


def test_measured_passes_replace_the_data_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESULTS / "costs-smollm2.jsonl"
    options = ["--model-size", "135M", "--rate", "3", "--prompt", "40", "--output", "60", "--devices", "3"]
    assert run(["size", *options, "--measured", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[-1]["serves"]
    assert found[-1]["device"] == "measured"


def test_messages_of_devices_count_with_measured_costs_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "4", "--tokens-per-round", "2.5", "--round-trip-ms", "20", "--devices", "1", "--json"]
    times = []
    for host in ([], ["--host", str(RESULTS / "equal-latency-paced.jsonl")]):
        assert run(["size", "--model-size", "8B", "--rate", "20", "--output", "100", *options, *host]) == 0
        times.append(json.loads(capsys.readouterr().out)[0]["seconds_per_token"]["0.5"])
    assert times[0] != times[1]


@pytest.mark.parametrize("name", ["costs-smollm2.jsonl", "missing.jsonl"])
def test_files_without_costs_of_the_host_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DEMAND, "--host", str(RESULTS / name)]) != 0
    assert "calibration" in (found := capsys.readouterr().err) or "cannot be read" in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model-size", "eight", "--rate", "1"], "model size is 'eight'"),
        ([*SMALL, "--devices", "0"], "--devices is 0"),
        ([*SMALL, *MEASURED, "--devices", "0"], "--devices is 0"),
        ([*SMALL, *MEASURED, "--max-batch", "0"], "--max-batch is 0"),
        ([*SMALL, "--max-batch", "4"], "is for measured passes"),
        ([*SMALL, *MEASURED, "--device", "h100"], "leave one of them out"),
        ([*SMALL, "--nodes", "-1"], "-1 drafted tokens"),
        ([*SMALL, "--draft-ms", "-1"], "takes -0.001 s"),
        ([*SMALL, "--first-token-ms", "0"], "to the first token is 0.0 s"),
        ([*SMALL, "--per-token-ms", "nan"], "to a token is nan s"),
    ],
)
def test_impossible_plans_are_refused(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", *options]) == 1
    assert reason in capsys.readouterr().err


def test_recorded_rounds_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rounds.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        writer.begin(TraceHeader("m", "suffix", "coupled", "fixed", (), {}))
        tree = TokenTree((1, 2, 3), (-1, 0, 1))
        for place in range(6):
            row = SequenceRecord(
                "r", 10 + 3 * place, 3, 3, 2, 3, 2, drafted=tree, tree=tree, path=(0, 1), bonus=9, room=50
            )
            writer(RoundRecord(0.0, 0.002, 0.02, 0.0, 0.0, 0.022, 4, (row,)))
    times = []
    for options in ([], ["--trace", str(path)], ["--nodes", "3", "--tokens-per-round", "3", "--draft-ms", "2"]):
        assert run([*DEMAND, "--devices", "1", "--json", *options]) == 0
        times.append(json.loads(capsys.readouterr().out)[0]["seconds_per_token"]["0.5"])
    assert times[1] == pytest.approx(times[2], rel=0.02), "three tokens in every round"
    assert times[1] < 0.6 * times[0]


def test_measured_rounds_are_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESULTS / "fleet-smollm2.jsonl"
    options = ["--model-size", "135M", "--rate", "1", "--prompt", "60", "--output", "40", "--measured", str(file)]
    times = []
    for draft in ("none", "head:smollm2-135m-instruct"):
        assert run(["size", *options, "--draft", draft, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)[-1]["seconds_per_token"]["0.5"])
    assert times[1] < 0.8 * times[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--draft", "suffix"], "--measured"),
        (["--draft", "suffix", "--nodes", "3", "--tokens-per-round", "2"], "given twice"),
        (["--trace", "missing.jsonl"], "cannot be read"),
        (["--round-trip-ms", "-1"], "round trip is"),
        (["--measured", str(RESULTS / "fleet-smollm2.jsonl"), "--draft", "sufix"], "did you mean 'suffix'"),
    ],
)
def test_impossible_rounds_are_refused(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DEMAND, *options]) == 1
    assert reason in capsys.readouterr().err
