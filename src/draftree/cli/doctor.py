"""`draftree doctor`: report of how a model runs on this machine and why; with measurements on request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from draftree.cli.layout import OUTPUT, argument, option, refuse
from draftree.cli.options import (
    AS_JSON,
    EXECUTION_OPTIONS,
    Setup,
    complete_draft,
    complete_model,
    takes_setup,
)
from draftree.cli.render import resolve_with_bar, waiting, wide_console
from draftree.core.host import ranges
from draftree.options import EXECUTION, SPECULATION

if TYPE_CHECKING:
    from draftree.engine.memory import SlotEstimate
    from draftree.lab.doctor import Diagnosis, DraftReport, MachineReport, ModelReport
    from draftree.weights.gguf_file import BlockShare


WIDTH = 120
DEFAULTS = (None, False, "auto", "coupled")  # values of options that were not given
OF_MODELS = (
    "draft",
    "verify",
    "dtype",
    "kernels",
    "exact",
    "quantization",
    "offload",
    "kv_dtype",
    "affinity",
    "trust_remote_code",
)
"""Options that need a model."""
Lines = Iterator[tuple[str, str]]


@takes_setup(
    *EXECUTION_OPTIONS,
    "verify",
    "exact",
    model=argument(
        "",
        "A name of 'draftree models', a folder, a GGUF file or a hub id; without one, the machine alone.",
        "MODEL",
        complete=complete_model,
        show_default=False,
    ),
    draft=option(None, "A drafter, as for 'draftree generate'.", "SPEC", SPECULATION, complete=complete_draft),
)
def doctor(
    *,
    setup: Setup,
    length: int | None = option(
        None, "Tokens per slot, prompt and text; 2048 or the context length if not given.", "N", EXECUTION
    ),
    measure: bool = option(
        False,
        "Measure memory bandwidth, matrix products and passes, and compare them.",
        panel=OUTPUT,
        names="--measure",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Report how a model runs on this machine, and why."""
    if not setup.model:
        chosen = {name: getattr(setup, name) for name in OF_MODELS}
        refuse_given(chosen | {"length": length, "measure": measure}, "it needs a model: name one")
    elif setup.draft is None:
        refuse_given({"verify": setup.verify}, "it needs a drafter: name one with --draft")
    from draftree.core.host import apply_threads
    from draftree.lab.doctor import DoctorSettings, examine, examine_machine

    settings = DoctorSettings(setup, length=length, measure=measure)
    settings.methods()
    apply_threads(setup.threads, setup.affinity)
    machine = examine_machine(setup.device)
    if not as_json:
        show("Machine", machine_lines(machine))
    if not setup.model:
        if as_json:
            typer.echo(json.dumps({"machine": dataclasses.asdict(machine)}, indent=2))
        return
    with waiting("measuring" if measure else "looking"):
        diagnosis = examine(settings, machine, fetch=resolve_with_bar)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(diagnosis), indent=2))
    else:
        show_diagnosis(diagnosis)


def refuse_given(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        refuse(value not in DEFAULTS, f"--{name.replace('_', '-')}", reason)


def show_diagnosis(diagnosis: Diagnosis) -> None:
    show(f"Model {diagnosis.model.name}", model_lines(diagnosis.model))
    if diagnosis.draft is not None:
        show(f"Drafter {diagnosis.draft.spec}", draft_lines(diagnosis.draft))
    show("Memory", memory_lines(diagnosis, diagnosis.memory))
    if diagnosis.speeds is not None:
        show("Speed", speed_lines(diagnosis))
        show_passes(diagnosis)
    typer.echo("What to expect")
    for sentence in diagnosis.expectations:
        typer.echo(f"  * {sentence}.")


def show(title: str, lines: Lines) -> None:
    typer.echo(title)
    for label, text in lines:
        typer.echo(f"  {label:<14} {text}")
    typer.echo()


def machine_lines(machine: MachineReport) -> Lines:
    facts = machine.facts
    versions = machine.versions
    yield "versions", ", ".join(f"{name} {value}" for name, value in versions.items() if name in SHOWN and value)
    memory = facts["memory_gib"]
    yield "processor", f"{facts['cpu']}, {facts['usable_cores']} of {facts['cores']} cores, {machine.threads} threads"
    yield "threads", thread_line(machine)
    yield "instructions", " ".join(facts["cpu_flags"]) or "none of the relevant ones"
    yield "bfloat16", "native instructions" if machine.native_bfloat16 else "not native: float32 is faster"
    if machine.caches:
        yield "caches", ", ".join(size(count) for count in machine.caches)
    free = "" if machine.free_bytes is None else f"{size(machine.free_bytes)} free"
    yield "memory", ", ".join(part for part in ("" if memory is None else f"{memory} GiB", free) if part)
    yield "devices", ", ".join(machine.devices)
    yield "compiler", machine.compiler or "none"
    yield "native kernels", machine.instructions or f"not here: {machine.why_not_native}"


def thread_line(machine: MachineReport) -> str:
    """Return the choice of threads, its reasons, and the processors of `--affinity auto`."""
    processors = machine.processors
    choice = machine.choice
    where = f"{processors.num_cores} cores in {processors.num_nodes} memory node{'s' * (processors.num_nodes > 1)}"
    reasons = f" ({'; '.join(choice.reasons)})" if choice.reasons else ""
    in_use = "" if machine.threads == choice.threads else f", {machine.threads} in use"
    automatic = ranges(choice.processors) or "none"
    return f"{choice.threads} chosen for {where}{reasons}{in_use}; --affinity auto: {automatic}"


SHOWN = ("draftree", "python", "torch", "transformers", "numpy", "tokenizers")


def model_lines(model: ModelReport) -> Lines:
    kind = model.dtype if model.quantization is None else f"{model.quantization} weights, {model.dtype} keys and values"
    yield "kind", f"{model.family}, {kind}, on {model.device}"
    if model.blocks:
        yield "blocks", block_line(model.blocks)
    yield "tokens", f"vocabulary {model.vocab_size:,}, context {model.max_length:,}"
    yield "kernels", model.kernels if model.fallback_reason is None else f"{model.kernels}: {model.fallback_reason}"
    yield "trees", "scored in one pass" if model.supports_trees else "not scored correctly: chains only"
    yield "exact", "bit-identical alone and in every tree and batch" if model.is_exact else "up to rounding"
    if model.tolerance is not None and model.chain_error is not None:
        tree = "" if model.tree_error is None else f", in a tree {model.tree_error:.1e}"
        off = f"logits deviate by {model.chain_error:.1e} of their spread in a chain{tree}"
        yield "self-check", f"{off}; {model.tolerance:.2g} is accepted"


def block_line(blocks: Sequence[BlockShare]) -> str:
    """Return bits per weight, and for each kind of blocks its share of the weights and its matrices."""
    weights, num_bytes = sum(block.num_weights for block in blocks), sum(block.num_bytes for block in blocks)
    kinds = [
        f"{block.kind} {100 * block.num_weights / weights:.1f}% ({block.num_matrices} "
        f"{'matrix' if block.num_matrices == 1 else 'matrices'})"
        for block in blocks
    ]
    return f"{8 * num_bytes / weights:.2f} bits per weight: {', '.join(kinds)}"


def draft_lines(draft: DraftReport) -> Lines:
    yield "tree", f"{draft.nodes} tokens at most"
    for report in draft.models:
        yield (
            "model",
            f"{report.model.name}: {report.model.dtype}, {report.model.kernels}, context {report.model.max_length:,}",
        )
        yield "weights", size(report.model.footprint.weights)
        if report.model.blocks:
            yield "blocks", block_line(report.model.blocks)
        if report.vocabulary is None:
            yield "vocabulary", "cannot be compared: a tokenizer is missing"
        elif report.vocabulary.same:
            yield "vocabulary", f"the same tokens ({report.vocabulary.common_size:,} in common)"
        else:
            first = ", ".join(str(difference) for difference in report.vocabulary.first_differences)
            yield "vocabulary", f"another one; first differences: {first}"
    if draft.note:
        yield "translation", draft.note
    if draft.problem is not None:
        yield "problem", draft.problem


def memory_lines(diagnosis: Diagnosis, memory: SlotEstimate) -> Lines:
    target, length = diagnosis.model.footprint, diagnosis.length
    yield "weights", f"{size(target.weights)}, loaded"
    yield "keys, values", f"{size(target.token)} per token, {size(target.token * length)} for {length:,}"
    if target.state:
        yield "states", f"{size(target.state)} per slot, {size(target.node)} per drafted token"
    nodes = 0 if diagnosis.draft is None else diagnosis.draft.nodes
    yield "logits", f"{size(target.logits)} per row, {1 + nodes} rows per round and slot"
    yield "a slot", f"{size(memory.slot_bytes)} for {length:,} tokens, including its drafters"
    if memory.graph_bytes:
        yield "graphs", f"{size(memory.graph_bytes)} at most for outputs of captured graphs"
    free = "an unknown amount of free memory" if memory.free_bytes is None else f"{size(memory.free_bytes)} free"
    yield "fits", f"{memory.num_slots:,} slots into {size(memory.sequence_bytes)} available to sequences, of {free}"


def speed_lines(diagnosis: Diagnosis) -> Lines:
    assert diagnosis.speeds is not None
    speeds = diagnosis.speeds
    buffer = f"a buffer of {size(speeds.buffer_bytes)}, {speeds.threads} threads, by {speeds.how}"
    yield "reading", f"{speeds.read_bytes_per_second / 1e9:.1f} GB/s ({buffer})"
    for kind, peak in speeds.operations_per_second.items():
        yield kind, "cannot be measured" if peak is None else f"{peak / 1e9:,.0f} billion operations/s"
    if diagnosis.draft_pass_seconds is not None:
        yield "drafter", f"{1e3 * diagnosis.draft_pass_seconds:.2f} ms for a pass over one token"


def show_passes(diagnosis: Diagnosis) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("  tokens in a pass", "ms", "floor ms", "x floor", "x one token"):
        table.add_column(heading, justify="right")
    plain_seconds = diagnosis.passes[0].seconds
    for entry in diagnosis.passes:
        cells: Sequence[float] = (1e3 * entry.seconds, 1e3 * entry.floor_seconds, entry.seconds / entry.floor_seconds)
        table.add_row(str(entry.rows), *(f"{cell:.2f}" for cell in cells), f"{entry.seconds / plain_seconds:.2f}")
    wide_console(WIDTH).print(table)
    typer.echo()


def size(num_bytes: int) -> str:
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
