"""The simulated fleet: closed cases by hand, and a measured run within ten percent."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from draftree.core.errors import ConfigurationError
from draftree.lab.fleet.curves import DEVICES, MeasuredCurve, RooflineCurve, between
from draftree.lab.fleet.simulation import (
    Fleet,
    FleetSettings,
    RoundOutcome,
    SimulatedRequest,
    mean_outcomes,
    poisson,
    quantile,
)
from draftree.lab.fleet.sizing import Demand, parse_parameters, plans, shape_of

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
SMOLLM2_TOKEN_SHARE = 30 * 2 * 3 * 64 * 2 / 269_030_016
"""Keys and values of a token by all weights of SmolLM2-135M, both in bytes, bfloat16."""
WITHIN = 0.10


class Flat:
    """A pass that always takes a second."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        return 1.0


class ByRows:
    """A pass that takes a second for each row."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        return float(rows)


def test_one_request_writes_a_token_a_pass() -> None:
    found = Fleet(Flat(), FleetSettings()).run([SimulatedRequest(5.0, 10, 4)])
    assert (found.seconds, found.tokens, found.steps) == (4.0, 4, 4)
    assert found.first_token == (1.0,)
    assert found.per_token == (1.0,)
    assert found.busy == 1.0


def test_drafts_write_several_tokens_a_pass_and_cost_rows() -> None:
    outcomes = (RoundOutcome(3, 2, 0.5),)
    found = Fleet(ByRows(), FleetSettings()).run([SimulatedRequest(0.0, 1, 5, outcomes)])
    assert (found.tokens, found.steps) == (5, 3)
    assert found.seconds == 3 * (4 + 0.5)


def test_requests_share_passes() -> None:
    requests = [SimulatedRequest(0.0, 1, 4) for _ in range(3)]
    assert Fleet(Flat(), FleetSettings()).run(requests).seconds == 4.0
    assert Fleet(Flat(), FleetSettings(max_batch=1)).run(requests).seconds == 12.0
    assert Fleet(Flat(), FleetSettings(max_batch=1, replicas=3)).run(requests).seconds == 4.0
    assert Fleet(Flat(), FleetSettings(max_batch=1)).run(requests).queued == pytest.approx(2 / 3)


def test_long_prompts_are_read_in_chunks_beside_others() -> None:
    requests = [SimulatedRequest(0.0, 1, 6), SimulatedRequest(1.5, 130, 1)]
    found = Fleet(Flat(), FleetSettings(prefill_busy=64)).run(requests)
    # it waits for the pass that runs, and is read by 64, 64 and 2 tokens
    assert found.first_token == (3.5, 1.0)  # in the order of their ends


def test_a_round_trip_frees_the_batch_for_others() -> None:
    alone = Fleet(Flat(), FleetSettings(round_trip=2.0)).run([SimulatedRequest(0.0, 1, 3)])
    assert alone.seconds == 3 + 2 * 2.0
    many = Fleet(Flat(), FleetSettings(round_trip=2.0)).run([SimulatedRequest(0.0, 1, 3) for _ in range(4)])
    assert many.seconds == alone.seconds
    assert many.tokens == 12


def test_every_token_of_every_request_is_written() -> None:
    outcomes = mean_outcomes(2.5, 4)
    requests = list(poisson(3.0, count=200, prompt=40, output=30, outcomes=outcomes, seed=1))
    found = Fleet(Flat(), FleetSettings(replicas=2, max_batch=5)).run(requests)
    assert found.tokens == sum(request.output for request in requests)
    assert len(found.first_token) == 200
    assert min(found.first_token) > 0.999


@pytest.mark.parametrize("mean", [1.0, 1.7, 2.85, 4.0])
def test_outcomes_have_the_requested_mean(mean: float) -> None:
    outcomes = mean_outcomes(mean, 5)
    assert statistics.fmean(one.tokens for one in outcomes) == pytest.approx(mean, abs=0.05)
    assert all(1 <= one.tokens <= 6 for one in outcomes)


def test_points_are_interpolated_and_extended() -> None:
    points = {1: 10.0, 3: 20.0, 5: 26.0}
    assert [between(points, place) for place in (0, 1, 2, 4, 7)] == [10.0, 10.0, 15.0, 23.0, 32.0]


def test_measured_passes_are_reproduced() -> None:
    curve = MeasuredCurve([(1, 1, 100, 1.0), (4, 1, 100, 2.0), (1, 4, 100, 1.5), (1, 4, 300, 1.9)], token_share=5e-4)
    assert curve.seconds(1, 1, 100) == 1.0
    assert curve.seconds(4, 4, 100) == 2.0
    assert curve.seconds(1, 4, 300) == pytest.approx(1.9)
    assert 1.5 < curve.seconds(2, 4, 100) < 2.0
    assert curve.seconds(1, 1, 300) == pytest.approx(1.0 + 200 * (5e-4 + (2e-3 - 5e-4) / 4))


def test_a_curve_without_its_first_point_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one sequence and one row"):
        MeasuredCurve([(2, 1, 100, 1.0)])


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_a_measured_run_is_reproduced_within_ten_percent(at_once: int) -> None:
    """Passes and runs were measured in the same hour on the same machine; nothing is fitted to the runs."""
    curve = MeasuredCurve.read(RESULTS / "costs-smollm2.jsonl", token_share=SMOLLM2_TOKEN_SHARE)
    lines = (RESULTS / "load-smollm2-bfloat16.jsonl").read_text("utf-8").splitlines()
    runs = [
        row for row in map(json.loads, lines) if (row.get("at_once"), row.get("method")) == (at_once, "draftree none")
    ]
    assert len(runs) >= 6
    simulated = []
    for run in runs:
        requests = [SimulatedRequest(0.0, prompt, run["tokens"] // at_once) for prompt in run["prompt_tokens"]]
        simulated.append(Fleet(curve, FleetSettings()).run(requests).seconds)
    measured = statistics.median(run["last_token"] for run in runs)
    assert abs(statistics.median(simulated) / measured - 1) < WITHIN


def test_a_roofline_is_bound_by_reading_or_by_arithmetic() -> None:
    device = DEVICES["h100"]
    curve = RooflineCurve(device, 1, 8e9, 16e9, 131072, 32, 4096)
    assert curve.seconds(1, 1, 0) == pytest.approx(16e9 / (0.7 * device.bandwidth))
    assert curve.seconds(1, 4096, 0) == pytest.approx(2 * 8e9 * 4096 / (0.5 * device.flops))
    two = RooflineCurve(device, 2, 8e9, 16e9, 131072, 32, 4096)
    assert curve.seconds(1, 1, 0) / 2 < two.seconds(1, 1, 0) < curve.seconds(1, 1, 0)


@pytest.mark.parametrize(("text", "wanted"), [("8B", 8e9), ("135m", 135e6), ("1.5T", 1.5e12), ("7000000", 7e6)])
def test_model_sizes_are_read(text: str, wanted: float) -> None:
    assert parse_parameters(text) == wanted


@pytest.mark.parametrize("text", ["", "B", "0B", "8X", "-8B", "eight"])
def test_other_model_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="model size"):
        parse_parameters(text)


def test_shapes_are_those_of_known_models_and_between_them() -> None:
    assert shape_of(8.0e9) == (32, 4096, 131072)
    layers, hidden, token = shape_of(20e9)
    assert 32 < layers < 80
    assert 4096 < hidden < 8192
    assert 131072 < token < 327680


def test_more_requests_need_more_devices() -> None:
    small, large = (plans(Demand(parameters=8e9, rate=rate), "h100", 2)[0] for rate in (5, 60))
    assert (small.replicas, small.reason) == (1, "")
    assert large.replicas == 2


def test_weights_that_fit_only_together_are_split_and_limits_on_latency_are_kept() -> None:
    found = plans(Demand(parameters=70e9, rate=0.5, per_token=0.02), "h100", 4)
    assert [one.tensor_parallel for one in found] == [2, 4]
    for one in found:
        assert bool(one.reason) == (quantile(one.result.per_token, 0.95) > 0.02)
    assert plans(Demand(parameters=70e9, rate=0.5), "l4", 1) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rate": 0.0}, "rate is"),
        ({"rate": 1.0, "bits": -4}, "bits is"),
        ({"rate": 1.0, "tokens_per_round": 3.0, "nodes": 1}, "from 1 to 2"),
        ({"rate": 1.0, "tokens_per_round": 0.5}, "from 1 to 1"),
    ],
)
def test_impossible_demands_are_refused(options: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Demand(parameters=8e9, **options)


def test_unknown_devices_are_refused() -> None:
    demand = Demand(parameters=8e9, rate=1)
    with pytest.raises(ConfigurationError, match="h1000"):
        plans(demand, "h1000", 4)
    with pytest.raises(ConfigurationError, match="at least one"):
        plans(demand, "h100", 0)
