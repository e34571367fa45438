"""The simulated host: the interpreter that messages and the engine share, and its costs from CPU times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.lab.fleet.measured import TIMES, calibrated_costs, slowness
from draftree.lab.fleet.simulation import Fleet, FleetSettings, Host, HostCosts, RoundOutcome, SimulatedRequest


class Flat:
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
    found = Fleet(Flat(), settings).run([SimulatedRequest(0.0, 1, 4, (RoundOutcome(1, 2, 7.0),))])
    step = 1 + 0.5 + 0.25 + 2 * 0.125
    assert found.by_request == (pytest.approx(2 + 2 * (5 + 1 + 7 + 3 + step + 10 + 4)),)


def test_a_text_that_is_read_ends_with_its_last_tokens() -> None:
    host = HostCosts(overhead=1.0, opening=2.0, read_message=0.25, tokens_message=0.5, update=0.125, tree_message=99.0)
    near = Fleet(Flat(), FleetSettings(host=host, opens=True, read_trip=0.0)).run([SimulatedRequest(0.0, 1, 3)])
    # the half second before the first pass is shared with a read, those before the others with three messages
    assert near.by_request == (pytest.approx(2 + 0.75 + 10.5 + 2 * (1 + 10.5) + 0.125 + 0.5),)
    far = Fleet(Flat(), FleetSettings(host=host, opens=True, read_trip=50.0)).run([SimulatedRequest(0.0, 1, 3)])
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
        return Fleet(Flat(), settings).run([SimulatedRequest(0.0, 1, 5) for _ in range(3)]).seconds

    assert seconds(passes_on_host=True) > seconds(passes_on_host=False) + 4 * 3


def test_a_pass_ends_no_earlier_than_its_launch() -> None:
    def seconds(**launch: float) -> float:
        settings = FleetSettings(host=HostCosts(**launch))
        return Fleet(Flat(), settings).run([SimulatedRequest(0.0, 1, 2), SimulatedRequest(0.0, 1, 2)]).seconds

    assert seconds(launch=4.0, launch_per_sequence=2.0, launch_per_row=1.0) == pytest.approx(2 * 10)
    assert seconds(launch=8.0, launch_per_sequence=2.0, launch_per_row=1.0) == pytest.approx(2 * (8 + 2 * 2 + 2 * 1))


def test_the_launch_of_a_pass_delays_messages() -> None:
    def seconds(launch: float) -> float:
        host = HostCosts(launch=launch, tokens_message=1.0, update=1.0)
        settings = FleetSettings(host=host, opens=True, read_trip=0.0)
        return Fleet(Flat(), settings).run([SimulatedRequest(0.0, 1, 1), SimulatedRequest(5.0, 1, 2)]).by_request[0]

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
