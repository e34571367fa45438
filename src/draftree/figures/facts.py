"""Lines below the titles of figures: what was measured, on what. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftree.analysis.trace import Trace
from draftree.figures.intervals import Estimate, ratio
from draftree.figures.replaying import Cut, Replayed, Text, replay

__all__ = ["decode_rounds", "measured_on", "per_text_seconds", "tokens_per_pass", "worst_text"]


def measured_on(trace: Trace, *, what: str) -> str:
    """Return a sentence: what was measured, on which model, drafter, texts and processor."""
    header, about = trace.header, trace.header.about
    steps = [step for one in trace.rounds for step in one.steps]
    texts, tokens = len({step.sequence for step in steps}), sum(step.num_written for step in steps)
    facts = [f"{what}: {header.model}", f"drafter {header.draft}", f"{texts} texts, {tokens} tokens"]
    if "temperature" in about:
        facts.append(f"temperature {about['temperature']:g}")
    facts += [str(about[name]) for name in ("dtype", "cpu") if about.get(name)]
    if about.get("note"):
        facts.append(str(about["note"]))
    if about.get("threads"):
        facts.append(f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}")
    return ", ".join(facts)


def tokens_per_pass(runs: Sequence[Replayed]) -> Estimate:
    """Return tokens per round over texts, bonus included."""
    return ratio([run.tokens for run in runs], [run.rounds for run in runs])


def worst_text(texts: Sequence[Text], cut: Cut, name: str, *, text_of: Callable[[int], str]) -> str:
    """Return a sentence on the text with the fewest tokens per pass under a cut."""
    runs = [replay(text, cut) for text in texts]
    least = min(range(len(runs)), key=lambda number: runs[number].tokens / runs[number].rounds)
    words = " ".join("".join(text_of(token) for token in texts[least].tokens[:24]).split())[:48]
    value = runs[least].tokens / runs[least].rounds
    return f"{name} writes only {value:.2f} tokens per pass in text {least + 1} (“{words}…”)"


def decode_rounds(trace: Trace) -> list[tuple[str, dict[str, float], int]]:
    """Return sequence, seconds by phase and written tokens of every round of one sequence that does not prefill.

    Rounds of several sequences are divided evenly among them.
    """
    found, met = [], set[str]()
    for one in trace.rounds:
        names = {step.sequence for step in one.steps}
        if names <= met:
            share = {phase: seconds / len(one.steps) for phase, seconds in one.seconds.items()}
            found += [(step.sequence, share, step.num_written) for step in one.steps]
        met |= names
    return found


def per_text_seconds(trace: Trace) -> tuple[list[float], list[float]]:
    """Return decode seconds and tokens of every text, first rounds excluded."""
    seconds: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for name, phases, written in decode_rounds(trace):
        seconds[name] = seconds.get(name, 0.0) + phases["total"]
        tokens[name] = tokens.get(name, 0.0) + written
    return list(seconds.values()), list(tokens.values())
