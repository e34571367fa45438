"""Submissions: the result of a suite as one JSON document that others can check and compare. No torch.

The document has the raw counts of every prompt and method, and the scores that follow from them. A check validates it
by the shipped schema and computes the scores again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftree.bench.records import Record, Results
from draftree.bench.suite.schema import violations
from draftree.bench.suite.scores import Entry, scores_of
from draftree.core.errors import ConfigurationError
from draftree.core.json_files import JsonError, read_json

__all__ = ["FORMAT", "SCHEMA", "VERSION", "check", "entries_of", "facts_of", "read_submission", "submission_of"]

FORMAT = "draftree-suite"
VERSION = 1
SCHEMA = Path(__file__).with_name("submission.schema.json")
EXECUTION = ("dtype", "device", "kernels", "quantization", "exact", "threads", "processes")
ARGUMENTS = ("max_tokens", "temperature", "seed", "repeats")
DIGITS = 1e-5
"""Relative difference up to which a score counts as computed from the prompts."""


def facts_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything of a submission that is known before the run.

    Args:
        header: of `draftree bench suite`, with the facts of its sets in `suite`.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: header[name] for name in ("date", "machine", "versions", "model", "draft_models")},
        "execution": {name: header[name] for name in EXECUTION},
        "arguments": {
            **{name: header[name] for name in ARGUMENTS},
            "limit": header["prompts"]["limit"],
            "categories": header["suite"]["categories"],
        },
        "sets": header["suite"]["sets"],
        "prompts_sha256": header["suite"]["prompts_sha256"],
        "methods": [{key: method.get(key) for key in ("name", "verify", "plan")} for method in header["methods"]],
        "notes": header["notes"],
    }


def submission_of(results: Results) -> dict[str, Any]:
    """Return the submission of a complete run."""
    names = [method["name"] for method in results.header["methods"]]
    entries = {name: entries_by_prompt(results.records, name) for name in names}
    prompts = [
        {
            "id": prompt,
            "category": entry.category,
            **({} if entry.first_turn is None else {"first_turn": entry.first_turn}),
            "methods": {name: counts_of(own[prompt]) for name, own in entries.items()},
        }
        for prompt, entry in entries["plain"].items()
    ]
    scores = [one.to_json() for one in scores_of(entries)]
    return facts_of(results.header) | {"scores": scores, "prompts": prompts}


def entries_by_prompt(records: Sequence[Record], method: str) -> dict[str, Entry]:
    """Return what a method did on each prompt: counts of the first repeat, the median speed of all."""
    repeats: dict[str, list[Record]] = {}
    for record in records:
        if record.method == method:
            repeats.setdefault(record.task, []).append(record)
    return {task: entry_of(each) for task, each in repeats.items()}


def entry_of(repeats: Sequence[Record]) -> Entry:
    """Return one prompt's entry from its repeats."""
    first = repeats[0]
    timed = [r.stats["tokens_per_second"] for r in repeats if r.stats["decode_seconds"] > 0]
    return Entry(
        category=first.category,
        tokens=first.stats["completion_tokens"],
        rounds=first.stats["rounds"],
        drafted=first.stats["draft_tokens"],
        accepted=first.stats["accepted_tokens"],
        tokens_per_second=statistics.median(timed) if timed else None,
        equal=all(record.equal_to_plain for record in repeats),
        first_turn=first.first_turn,
    )


def counts_of(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry without its category and its conversation."""
    speed = entry.tokens_per_second
    return {
        "tokens": entry.tokens,
        "rounds": entry.rounds,
        "drafted": entry.drafted,
        "accepted": entry.accepted,
        "tokens_per_second": None if speed is None else round(speed, 4),
        "equal": entry.equal,
    }


def entries_of(submission: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    """Return what every method did on every prompt."""
    return {
        method["name"]: {
            prompt["id"]: Entry(
                category=prompt["category"],
                first_turn=prompt.get("first_turn"),
                **prompt["methods"][method["name"]],
            )
            for prompt in submission["prompts"]
        }
        for method in submission["methods"]
    }


def read_submission(path: Path) -> dict[str, Any]:
    """Read and check a submission.

    Raises:
        ConfigurationError: it cannot be read, or does not pass the check; the message has every reason.
    """
    try:
        submission = read_json(path)
    except (OSError, JsonError) as error:
        raise ConfigurationError(f"submission '{path}' cannot be read: {error}") from error
    problems = check(submission)
    if problems:
        raise ConfigurationError(f"submission '{path}' is not valid: {'; '.join(problems)}")
    return submission


def check(submission: Any) -> list[str]:
    """Return what is wrong with a submission: by the schema, and by computing its scores again."""
    if isinstance(submission, dict) and submission.get("format") == FORMAT and submission.get("version") != VERSION:
        return [f"it has version {submission.get('version')}, and this Draftree reads version {VERSION}"]
    problems = violations(submission, read_json(SCHEMA))
    if problems:
        return problems
    names = [method["name"] for method in submission["methods"]]
    if names[0] != "plain" or len(set(names)) < len(names):
        return ["methods: plain comes first, and every name is given once"]
    ids = [prompt["id"] for prompt in submission["prompts"]]
    if len(set(ids)) < len(ids):
        return ["prompts: every id is given once"]
    for prompt in submission["prompts"]:
        if set(prompt["methods"]) != set(names):
            return [f"prompts: '{prompt['id']}' does not have exactly the methods of 'methods'"]
        if prompt.get("first_turn", prompt["id"]) not in ids:
            return [f"prompts: '{prompt['id']}' follows '{prompt['first_turn']}', which is not in the document"]
    return score_problems(submission)


def score_problems(submission: Mapping[str, Any]) -> list[str]:
    """Return the scores that do not follow from the prompts."""
    stated = {(one["method"], one["category"]): one for one in submission["scores"]}
    found = [one.to_json() for one in scores_of(entries_of(submission))]
    problems = []
    for one in found:
        own = stated.pop((one["method"], one["category"]), None)
        if own is None:
            problems.append(f"scores: {one['method']} on {one['category']} is missing")
        else:
            problems += [
                f"scores: {name} of {one['method']} on {one['category']} does not follow from the prompts"
                for name, value in one.items()
                if not same(own[name], value)
            ]
    return problems + [f"scores: {method} on {category} has no prompts" for method, category in stated]


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal within rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= DIGITS * max(1.0, abs(other))
    return bool(one == other)
