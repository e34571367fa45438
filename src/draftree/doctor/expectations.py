"""What a user may expect, in sentences with numbers: from what was found, never from what is usual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftree.doctor.records import DraftReport, MachineReport, ModelReport, PassReport
from draftree.engine.memory import SlotEstimate

CHEAP = 1.5
"""A pass that costs so many passes over one token is still worth trying with drafts that need no model."""


def expectations(
    machine: MachineReport,
    model: ModelReport,
    *,
    draft: DraftReport | None,
    memory: SlotEstimate | None,
    passes: Sequence[PassReport],
    draft_pass_seconds: float | None,
) -> Iterator[str]:
    """One sentence for each thing that matters."""
    yield _on_exactness(model)
    yield _on_kernels(machine, model)
    if model.quantization is not None:
        yield (
            f"Weights of 8 bits make another model of it: its text differs from that of {model.dtype} weights; "
            "'draftree bench perplexity' says how much worse it is"
        )
    if memory is not None and memory.num_slots == 0:
        yield "Not even one slot of this length fits into what is free: lower --length, or free memory"
    if draft is not None and draft.problem is not None:
        yield f"The drafter cannot draft here: {draft.problem}"
    if draft is not None and draft.nodes and not model.supports_trees:
        yield "Only chains can be drafted: trees are not scored exactly by this family"
    if passes:
        yield from _on_speed(passes, draft=draft, draft_pass_seconds=draft_pass_seconds)
    else:
        yield "Add --measure for speeds: what memory allows, what passes take, and what a draft must bring"


def _on_exactness(model: ModelReport) -> str:
    if model.is_exact:
        return (
            "The same seed gives the same text, bit for bit, whatever is drafted and whatever else is in the batch, "
            "under a rule that keeps the text ('coupled')"
        )
    return "A pass over several tokens may round differently from one over one: near-ties can part texts of one seed"


def _on_kernels(machine: MachineReport, model: ModelReport) -> str:
    if model.kernels != "torch":
        return f"Passes run in C with {machine.instructions}"
    if model.why_torch is None:
        return "Passes run through torch, as was asked"
    advice = "; with a C compiler passes take a third of the time" if machine.compiler is None else ""
    return f"Passes run through torch, since {model.why_torch}{advice}"


def _on_speed(
    passes: Sequence[PassReport], *, draft: DraftReport | None, draft_pass_seconds: float | None
) -> Iterator[str]:
    one = passes[0]
    yield (
        f"Plain decoding: about {1 / one.seconds:.0f} tokens/s; no kernel could write more than "
        f"{1 / one.floor_seconds:.0f} here"
    )
    wide = [entry for entry in passes[1:] if entry.seconds <= CHEAP * one.seconds]
    if wide:
        best = wide[-1]
        extra = best.seconds / one.seconds - 1
        yield (
            f"A draft of {best.rows - 1} tokens that costs nothing pays if more than {extra:.2f} of them are kept "
            "a round on average"
        )
    else:
        yield f"A pass over {passes[1].rows} tokens costs {passes[1].seconds / one.seconds:.2f} passes: drafts must hit"
    if draft is None or draft_pass_seconds is None:
        return
    share = draft_pass_seconds / one.seconds
    yield f"A pass of the drafter's model costs {share:.2f} of the target's, for each level of a draft"
    if share >= 1:
        yield "That is no less than the target's own: this drafter cannot pay"
