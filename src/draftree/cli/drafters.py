"""`draftree drafters`: the drafters that exist for a model, those on this machine, and why one does not fit."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from draftree.cli.options import AS_JSON, MODEL
from draftree.cli.render import say, short_bytes
from draftree.core.errors import ConfigurationError, harmless

if TYPE_CHECKING:
    from draftree.loading.auto_draft import TunedDraft
    from draftree.loading.known_drafters import FoundDrafter, Target

WAYS = {
    "id": "by its id",
    "base model": "by its base model",
    "name": "by its name",
    "shape": "by its shape",
    "folder": "by where it is",
    "tokenizer": "by its tokenizer",
}
"""How a drafter was found, in words."""


def drafters(model: str = MODEL, as_json: bool = AS_JSON) -> None:
    """List the drafters for a model: published ones and those on this machine, in the order of --draft auto.

    Nothing is loaded, and the network is not used.
    """
    from draftree.loading.auto_draft import all_tuned
    from draftree.loading.known_drafters import describe_target, find_drafters, wrong_lists

    target = describe_target(model)
    found = find_drafters(target)
    tuned = [result for result in all_tuned() if result.model in (model, *target.names)]
    if as_json:
        say(json.dumps(values_of(target, found, tuned), indent=2) + "\n")
    else:
        lines = [f"{harmless(model)}: {summary(target, found)}", *lines_of(found, tuned), *advice(found)]
        say("\n".join(lines) + "\n")
    if wrong := wrong_lists():
        raise ConfigurationError("; ".join(wrong))


def values_of(target: Target, found: list[FoundDrafter], tuned: list[TunedDraft]) -> dict[str, Any]:
    """Return the content of --json."""
    return {
        "model": target.name,
        "names": dict(target.names),
        "place": None if target.place is None else str(target.place),
        "shape": dataclasses.asdict(target.shape),
        "measured": [dataclasses.asdict(result) for result in tuned],
        "drafters": [
            dataclasses.asdict(each.known)
            | {"found": each.matched, "place": None if each.place is None else str(each.place), "where": each.where}
            | {"fits": each.reason is None, "reason": each.reason}
            for each in found
        ],
    }


def summary(target: Target, found: list[FoundDrafter]) -> str:
    where = "it is not on this machine" if target.place is None else f"in {harmless(str(target.place))}"
    here = sum(each.place is not None for each in found)
    count = f"{len(found)} drafter{'' if len(found) == 1 else 's'}, {here} here" if found else "no drafter is known"
    return f"{count}; {where}"


def lines_of(found: list[FoundDrafter], tuned: list[TunedDraft]) -> list[str]:
    lines = [f"measured here: {result.draft}, {result.gain}, {result.date}" for result in tuned]
    for each in found:
        known = each.known
        size = "" if known.bytes is None else short_bytes(known.bytes)
        kind = "a smaller model with its tokenizer" if known.kind == "model" else known.kind
        facts = [kind, size, known.licence or "", each.where or ("" if known.id else "with the model") or "not here"]
        lines += ["", each.label, f"  {', '.join(filter(None, facts))}"]
        fits = "fits" if each.place is not None else "of a kind that is read"
        lines.append(f"  {fits}" if each.reason is None else f"  does not fit: {each.reason}")
        if known.speedup is not None:
            lines.append(f"  {known.speedup:.2f} times plain decoding: {known.measured}")
        if known.tokens_per_round is not None:
            drafted = "" if known.drafted is None else f", {known.drafted} drafted"
            lines.append(f"  {known.tokens_per_round:.2f} tokens per round{drafted}: {known.accepted}")
        source = f"{known.source or 'no source'}{'' if known.verified else ', not verified'}"
        lines.append(f"  found {WAYS[each.matched]}; {'; '.join(filter(None, (source, known.note)))}")
    return [harmless(line) for line in lines]


def advice(found: list[FoundDrafter]) -> list[str]:
    """Return what --download-drafter would fetch."""
    fitting = [each for each in found if each.reason is None]
    absent = next((each for each in fitting if each.place is None and each.known.id), None)
    if absent is None:
        return []
    is_needed = all(each.place is None or each.known.kind == "model" for each in fitting)
    when = "--download-drafter would fetch" if is_needed else "a drafter is here; without it --download-drafter fetches"
    return ["", f"{when} {absent.description}"]
