"""The simulated fleet, its hosts, and plans."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.lab.fleet.curves import DEVICES, MeasuredCurve, RooflineCurve, between
from draftree.lab.fleet.measured import TIMES, calibrated_costs, slowness
from draftree.lab.fleet.simulation import (
    Fleet,
    FleetSettings,
    Host,
    HostCosts,
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


class Slow:
    """A pass that always takes ten seconds."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        return 10.0


def ends_of(host: Host) -> list[float]:
    """Run a host until it has no work; return when each work ended."""
    found: list[float] = []
    while (now := host.next_end) is not None:
        for action in host.take_ended(now):
            action(now)
            found.append(now)
    return found


def nothing(now: float) -> None:
    """What follows from a work."""


def test_messages_share_the_event_loop_and_the_time_with_the_engine() -> None:
    host = Host()
    host.add(0.0, 2.0, nothing)
    host.add(0.0, 1.0, nothing)
    host.begin(1.0, 2.0, nothing)
    # half a second of each message alone, the rest of the shorter in a quarter of the time, then a half for each work
    assert ends_of(host) == [3.0, 5.0, 5.0]


def test_only_a_message_after_a_pause_wakes_the_event_loop() -> None:
    host = Host(wake_up=0.5)
    host.add(0.0, 1.0, nothing)
    host.add(0.0, 1.0, nothing)
    assert ends_of(host) == [2.5, 2.5]
    host.add(2.5, 1.0, nothing)
    assert ends_of(host) == [3.5]
    host.add(4.0, 1.0, nothing)
    assert ends_of(host) == [5.5]


def test_a_text_of_a_device_takes_its_messages_steps_and_passes() -> None:
    host = HostCosts(
        overhead=1.0, overhead_per_sequence=0.5, overhead_per_tree=0.25, overhead_per_row=0.125, after=0.5,
        opening=2.0, tree_message=3.0, verdict_message=4.0, read_message=99.0, tokens_message=99.0, update=99.0,
    )  # fmt: skip
    settings = FleetSettings(host=host, opens=True, round_trip=5.0, client_overhead=1.0)
    found = Fleet(Slow(), settings).run([SimulatedRequest(0.0, 1, 4, (RoundOutcome(1, 2, 7.0),))])
    step = 1 + 0.5 + 0.25 + 2 * 0.125
    assert found.by_request == (pytest.approx(2 + 2 * (5 + 1 + 7 + 3 + step + 10 + 4)),)


def test_a_text_that_is_read_ends_with_its_last_tokens() -> None:
    host = HostCosts(overhead=1.0, opening=2.0, read_message=0.25, tokens_message=0.5, update=0.125, tree_message=99.0)
    near = Fleet(Slow(), FleetSettings(host=host, opens=True, read_trip=0.0)).run([SimulatedRequest(0.0, 1, 3)])
    # the half second before the first pass is shared with a read, those before the others with three messages
    assert near.by_request == (pytest.approx(2 + 0.75 + 10.5 + 2 * (1 + 10.5) + 0.125 + 0.5),)
    far = Fleet(Slow(), FleetSettings(host=host, opens=True, read_trip=50.0)).run([SimulatedRequest(0.0, 1, 3)])
    # the first read arrives after the last token was written
    assert far.by_request == (pytest.approx(2 + 50 + 0.25 + 0.5),)


def test_passes_of_the_host_are_delayed_by_messages() -> None:
    def seconds(*, passes_on_host: bool) -> float:
        settings = FleetSettings(
            host=HostCosts(read_message=1.0, tokens_message=1.0),
            opens=True,
            read_trip=0.0,
            passes_on_host=passes_on_host,
        )
        return Fleet(Slow(), settings).run([SimulatedRequest(0.0, 1, 5) for _ in range(3)]).seconds

    assert seconds(passes_on_host=True) > seconds(passes_on_host=False) + 4 * 3


def test_a_pass_ends_no_earlier_than_its_launch() -> None:
    def seconds(**launch: float) -> float:
        settings = FleetSettings(host=HostCosts(**launch))
        return Fleet(Slow(), settings).run([SimulatedRequest(0.0, 1, 2), SimulatedRequest(0.0, 1, 2)]).seconds

    assert seconds(launch=4.0, launch_per_sequence=2.0, launch_per_row=1.0) == pytest.approx(2 * 10)
    assert seconds(launch=8.0, launch_per_sequence=2.0, launch_per_row=1.0) == pytest.approx(2 * (8 + 2 * 2 + 2 * 1))


def test_the_launch_of_a_pass_delays_messages() -> None:
    def seconds(launch: float) -> float:
        host = HostCosts(launch=launch, tokens_message=1.0, update=1.0)
        settings = FleetSettings(host=host, opens=True, read_trip=0.0)
        return Fleet(Slow(), settings).run([SimulatedRequest(0.0, 1, 1), SimulatedRequest(5.0, 1, 2)]).by_request[0]

    # both messages of the first text share their time with the launch of the second one's pass
    assert seconds(5.0) == pytest.approx(seconds(0.0) + 2.0)


def test_costs_of_a_slower_host_keep_shares() -> None:
    found = HostCosts(overhead=1.0, launch=2.0, wake_up=4.0, draft_share=0.5, after=0.75).times(3.0)
    assert found == HostCosts(overhead=3.0, launch=6.0, wake_up=12.0, draft_share=0.5, after=0.75)


def calibration(costs: HostCosts, speeds: Sequence[float] = (1.0,)) -> list[dict[str, Any]]:
    """Runs whose CPU times follow from costs; each is so many times as slow as the last of `speeds` in turn."""
    rows: list[dict[str, Any]] = []
    opened = {"opened": 4, "open": 0.001, "open_reply": 0.003, "loop": 0.02, "woken": 12}
    rows.append({"kind": "calibration", "arm": "openings", "clients": 1, "rtt_ms": 0, "meters": opened})
    for arm, clients, nodes in (
        ("streams", 1, 0),
        ("streams", 6, 0),
        ("drafts", 1, 4),
        ("drafts", 6, 4),
        ("wide", 6, 9),
    ):
        passes, reads = 100, 1.0 if arm == "streams" else 0.0
        sequences, texts = passes * clients, [0.0] * 2 * clients
        trees = 0 if reads else sequences
        messages = sequences * reads if clients == 1 else 0.5 * sequences * reads  # others are read with the next ones
        woken = 2 * passes
        engine = passes * costs.step(clients, trees=0 if reads else clients, rows=clients * (1 + nodes))
        each = [costs.read_message * messages, costs.tokens_message * messages]
        each += [costs.tree_message * trees, costs.verdict_message * trees]
        loop = sum(each) + costs.update * sequences * reads + costs.wake_up * woken
        meters = {
            "passes": passes, "sequences": sequences, "trees": trees, "reads": messages,
            "rows": sequences * (1 + nodes), "before": engine * (1 - costs.after), "after": engine * costs.after,
            "loop": loop + len(texts) * opened["loop"] / 4, "woken": woken + len(texts) * 3,
            "read": each[0], "read_reply": each[1], "tree": each[2], "tree_reply": each[3],
            "inner": passes * costs.launching(clients, clients * (1 + nodes)),
        }  # fmt: skip
        slow = speeds[len(rows) % len(speeds)]
        meters = {key: value * slow if key in TIMES else value for key, value in meters.items()}
        if len(speeds) > 1:
            meters |= {"probe_loop": 1e-4 * slow * passes, "probe_product": 3e-4 * slow * passes}
        rows.append(
            {"kind": "calibration", "arm": arm, "clients": clients, "rtt_ms": 0, "each": texts, "meters": meters}
        )
    return rows


WANTED = HostCosts(
    overhead=1e-3, overhead_per_sequence=2e-4, overhead_per_tree=5e-5, overhead_per_row=1e-5, launch=2e-3,
    launch_per_sequence=1e-4, launch_per_row=5e-6, after=0.7, opening=1e-3, tree_message=3e-4, verdict_message=2e-4,
    read_message=1e-4, tokens_message=2e-4, update=5e-5, wake_up=1.5e-4,
)  # fmt: skip


def test_costs_follow_from_cpu_times() -> None:
    found = calibrated_costs(calibration(WANTED), launch=True)
    for name in HostCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(WANTED, name), rel=1e-6), name
    assert calibrated_costs(calibration(WANTED)).launching(8, 8) == 0.0


def test_runs_count_in_relation_to_the_speed_of_the_core() -> None:
    rows = calibration(WANTED, speeds=(1.0, 1.5, 0.75))
    slow = [slowness(one, rows) for one in rows]
    assert slow[0] == 1.0, "no passes"
    assert slow[2] / slow[1] == pytest.approx(0.5)
    found = calibrated_costs(rows, launch=True)
    for name in ("overhead", "overhead_per_sequence", "overhead_per_tree", "overhead_per_row", "launch"):
        usual = statistics.fmean(rows[place]["meters"]["probe_loop"] for place in range(1, len(rows))) / 0.01
        assert getattr(found, name) == pytest.approx(usual * getattr(WANTED, name), rel=1e-6), name


def test_calibration_needs_readers_and_devices_one_and_several() -> None:
    rows = calibration(HostCosts(overhead=1e-3, tree_message=1e-4, read_message=1e-4))
    with pytest.raises(ConfigurationError, match=r"equal_latency\.py --calibrate"):
        calibrated_costs([row for row in rows if row["arm"] != "streams" or row["clients"] == 1])
    with pytest.raises(ConfigurationError, match="no calibration of readers and devices"):
        calibrated_costs(rows[1:])
