"""Predictions of the fleet simulator for servers that are not here: clients, replicas, round trips, tensor parallel.

    python benchmarks/scale/fleet_predictions.py --measured FILE --clients FILE --host FILE \\
        --out predictions.jsonl --plot FILE

`--measured` is a file of `fleet.py`, whose recorded rounds and costs are this machine's. `--clients` is one of
`verify_capacity.py`, whose recorded rounds are replayed on data sheets. `--host` is one of `equal_latency.py`: its
calibration gives the server's time for messages and steps in the part about networks. Parts:

    machine   one replica of this machine by the rate of requests, for every measured drafter
    fleet     an 8B model on H100: devices that thousands of clients need, each with a request a minute
    tensor    a 70B model on H100: time per token and tokens per second by devices of a replica
    network   an 8B model on one H100 that verifies: time per token by clients at the same time and round trip
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftree.core.svg import save_svg
from draftree.lab.fleet.curves import DEVICES, OVERHEAD, PassCurve, RooflineCurve
from draftree.lab.fleet.measured import Measurements, calibrated_costs
from draftree.lab.fleet.simulation import (
    PLAIN,
    Fleet,
    FleetSettings,
    HostCosts,
    RoundOutcome,
    SimulatedRequest,
    quantile,
)
from draftree.lab.fleet.sizing import Demand, Plan, shape_of, simulated

Rounds = Sequence[RoundOutcome]
MACHINE = {"prompt": 60, "output": 64, "parameters": 135e6}
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)
CLIENTS = (500, 1000, 2000, 5000)
SECONDS_PER_REQUEST = 60.0
CHAT = {"prompt": 512, "output": 128}
ARRIVALS = 20.0
"""Seconds in which requests arrive."""
MOST = 128
LIMIT = 0.03
"""Seconds per token of the fleets, 95th percentile."""
SIZE, LARGE = 8e9, 70.6e9
CROWDS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
TRIPS = (0.0, 0.02, 0.05, 0.1, 0.2)
TOKENS = 96


def roofline(parameters: float, device: str, width: int) -> RooflineCurve:
    """A 16-bit model on devices of a data sheet."""
    layers, hidden, token = shape_of(parameters)
    return RooflineCurve(DEVICES[device], width, parameters, 2 * parameters, token, layers, hidden)


def on_this_machine(measured: Measurements) -> Iterator[dict[str, Any]]:
    """One replica by rate."""
    for draft, own in measured.drafts.items():
        for rate in RATES:
            demand = Demand(rate=rate, rounds=PLAIN if draft == "none" else own.rounds, **MACHINE)
            plan = simulated(demand, measured.curve, device="", width=1, replicas=1, max_batch=16, host=own.host)
            yield {"part": "machine", "draft": draft, "rate": rate} | numbers(plan.result)


def numbers(result: Any) -> dict[str, float]:
    """Quantiles and sums of a result."""
    return {
        "tokens_per_second": round(result.tokens_per_second, 1),
        "first_token_p95": round(quantile(result.first_token, 0.95), 3),
        "ms_per_token_p50": round(1000 * quantile(result.per_token, 0.5), 3),
        "ms_per_token_p95": round(1000 * quantile(result.per_token, 0.95), 3),
        "busy": round(result.busy, 3),
    }


def of_fleets(arms: dict[str, Rounds]) -> Iterator[dict[str, Any]]:
    """Devices for thousands of clients."""
    for clients in CLIENTS:
        for name, rounds in arms.items():
            demand = Demand(parameters=SIZE, rate=clients / SECONDS_PER_REQUEST, rounds=rounds, per_token=LIMIT, **CHAT)
            plan = smallest(demand)
            yield {
                "part": "fleet",
                "clients": clients,
                "draft": name,
                "devices": plan.devices,
                "serves": not plan.reason,
            } | numbers(plan.result)


def smallest(demand: Demand) -> Plan:
    """The smallest number of devices, one for each replica, that serves a demand; the largest tried if none does."""
    curve, count = roofline(SIZE, "h100", 1), 1

    def of(replicas: int) -> Plan:
        return simulated(
            demand,
            curve,
            device="h100",
            width=1,
            replicas=replicas,
            max_batch=256,
            count=max(400, round(ARRIVALS * demand.rate)),
        )

    while (plan := of(count)).reason and count < MOST:
        count *= 2
    best, least = plan, count // 2 + 1
    while not best.reason and least < best.replicas:
        middle = (least + best.replicas) // 2
        tried = of(middle)
        best, least = (best, middle + 1) if tried.reason else (tried, least)
    return best


def of_tensor_parallel(arms: dict[str, Rounds]) -> Iterator[dict[str, Any]]:
    """Time per token by devices of a replica, with the share of the all-reduces in a pass."""
    for width in (4, 8):
        curve = roofline(LARGE, "h100", width)
        for name, rounds in arms.items():
            for crowd in (1, 16, 64, 256):
                requests = crowd_of(crowd, rounds)
                settings = FleetSettings(max_batch=crowd, host=HostCosts(overhead=OVERHEAD), prefill_busy=512)
                result = Fleet(curve, settings).run(requests)
                rows = crowd * (1 + round(statistics.fmean(one.nodes for one in rounds)))
                yield {
                    "part": "tensor",
                    "tensor_parallel": width,
                    "draft": name,
                    "clients": crowd,
                    "messages_share": round(curve._messages(rows) / curve.seconds(crowd, rows, 512), 3),
                } | numbers(result)


def crowd_of(count: int, rounds: Rounds) -> list[SimulatedRequest]:
    """So many clients that write at the same time; they begin within a second."""
    choose, found = random.Random(count), []
    for _ in range(count):
        start = choose.randrange(len(rounds))
        turned = (*rounds[start:], *rounds[:start])
        found.append(SimulatedRequest(choose.random(), 64, TOKENS, turned))
    return found


def over_networks(arms: dict[str, Rounds], host: HostCosts) -> Iterator[dict[str, Any]]:
    """Time per token of a text, as the client sees it, by clients and round trip."""
    curve = roofline(SIZE, "h100", 1)
    for crowd in CROWDS:
        yield {"part": "network", "arm": "streams", "clients": crowd, "rtt_ms": None} | {
            "ms_per_token": seen(curve, crowd, PLAIN, None, host)
        }
        for name, rounds in arms.items():
            if name != "none":
                for trip in TRIPS:
                    yield {"part": "network", "arm": name, "clients": crowd, "rtt_ms": 1000 * trip} | {
                        "ms_per_token": seen(curve, crowd, rounds, trip, host)
                    }


def seen(curve: PassCurve, crowd: int, rounds: Rounds, trip: float | None, host: HostCosts) -> float:
    """Mean milliseconds per token of whole texts, of devices that draft, or with None that read without a network."""
    settings = FleetSettings(
        max_batch=4096,
        host=host,
        opens=True,
        round_trip=trip,
        read_trip=0.0 if trip is None else None,
        prefill_busy=512,
    )
    ends = Fleet(curve, settings).run(crowd_of(crowd, rounds)).by_request
    return round(1000 * (statistics.fmean(ends) + (trip or 0.0)) / TOKENS, 3)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Time per token by clients, one panel for each drafter."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    arms = list(dict.fromkeys(row["arm"] for row in rows if row["arm"] != "streams"))
    figure, panels = plt.subplots(1, len(arms), figsize=(4.6 * len(arms), 3.4), sharey=True, squeeze=False)
    for panel, arm in zip(panels[0], arms, strict=True):
        for name, trip in [("streams", None), *((arm, 1000 * trip) for trip in TRIPS)]:
            points = [
                (row["clients"], row["ms_per_token"]) for row in rows if (row["arm"], row["rtt_ms"]) == (name, trip)
            ]
            label = "server alone, plain" if trip is None else f"drafts, {trip:.0f} ms"
            style = {"color": "black", "linestyle": "--"} if trip is None else {}
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, **style)
        panel.set(xscale="log", yscale="log", xlabel="clients at the same time", title=arm)
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("milliseconds per token")
    figure.tight_layout()
    save_svg(figure, file)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> None:
    """Predict and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--host", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    recorded = read_rows(given.clients)
    device: dict[str, Rounds] = {"none": PLAIN}
    server: dict[str, Rounds] = {"none": PLAIN}
    for row in recorded:
        if row.get("kind") == "texts":
            name, draft = row["draft"].partition(":")[0], row["draft_ms"] / 1000
            rounds = [tuple(one) for text in row["rounds"] for one in text]
            device[name] = [RoundOutcome(nodes, tokens, draft) for nodes, tokens in rounds]
            if name == "suffix":  # the server drafts, too
                server[name] = [RoundOutcome(nodes, tokens, 0.0) for nodes, tokens in rounds]
    rows = [
        *on_this_machine(Measurements.read(given.measured)),
        *of_fleets(server),
        *of_tensor_parallel(server),
        *over_networks(device, calibrated_costs(read_rows(given.host))),
    ]
    with given.out.open("w", encoding="utf-8") as out:
        for row in recorded:
            if row.get("kind") == "texts":  # so that this file can be read as --clients, too
                out.write(json.dumps(row) + "\n")
        for row in rows:
            out.write(json.dumps({"kind": "prediction", **row}) + "\n")
    if given.plot is not None:
        draw([row for row in rows if row["part"] == "network"], given.plot)


if __name__ == "__main__":
    main()
