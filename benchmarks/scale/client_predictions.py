"""Predictions for clients of a verify server that has one core: what their texts take, from passes and messages."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify_capacity import Text

from draftree.analysis.fleet.clients import client_seconds, streamed_seconds
from draftree.analysis.fleet.curves import PassCurve
from draftree.analysis.fleet.simulation import Fleet, FleetSettings
from draftree.analysis.fleet.workload import PLAIN, SimulatedRequest

MOST_PER_SEQUENCE = 0.01
"""Seconds of the host for a sequence of a step, at most."""
BISECTIONS = 14


@dataclass(frozen=True)
class Case:
    """Clients at the same time.

    Attributes:
        drafts: whether they draft.
        count: how many.
        round_trip: seconds.
    """

    drafts: bool
    count: int
    round_trip: float


@dataclass(frozen=True)
class Found:
    """What a case took.

    Attributes:
        seconds: of each text.
        offsets: seconds at which each text began, by group of clients at the same time.
        texts: of each group.
        cpu: CPU seconds of the server.
        passes: of the server.
        times: the server's seconds of every round of every device.
    """

    seconds: list[float]
    offsets: list[list[float]]
    texts: list[list[Text]]
    cpu: float
    passes: float
    times: list[float]


def simulated(curve: PassCurve, found: Found, case: Case, host: dict[str, float], draft: float) -> list[float]:
    """Seconds of every text, as predicted."""
    settings = FleetSettings(max_batch=64, overhead=host["step"], overhead_per_sequence=host["sequence"])
    if case.drafts:
        settings = replace(settings, round_trip=case.round_trip, client_overhead=host["client"], gathers=True)
    seen = []
    for texts, offsets in zip(found.texts, found.offsets, strict=True):
        requests = [
            SimulatedRequest(offset, 1, len(text.output), text.outcomes(draft) if case.drafts else PLAIN)
            for text, offset in zip(texts, offsets, strict=True)
        ]
        ends = Fleet(curve, settings).run(requests).by_request
        if case.drafts:
            seen += [
                client_seconds(e, case.round_trip, draft_seconds=draft, client_overhead=host["client"]) for e in ends
            ]
        else:
            seen += [streamed_seconds(end, case.round_trip) for end in ends]
    return seen


def calibrated(curve: PassCurve, device: Found, reader: Found, readers: Found, draft: float) -> dict[str, float]:
    """Seconds of the host besides passes: of a step, of each sequence in it, and of a device per round.

    Args:
        curve: cost of passes; prompts are not read again.
        device: texts of one device at a time without a round trip.
        reader: texts of one reader at a time without a round trip.
        readers: texts of several readers without a round trip.
        draft: seconds of a draft.
    """
    rounds = [
        (len(text.prompt) + sum(text.written[:number]), 1 + len(tree))
        for group in device.texts for text in group for number, tree in enumerate(text.trees)
    ]  # fmt: skip
    tokens = [len(text.prompt) + n for group in reader.texts for text in group for n in range(len(text.output))]
    passed = sum(curve.seconds(1, count, place) for place, count in rounds)
    read = sum(curve.seconds(1, 1, place) for place in tokens)
    step = (sum(reader.seconds) - read) / len(tokens)
    client = (sum(device.seconds) - passed) / len(rounds) - step - draft
    host = {"step": max(0.0, step), "sequence": 0.0, "client": 0.0}
    low, high = 0.0, MOST_PER_SEQUENCE
    for _ in range(BISECTIONS):  # so that several readers take as long as measured
        host["sequence"] = (low + high) / 2
        several = simulated(curve, readers, Case(False, len(readers.texts[0]), 0.0), host, draft)
        low, high = (host["sequence"], high) if sum(several) < sum(readers.seconds) else (low, host["sequence"])
    return host | {
        "client": max(0.0, client - host["sequence"]),
        "device_cpu": device.cpu / len(rounds),
        "reader_cpu": reader.cpu / len(tokens),
    }
