"""`draftree size`: how many devices serve a rate of requests, by a simulation of replicas and their batches."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import typer

from draftree.cli.layout import option
from draftree.cli.render import aligned, say
from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, read_json_lines
from draftree.engine.trace import read_trace
from draftree.lab.fleet.curves import DEVICES
from draftree.lab.fleet.measured import Measurements, calibrated_costs
from draftree.lab.fleet.simulation import PLAIN, HostCosts, RoundOutcome, outcomes_of, quantile
from draftree.lab.fleet.sizing import USUAL_HOST, Demand, Plan, parse_parameters, plans, simulated

DEMAND, FLEET = "Demand", "Fleet"
DEVICE, MAX_BATCH = "h100", 32  # defaults
HEADINGS = (
    *("devices", "replicas", "each", "batch", "tokens/s"),
    *("first token p50/p95", "ms per token p50/p95", "queued", ""),
)


def size(
    *,
    model_size: str = option(..., "Weights of the target, such as 8B.", panel=DEMAND),
    rate: float = option(..., "Requests per second.", panel=DEMAND),
    bits: float = option(16, "Bits of a weight.", panel=DEMAND),
    prompt: int = option(512, "Mean tokens of a prompt.", panel=DEMAND),
    output: int = option(256, "Mean tokens of an answer.", panel=DEMAND),
    tokens_per_round: float = option(1.0, "Tokens per round with the drafter; 1 is plain decoding.", panel=DEMAND),
    nodes: int = option(0, "Drafted tokens per round.", panel=DEMAND),
    draft_ms: float = option(0.0, "Milliseconds of drafting per round.", panel=DEMAND),
    draft: str | None = option(None, "Replay the rounds that --measured has of this drafter.", panel=DEMAND),
    trace: Path | None = option(
        None, "Replay the rounds of a run: 'draftree generate --record FILE --draft SPEC'.", panel=DEMAND
    ),
    round_trip_ms: float | None = option(None, "Clients draft, with this round trip in each round.", panel=DEMAND),
    first_token_ms: float = option(2000.0, "Largest time to the first token (p95).", panel=DEMAND),
    per_token_ms: float | None = option(None, "Largest time per token (p95).", panel=DEMAND),
    device: str | None = option(None, f"One of {', '.join(DEVICES)}; default {DEVICE}.", panel=FLEET),
    devices: int = option(8, "Devices at most.", panel=FLEET),
    measured: Path | None = option(
        None, "Passes and rounds measured by benchmarks/scale/fleet.py, in place of a data sheet.", panel=FLEET
    ),
    host: Path | None = option(
        None, "Costs of steps and messages from benchmarks/scale/equal_latency.py --calibrate.", panel=FLEET
    ),
    max_batch: int | None = option(None, f"Sequences of a batch, with --measured; default {MAX_BATCH}.", panel=FLEET),
    as_json: bool = option(False, "Print JSON.", names="--json"),
) -> None:
    """Estimate the devices that serve a rate of requests, from data sheets or measured passes."""
    rounds = [tokens_per_round != 1.0 or nodes != 0 or draft_ms != 0.0, draft is not None, trace is not None]
    if sum(rounds) > 1:
        raise ConfigurationError(
            "the rounds are given twice: name --draft, or --trace, or --tokens-per-round with --nodes and --draft-ms"
        )
    if draft is not None and measured is None:
        raise ConfigurationError(f"the rounds of '{draft}' are not known: name a file with them by --measured")
    measurements = None if measured is None else Measurements.read(measured)
    demand = Demand(
        parameters=parse_parameters(model_size),
        bits=bits,
        rate=rate,
        prompt=prompt,
        output=output,
        tokens_per_round=tokens_per_round,
        nodes=nodes,
        draft_seconds=draft_ms / 1000,
        rounds=_rounds(draft, trace, measurements),
        round_trip=None if round_trip_ms is None else round_trip_ms / 1000,
        first_token=first_token_ms / 1000,
        per_token=None if per_token_ms is None else per_token_ms / 1000,
    )
    require_used(measurements, device=device, devices=devices, max_batch=max_batch)
    costs = host_costs_of(host, draft, measurements)
    if measurements is None:
        fleets = plans(demand, device or DEVICE, devices, host=costs)
    else:
        fleets = measured_plans(demand, measurements, devices=devices, max_batch=max_batch or MAX_BATCH, host=costs)
    if as_json:
        typer.echo(json.dumps([_numbers(fleet) for fleet in fleets], indent=2))
        return
    if not fleets:
        typer.echo(f"the weights do not fit into {devices} {device or DEVICE} with room for a sequence")
        return
    source = "data sheets and assumed efficiencies" if measured is None else f"passes measured in {measured}"
    count = len(fleets[0].result.first_token)
    say(aligned([HEADINGS, *map(_row, fleets)]))
    say(f"a simulation of {count} requests from {source}; nothing was run\n")


def host_costs_of(path: Path | None, draft: str | None, measured: Measurements | None) -> HostCosts:
    """Return the costs of the host: those of a file, of a measured drafter, or the usual ones."""
    if path is not None:
        try:
            return calibrated_costs(read_json_lines(path))
        except ConfigurationError:
            raise
        except (OSError, *MALFORMED) as error:
            raise ConfigurationError(f"'{path}' cannot be read as calibration runs: {error!r}") from error
    return USUAL_HOST if draft is None or measured is None else measured.draft(draft).host


def require_used(measured: Measurements | None, *, device: str | None, devices: int, max_batch: int | None) -> None:
    """Check the options of the fleet, and that each that is given has an effect."""
    for name, value in (("--devices", devices), ("--max-batch", max_batch)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")
    if measured is None and max_batch is not None:
        raise ConfigurationError(
            f"--max-batch {max_batch} is for measured passes, and the memory of a data sheet limits the batch: add "
            "--measured, or leave it out"
        )
    if measured is not None and device is not None:
        raise ConfigurationError(
            f"--device {device} has a data sheet, and --measured replaces it: leave one of them out"
        )


def measured_plans(
    demand: Demand, measured: Measurements, *, devices: int, max_batch: int, host: HostCosts
) -> list[Plan]:
    """Return fleets of one replica and more of the measured device, up to the first that serves the demand."""
    fleets: list[Plan] = []
    reach = partial(simulated, demand, measured.curve, device="measured", width=1, max_batch=max_batch, host=host)
    for count in range(1, devices + 1):
        fleets.append(reach(replicas=count))
        if not fleets[-1].reason:
            break
    return fleets


def _rounds(draft: str | None, trace: Path | None, measured: Measurements | None) -> tuple[RoundOutcome, ...]:
    """Return the rounds to replay; none for rounds with given means."""
    if draft is not None and measured is not None:
        return PLAIN if draft == "none" else measured.draft(draft).rounds
    if trace is None:
        return ()
    rounds = tuple(outcome for text in outcomes_of(read_trace(trace)).values() for outcome in text)
    if not rounds:
        raise ConfigurationError(f"'{trace}' has no rounds: record a longer text")
    return rounds


def _numbers(plan: Plan) -> dict[str, object]:
    result = plan.result
    return {
        "device": plan.device,
        "devices": plan.devices,
        "replicas": plan.replicas,
        "tensor_parallel": plan.tensor_parallel,
        "max_batch": plan.max_batch,
        "tokens_per_second": round(result.tokens_per_second, 1),
        "first_token_seconds": {str(share): round(quantile(result.first_token, share), 4) for share in (0.5, 0.95)},
        "seconds_per_token": {str(share): round(quantile(result.per_token, share), 5) for share in (0.5, 0.95)},
        "busy": round(result.busy, 3),
        "queued": round(result.queued, 3),
        "serves": not plan.reason,
        "reason": plan.reason,
    }


def _row(plan: Plan) -> tuple[str, ...]:
    result = plan.result
    first = "/".join(f"{quantile(result.first_token, share):.2f}" for share in (0.5, 0.95))
    later = "/".join(f"{1000 * quantile(result.per_token, share):.1f}" for share in (0.5, 0.95))
    return (
        f"{plan.devices} {plan.device}",
        str(plan.replicas),
        str(plan.tensor_parallel),
        str(plan.max_batch),
        f"{result.tokens_per_second:.0f}",
        f"{first} s",
        later,
        f"{result.queued:.0%}",
        f"too little: {plan.reason}" if plan.reason else "serves",
    )
