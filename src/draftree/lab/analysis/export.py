"""Traces as Chrome trace events, which Perfetto and chrome://tracing show, and as a summary. No torch.

Tracks: the rounds, their phases, the drafters of a merged draft, and for each sequence its rounds with the text that
was written. Counters: rows of the pass, and tokens written per round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftree.engine.trace import Trace, TracedRound, acceptance_length, starts_of

PROCESS = 1
ROUNDS, PHASES, PARTS, FIRST_SEQUENCE = 1, 2, 3, 10
"""Thread ids of the tracks."""
ORDER = ("plan", "draft", "score", "verify", "commit")
"""The phases in the order of a round."""
MICROSECONDS = 1e6


def chrome_events(trace: Trace) -> dict[str, Any]:
    sequences = {
        name: FIRST_SEQUENCE + number
        for number, name in enumerate(
            dict.fromkeys(step.sequence for traced_round in trace.rounds for step in traced_round.steps)
        )
    }
    events = list(_names(trace, sequences))
    for number, (traced_round, start) in enumerate(zip(trace.rounds, starts_of(trace), strict=True)):
        events += _round(trace, traced_round, number, start * MICROSECONDS, sequences)
    about = {"model": trace.header.model, "draft": trace.header.draft, "plan": trace.header.plan}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | {"verify": trace.header.verify}}


def _names(trace: Trace, sequences: dict[str, int]) -> Iterator[dict[str, Any]]:
    tracks = {ROUNDS: "rounds", PHASES: "phases", PARTS: "drafters"} | {
        track: f"sequence {name}" for name, track in sequences.items()
    }
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": f"draftree {trace.header.model}"}}
    for track, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": track, "args": {"sort_index": track}}


def _round(
    trace: Trace, traced_round: TracedRound, number: int, start: float, sequences: dict[str, int]
) -> Iterator[dict[str, Any]]:
    total = traced_round.seconds["total"] * MICROSECONDS
    written = sum(step.num_written for step in traced_round.steps)
    yield _slice(f"round {number}", ROUNDS, start, total, {"rows": traced_round.num_rows, "tokens": written})
    at = start
    for phase in ORDER:
        lasting = traced_round.seconds.get(phase, 0.0) * MICROSECONDS
        yield _slice(phase, PHASES, at, lasting, {"round": number})
        if phase == "draft":
            yield from _parts(trace, traced_round, at)
        at += lasting
    for step in traced_round.steps:
        text = "".join(trace.text_of(token) for token in step.tokens[: step.num_written])
        facts = {"round": number, "drafted": len(step.tree), "accepted": len(step.path), "written": step.num_written}
        yield _slice(text or "(failed)", sequences[step.sequence], start, total, facts | {"prefix": step.prefix})
    counts = {"rows": traced_round.num_rows, "tokens": written}
    for name, value in counts.items():
        yield {"ph": "C", "name": name, "pid": PROCESS, "ts": round(start, 3), "args": {name: value}}


def _parts(trace: Trace, traced_round: TracedRound, start: float) -> Iterator[dict[str, Any]]:
    for part, seconds in zip(trace.header.parts, traced_round.part_seconds, strict=False):
        if seconds:
            yield _slice(part.name, PARTS, start, seconds * MICROSECONDS, {})
            start += seconds * MICROSECONDS


def _slice(name: str, track: int, start: float, lasting: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(start, 3), "dur": round(lasting, 3)}
    return {"ph": "X", "name": name, "cat": "draftree", "pid": PROCESS, "tid": track, **times, "args": facts}


DIGITS = 4


def summary(trace: Trace) -> dict[str, Any]:
    header = trace.header
    steps = [step for traced_round in trace.rounds for step in traced_round.steps]
    names = trace.rounds[0].seconds if trace.rounds else {}
    drafted, accepted = sum(len(step.scored) for step in steps), sum(len(step.path) for step in steps)
    return {
        "model": header.model,
        "draft": header.draft,
        "verify": header.verify,
        "plan": header.plan,
        **({"about": dict(header.about)} if header.about else {}),
        "sequences": len({step.sequence for step in steps}),
        "rounds": len(trace.rounds),
        "tokens": sum(step.num_written for step in steps),
        "tokens_per_round": round(acceptance_length(trace.rounds), DIGITS),
        "scored_nodes": drafted,
        "accepted_nodes": accepted,
        "seconds": {
            name: round(sum(traced_round.seconds[name] for traced_round in trace.rounds), DIGITS) for name in names
        },
        "has_texts": bool(trace.texts),
    }
