"""Number of devices for a rate of requests: memory by closed form, latency and throughput by simulation. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from draftree.core.errors import ConfigurationError, suggestion
from draftree.lab.fleet.curves import DEVICES, OVERHEAD, PassCurve, RooflineCurve
from draftree.lab.fleet.simulation import (
    Fleet,
    FleetResult,
    FleetSettings,
    HostCosts,
    RoundOutcome,
    mean_outcomes,
    poisson,
    quantile,
)

SHAPES: Mapping[float, tuple[int, int, int]] = {
    1.24e9: (16, 2048, 32768),
    3.2e9: (28, 3072, 114688),
    8.0e9: (32, 4096, 131072),
    70.6e9: (80, 8192, 327680),
    405e9: (126, 16384, 516096),
}
"""Layers, width and bytes of keys and values per token (16 bits) of the Llama 3 models, by parameters."""
SCALES = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
LEAST_WEIGHTS = 1e5
"""Fewer are a number without its letter."""
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([MBT]?)", re.ASCII)
RESERVED = 0.1
"""Share of a device's memory for activations, graphs and fragmentation. An assumption."""
MAX_BATCH = 256
USUAL_HOST = HostCosts(overhead=OVERHEAD)
"""Host of a server that was not measured."""
REQUESTS = 400
"""Simulated requests: enough for the 95th percentile."""
MOST_QUEUED = 0.1
"""Share of requests that may wait for a place in a batch; beyond it queues grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a fleet has to serve.

    Attributes:
        rounds: recorded rounds to replay in place of these three; none to use them.
        round_trip: seconds between client and server for each round, if clients draft; None if the server drafts.
        first_token: largest acceptable seconds to the first token, 95th percentile; None for any.
    """

    parameters: float
    bits: float = 16
    rate: float
    prompt: int = 512
    output: int = 256
    tokens_per_round: float = 1.0
    nodes: int = 0
    draft_seconds: float = 0.0
    rounds: Sequence[RoundOutcome] = ()
    round_trip: float | None = None
    first_token: float | None = 2.0
    per_token: float | None = None

    def __post_init__(self) -> None:
        positive = ("parameters", "bits", "rate", "prompt", "output")
        wrong = next((name for name in positive if not 0 < getattr(self, name) < math.inf), None)
        if wrong is not None:
            raise ConfigurationError(f"{wrong} is {getattr(self, wrong)}: it must be above 0")
        if self.nodes < 0 or not 0 <= self.draft_seconds < math.inf:
            raise ConfigurationError(
                f"the drafter has {self.nodes} drafted tokens and takes {self.draft_seconds} s: both must be 0 or more"
            )
        for name, seconds in (("the first token", self.first_token), ("a token", self.per_token)):
            if seconds is not None and not seconds > 0:
                raise ConfigurationError(f"the limit of the time to {name} is {seconds} s: it must be above 0")
        if not 1 <= self.tokens_per_round <= self.nodes + 1:
            raise ConfigurationError(
                f"tokens per round are {self.tokens_per_round} with {self.nodes} drafted tokens: they must be from 1 "
                f"to {self.nodes + 1}, one more than the drafted tokens"
            )
        if self.round_trip is not None and not 0 <= self.round_trip < math.inf:
            raise ConfigurationError(f"the round trip is {self.round_trip} s: it must be 0 or more")

    @property
    def outcomes(self) -> Sequence[RoundOutcome]:
        """Outcomes of rounds: the recorded ones, or even ones with the given means."""
        return self.rounds or mean_outcomes(self.tokens_per_round, self.nodes, self.draft_seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet and what it reaches.

    Attributes:
        tensor_parallel: devices of a replica.
        max_batch: sequences that fit into the memory of a replica.
        reason: why it does not serve the demand; empty if it does.
    """

    device: str
    tensor_parallel: int
    replicas: int
    max_batch: int
    result: FleetResult
    reason: str

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.replicas


def parse_parameters(text: str) -> float:
    size = SIZE.fullmatch(text.strip().upper())
    weights = float(size[1]) * SCALES[size[2]] if size else 0.0
    if weights < LEAST_WEIGHTS:
        raise ConfigurationError(f"model size is '{text}': write a number of weights such as 8B or 135M")
    return weights


def shape_of(parameters: float) -> tuple[int, int, float]:
    """Return layers, width and bytes of keys and values per token, interpolated between the Llama 3 models."""
    known = sorted(SHAPES)
    place = min(max(parameters, known[0]), known[-1])
    low = max(size for size in known if size <= place)
    high = min(size for size in known if size >= place)
    share = 0.0 if low == high else (math.log(place) - math.log(low)) / (math.log(high) - math.log(low))
    layers, hidden, token = ((1 - share) * a + share * b for a, b in zip(SHAPES[low], SHAPES[high], strict=True))
    scale = min(1.0, parameters / known[0])
    return round(layers), round(hidden), token * scale


def plans(demand: Demand, device: str, devices: int, *, host: HostCosts = USUAL_HOST) -> list[Plan]:
    """Return the smallest fleet for each number of devices per replica, of at most `devices` devices.

    A fleet that does not serve the demand has a reason; none is returned if the weights fit into no replica.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"unknown device '{device}': {suggestion(device, list(DEVICES))}")
    if devices < 1:
        raise ConfigurationError(f"devices are {devices}: there must be at least one")
    card = DEVICES[device]
    layers, hidden, token_bytes = shape_of(demand.parameters)
    weights = demand.parameters * demand.bits / 8
    smallest = []
    for width in (1, 2, 4, 8):
        free = (1 - RESERVED) * card.memory * width - weights
        max_batch = min(MAX_BATCH, int(free / (token_bytes * (demand.prompt + demand.output))))
        if width > devices or max_batch < 1:
            continue
        curve = RooflineCurve(card, width, demand.parameters, weights, token_bytes, layers, hidden)
        fleet = partial(simulated, demand, curve, device=device, width=width, max_batch=max_batch, host=host)
        least = 1
        best = fleet(replicas=devices // width)
        while not best.reason and least < best.replicas:  # more replicas never serve less
            middle = (least + best.replicas) // 2
            plan = fleet(replicas=middle)
            if plan.reason:
                least = middle + 1
            else:
                best = plan
        smallest.append(best)
    return smallest


def simulated(
    demand: Demand,
    curve: PassCurve,
    *,
    device: str,
    width: int,
    replicas: int,
    max_batch: int,
    host: HostCosts = USUAL_HOST,
    count: int = REQUESTS,
) -> Plan:
    """Simulate a fleet of replicas of `width` devices, with the same random requests for every fleet.

    Messages of the host count if clients draft, and else the opening of a text.
    """
    settings = FleetSettings(
        replicas=replicas,
        max_batch=max_batch,
        host=host,
        opens=demand.round_trip is None,
        round_trip=demand.round_trip,
        prefill_busy=512,
    )
    prompt, output = demand.prompt, demand.output
    requests = poisson(demand.rate, count=count, prompt=prompt, output=output, outcomes=demand.outcomes)
    result = Fleet(curve, settings).run(requests)
    first, later = quantile(result.first_token, 0.95), quantile(result.per_token, 0.95)
    reason = ""
    if result.queued > MOST_QUEUED:
        reason = f"{result.queued:.0%} of the requests wait for a place"
    elif demand.first_token is not None and first > demand.first_token:
        reason = f"first token after {first:.2f} s"
    elif demand.per_token is not None and later > demand.per_token:
        reason = f"{1000 * later:.0f} ms per token"
    return Plan(device, width, replicas, max_batch, result, reason)
