"""Round trips in costs and plans, and the comparison with streaming."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean

import pytest

from draftree.cli.serve import device_address
from draftree.core.errors import ConfigurationError
from draftree.remote.address import RemoteAddress, is_remote
from draftree.remote.link import Latency
from planned_tables import Table

PASSES = {1: 0.030, 8: 0.031, 64: 0.037}


def latency_of(trip: float, *, queue: float = 0.0) -> Latency:
    found = Latency(dict(PASSES))
    for _ in range(10):
        found.note_round(trip + queue + 0.030, queue=queue, passed=0.030, texts=1, tokens=3)
    return found


def test_the_round_trip_is_what_the_server_did_not_use() -> None:
    found = latency_of(0.050, queue=0.004)
    assert found.trip_seconds == pytest.approx(0.050)
    assert found.queue_seconds == pytest.approx(0.004)
    assert found.costs(8) == {rows: pytest.approx(0.054 + seconds) for rows, seconds in PASSES.items()}


def test_costs_use_a_high_percentile_of_jitter() -> None:
    found = Latency(dict(PASSES))
    for place in range(50):
        found.note_trip(0.02 if place % 2 else 0.10)
    assert found.costs(8)[1] == pytest.approx(0.10 + 0.030)


def planned_depth(trip: float, acceptance: float = 0.8, level: float = 0.003) -> float:
    """Mean depth of the planner's late budgets for a chain, by the costs of a connection."""
    table = Table(latency_of(trip).costs(8), {"draft": (acceptance,)}, {"draft": level}, depth=32)
    table.play(100).play(800)
    return mean(budget.depth for budget in table.budgets[-400:])


def best_depth(trip: float, acceptance: float = 0.8, level: float = 0.003) -> int:
    def speed(depth: int) -> float:
        seconds = trip + 0.030 + 0.0001 * depth + level * depth
        return sum(acceptance**place for place in range(depth + 1)) / seconds

    return max(range(33), key=speed)


def test_the_planner_drafts_deeper_with_the_logarithm_of_the_round_trip() -> None:
    trips = [0.0, 0.05, 0.2, 0.8]
    planned = [planned_depth(trip) for trip in trips]
    assert planned == sorted(planned)
    assert planned[-1] > planned[0] + 3
    # twice the round costs less than twice the depth: the growth is that of the logarithm
    gains = [later - earlier for earlier, later in pairwise(planned[1:])]
    steps = [math.log((0.03 + later) / (0.03 + earlier)) for earlier, later in pairwise(trips[1:])]
    slopes = [gain / step for gain, step in zip(gains, steps, strict=True)]
    assert max(slopes) < 3 * min(slopes)
    for trip, depth in zip(trips, planned, strict=True):
        assert depth == pytest.approx(best_depth(trip), abs=4)


def test_streaming_is_recommended_where_it_is_faster() -> None:
    near, far = latency_of(0.005), latency_of(0.200)
    near.seconds, far.seconds = 30 * 0.015, 30 * 0.080
    assert not near.streaming_is_faster
    assert "streaming" not in near.report()
    assert far.streaming_is_faster
    assert "80.0 ms per token; streaming from the server would take about 30.0 ms" in far.report()
    assert "leave the drafter out" in far.report()


def test_the_report_counts_bytes_per_token() -> None:
    found = latency_of(0.02)
    found.bytes_up, found.bytes_down = 3000, 1500
    assert "10 rounds, 3.00 tokens each" in found.report()
    assert "100 bytes up and 50 down per token" in found.report()
    assert Latency().report() == ""


def test_addresses() -> None:
    assert is_remote("remote:http://host")
    assert not is_remote("stories15m")
    found = RemoteAddress.parse("remote:https://host:81/prefix/v1/?model=a&transport=post&tokenizer=folder")
    assert (found.host, found.port, found.path) == ("host", 81, "/prefix")
    assert (found.model, found.transport, found.tokenizer) == ("a", "post", "folder")
    assert found.url("/v1/verify", websocket=True) == "wss://host:81/prefix/v1/verify"
    assert RemoteAddress.parse("remote:http://host?wait=2.5").wait == 2.5
    assert RemoteAddress.parse("remote:http://[::1]").url("/x") == "http://[::1]:80/x"
    assert RemoteAddress.parse("remote:http://[::1]").is_private
    assert not RemoteAddress.parse("remote:http://10.0.0.1").is_private


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("remote:host:80", "http:// or https://"),
        ("remote:", "http:// or https://"),
        ("remote:http://a:b@host", "DRAFTREE_API_KEY"),
        ("remote:http://host?modl=x", "did you mean 'model'"),
        ("remote:http://host?transport=udp", "transport=udp"),
        ("remote:http://host:99999", "valid URL"),
        ("remote:http://host?wait=0", "seconds above 0"),
        ("remote:http://host?wait=nan", "seconds above 0"),
        ("remote:http://host?wait=soon", "seconds above 0"),
    ],
)
def test_wrong_addresses(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RemoteAddress.parse(name)


@pytest.mark.parametrize(
    ("url", "split", "address"),
    [
        ("http://127.0.0.1:8000", 0, "remote:http://127.0.0.1:8000"),
        ("https://0.0.0.0:8443", 0, "remote:https://HOST:8443"),
        ("http://[::]:8000", 0, "remote:http://HOST:8000"),
        ("http://[::1]:8000", 4, "remote:http://[::1]:8000?split=4&weights=MODEL"),
    ],
)
def test_a_verify_server_tells_devices_an_address_that_they_can_use(url: str, split: int, address: str) -> None:
    assert device_address(url, split) == address
    assert RemoteAddress.parse(address).split == split
