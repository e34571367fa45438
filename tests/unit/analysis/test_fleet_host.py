"""The simulated host: the interpreter that messages and the engine share, and its costs from CPU times."""

from __future__ import annotations

import pytest

from draftree.analysis.fleet.calibration import calibrated_costs
from draftree.analysis.fleet.host import Host, HostCosts
from draftree.analysis.fleet.simulation import Fleet, FleetSettings
from draftree.analysis.fleet.workload import RoundOutcome, SimulatedRequest
from draftree.core.errors import ConfigurationError


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


def test_messages_are_answered_in_order_and_share_the_time_with_the_engine() -> None:
    host = Host()
    host.add(0.0, 2.0, nothing)
    host.add(0.0, 1.0, nothing)
    host.begin(1.0, 2.0, nothing)
    # one second alone, two shared until the first ends, two shared until both others end
    assert ends_of(host) == [3.0, 5.0, 5.0]


def test_only_a_message_after_a_pause_wakes_the_event_loop() -> None:
    host = Host(wake_up=0.5)
    host.add(0.0, 1.0, nothing)
    host.add(0.0, 1.0, nothing)
    assert ends_of(host) == [1.5, 2.5]
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


def test_messages_delay_passes_of_many_devices() -> None:
    def seconds(count: int, **costs: float) -> float:
        settings = FleetSettings(host=HostCosts(**costs), opens=True, round_trip=0.0, max_batch=64)
        requests = [SimulatedRequest(0.0, 1, 8, (RoundOutcome(1, 2, 1.0),)) for _ in range(count)]
        return Fleet(Flat(), settings).run(requests).seconds

    assert seconds(32) == seconds(1)
    assert seconds(32, tree_message=0.2, verdict_message=0.2) > 1.2 * seconds(1, tree_message=0.2, verdict_message=0.2)


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


def calibration(costs: HostCosts) -> list[dict[str, object]]:
    """Runs whose CPU times follow from costs."""
    rows: list[dict[str, object]] = []
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
        }  # fmt: skip
        rows.append(
            {"kind": "calibration", "arm": arm, "clients": clients, "rtt_ms": 0, "each": texts, "meters": meters}
        )
    return rows


def test_costs_follow_from_cpu_times() -> None:
    wanted = HostCosts(
        overhead=1e-3, overhead_per_sequence=2e-4, overhead_per_tree=5e-5, overhead_per_row=1e-5, after=0.7,
        opening=1e-3, tree_message=3e-4, verdict_message=2e-4, read_message=1e-4, tokens_message=2e-4, update=5e-5,
        wake_up=1.5e-4,
    )  # fmt: skip
    found = calibrated_costs(calibration(wanted))
    for name in HostCosts.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


def test_calibration_needs_readers_and_devices_one_and_several() -> None:
    rows = calibration(HostCosts(overhead=1e-3, tree_message=1e-4, read_message=1e-4))
    with pytest.raises(ConfigurationError, match=r"equal_latency\.py --calibrate"):
        calibrated_costs([row for row in rows if row["arm"] != "streams" or row["clients"] == 1])
    with pytest.raises(ConfigurationError, match="no calibration of readers and devices"):
        calibrated_costs(rows[1:])
