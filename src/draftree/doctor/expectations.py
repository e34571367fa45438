"""Expectations in sentences with numbers, derived from this diagnosis only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftree.doctor.records import DraftReport, MachineReport, ModelReport, PassReport
from draftree.engine.memory import SlotEstimate

CHEAP = 1.5
"""Highest cost, in passes over one token, of a pass that is still worth trying with model-free drafts."""


def expectations(
    machine: MachineReport,
    model: ModelReport,
    *,
    draft: DraftReport | None,
    memory: SlotEstimate | None,
    passes: Sequence[PassReport],
    draft_pass_seconds: float | None,
) -> Iterator[str]:
    """Yield one sentence for each relevant fact."""
    yield _on_exactness(model)
    yield _on_kernels(machine, model)
    if model.quantization is not None:
        yield (
            f"Weights of kind {model.quantization} make a different model: its text differs from that of {model.dtype} "
            "weights; 'draftree bench perplexity' measures the loss"
        )
    if memory is not None and memory.num_slots == 0:
        yield "No slot of this length fits into the free memory: lower --length, or free memory"
    if draft is not None and draft.problem is not None:
        yield f"The drafter cannot draft here: {draft.problem}"
    if draft is not None and draft.nodes and not model.supports_trees:
        yield "Only chains can be drafted: trees are not scored exactly by this family"
    if passes:
        yield from _on_speed(passes, draft=draft, draft_pass_seconds=draft_pass_seconds)
    else:
        yield "Add --measure for speeds: memory bandwidth, pass times, and the acceptance that a draft needs"


def _on_exactness(model: ModelReport) -> str:
    if model.is_exact:
        return (
            "The same seed gives bit-identical text for every draft and every batch, "
            "under a verifier that preserves the text ('coupled')"
        )
    return "A pass over several tokens may round differently from one over one: near-ties can change the text of a seed"


def _on_kernels(machine: MachineReport, model: ModelReport) -> str:
    if model.kernels != "torch":
        return f"Passes run in C with {machine.instructions}"
    if model.why_torch is None:
        return "Passes run through torch, as requested"
    advice = "; with a C compiler passes take a third of the time" if machine.compiler is None else ""
    return f"Passes run through torch, because {model.why_torch}{advice}"


def _on_speed(
    passes: Sequence[PassReport], *, draft: DraftReport | None, draft_pass_seconds: float | None
) -> Iterator[str]:
    one = passes[0]
    yield (
        f"Plain decoding: about {1 / one.seconds:.0f} tokens/s; no kernel can exceed {1 / one.floor_seconds:.0f} here"
    )
    wide = [entry for entry in passes[1:] if entry.seconds <= CHEAP * one.seconds]
    if wide:
        best = wide[-1]
        extra = best.seconds / one.seconds - 1
        yield (
            f"A draft of {best.rows - 1} tokens that costs nothing pays if on average more than {extra:.2f} of them "
            "are accepted per round"
        )
    else:
        factor = passes[1].seconds / one.seconds
        yield f"A pass over {passes[1].rows} tokens costs {factor:.2f} passes: drafts need high acceptance"
    if draft is None or draft_pass_seconds is None:
        return
    share = draft_pass_seconds / one.seconds
    yield f"A pass of the drafter's model costs {share:.2f} target passes, for each level of a draft"
    if share >= 1:
        yield "That is at least a target pass: this drafter cannot pay"
