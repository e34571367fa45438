"""`draftree size`: how many devices serve a rate of requests, by a simulation of replicas and their batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.layout import option
from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, read_json_lines
from draftree.engine.trace import read_trace
from draftree.lab.fleet.curves import DEVICES
from draftree.lab.fleet.measured import Measurements, calibrated_costs
from draftree.lab.fleet.simulation import PLAIN, HostCosts, RoundOutcome, outcomes_of, quantile
from draftree.lab.fleet.sizing import USUAL_HOST, Demand, Plan, parse_parameters, plans, simulated

DEMAND, FLEET = "Demand", "Fleet"
DEVICE, MAX_BATCH = "h100", 32
"""Defaults."""
HEADINGS = (
    "devices",
    "replicas",
    "each",
    "batch",
    "tokens/s",
    "first token p50/p95",
    "ms per token p50/p95",
    "queued",
    "",
)


def size(
    *,
    model_size: Annotated[str, option("Weights of the target, such as 8B.", panel=DEMAND)],
    rate: Annotated[float, option("Requests per second.", panel=DEMAND)],
    bits: Annotated[float, option("Bits of a weight.", panel=DEMAND)] = 16,
    prompt: Annotated[int, option("Mean tokens of a prompt.", panel=DEMAND)] = 512,
    output: Annotated[int, option("Mean tokens of an answer.", panel=DEMAND)] = 256,
    tokens_per_round: Annotated[
        float, option("Tokens per round with the drafter; 1 is plain decoding.", panel=DEMAND)
    ] = 1.0,
    nodes: Annotated[int, option("Drafted tokens per round.", panel=DEMAND)] = 0,
    draft_ms: Annotated[float, option("Milliseconds of drafting per round.", panel=DEMAND)] = 0.0,
    draft: Annotated[str | None, option("Replay the rounds that --measured has of this drafter.", panel=DEMAND)] = None,
    trace: Annotated[
        Path | None, option("Replay the rounds of a run: 'draftree generate --record FILE --draft SPEC'.", panel=DEMAND)
    ] = None,
    round_trip_ms: Annotated[
        float | None, option("Clients draft, with this round trip in each round.", panel=DEMAND)
    ] = None,
    first_token_ms: Annotated[float, option("Largest time to the first token (p95).", panel=DEMAND)] = 2000.0,
    per_token_ms: Annotated[float | None, option("Largest time per token (p95).", panel=DEMAND)] = None,
    device: Annotated[str | None, option(f"One of {', '.join(DEVICES)}; default {DEVICE}.", panel=FLEET)] = None,
    devices: Annotated[int, option("Devices at most.", panel=FLEET)] = 8,
    measured: Annotated[
        Path | None,
        option("Passes and rounds measured by benchmarks/scale/fleet.py, in place of a data sheet.", panel=FLEET),
    ] = None,
    host: Annotated[
        Path | None,
        option("Costs of steps and messages from benchmarks/scale/equal_latency.py --calibrate.", panel=FLEET),
    ] = None,
    max_batch: Annotated[
        int | None, option(f"Sequences of a batch, with --measured; default {MAX_BATCH}.", panel=FLEET)
    ] = None,
    as_json: Annotated[bool, option("Print JSON.", names="--json")] = False,
) -> None:
    """Estimate the devices that serve a rate of requests, from data sheets or measured passes."""
    rounds = [tokens_per_round != 1.0 or nodes != 0 or draft_ms != 0.0, draft is not None, trace is not None]
    if sum(rounds) > 1:
        raise ConfigurationError(
            "the rounds are given twice: name --draft, or --trace, or --tokens-per-round with --nodes and --draft-ms"
        )
    if draft is not None and measured is None:
        raise ConfigurationError(f"the rounds of '{draft}' are not known: name a file with them by --measured")
    found_file = None if measured is None else Measurements.read(measured)
    demand = Demand(
        parameters=parse_parameters(model_size),
        bits=bits,
        rate=rate,
        prompt=prompt,
        output=output,
        tokens_per_round=tokens_per_round,
        nodes=nodes,
        draft_seconds=draft_ms / 1000,
        rounds=_rounds(draft, trace, found_file),
        round_trip=None if round_trip_ms is None else round_trip_ms / 1000,
        first_token=first_token_ms / 1000,
        per_token=None if per_token_ms is None else per_token_ms / 1000,
    )
    require_used(found_file, device=device, devices=devices, max_batch=max_batch)
    costs = host_costs_of(host, draft, found_file)
    if found_file is None:
        found = plans(demand, device or DEVICE, devices, host=costs)
    else:
        found = measured_plans(demand, found_file, devices=devices, max_batch=max_batch or MAX_BATCH, host=costs)
    if as_json:
        typer.echo(json.dumps([_numbers(one) for one in found], indent=2))
        return
    if not found:
        typer.echo(f"the weights do not fit into {devices} {device or DEVICE} with room for a sequence")
        return
    rows = [HEADINGS, *(_row(one) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    source = "data sheets and assumed efficiencies" if measured is None else f"passes measured in {measured}"
    typer.echo(f"a simulation of {len(found[0].result.first_token)} requests from {source}; nothing was run")


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
    found: list[Plan] = []
    for count in range(1, devices + 1):
        found.append(
            simulated(
                demand, measured.curve, device="measured", width=1, replicas=count, max_batch=max_batch, host=host
            )
        )
        if not found[-1].reason:
            break
    return found


def _rounds(draft: str | None, trace: Path | None, measured: Measurements | None) -> tuple[RoundOutcome, ...]:
    """Return the rounds to replay; none for rounds with given means."""
    if draft is not None and measured is not None:
        return PLAIN if draft == "none" else measured.draft(draft).rounds
    if trace is None:
        return ()
    found = tuple(one for text in outcomes_of(read_trace(trace)).values() for one in text)
    if not found:
        raise ConfigurationError(f"'{trace}' has no rounds: record a longer text")
    return found


def _numbers(one: Plan) -> dict[str, object]:
    result = one.result
    return {
        "device": one.device,
        "devices": one.devices,
        "replicas": one.replicas,
        "tensor_parallel": one.tensor_parallel,
        "max_batch": one.max_batch,
        "tokens_per_second": round(result.tokens_per_second, 1),
        "first_token_seconds": {str(share): round(quantile(result.first_token, share), 4) for share in (0.5, 0.95)},
        "seconds_per_token": {str(share): round(quantile(result.per_token, share), 5) for share in (0.5, 0.95)},
        "busy": round(result.busy, 3),
        "queued": round(result.queued, 3),
        "serves": not one.reason,
        "reason": one.reason,
    }


def _row(one: Plan) -> tuple[str, ...]:
    result = one.result
    first = "/".join(f"{quantile(result.first_token, share):.2f}" for share in (0.5, 0.95))
    later = "/".join(f"{1000 * quantile(result.per_token, share):.1f}" for share in (0.5, 0.95))
    return (
        f"{one.devices} {one.device}",
        str(one.replicas),
        str(one.tensor_parallel),
        str(one.max_batch),
        f"{result.tokens_per_second:.0f}",
        f"{first} s",
        later,
        f"{result.queued:.0%}",
        f"too little: {one.reason}" if one.reason else "serves",
    )
