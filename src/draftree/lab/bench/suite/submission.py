"""Submissions: the result of a suite as one JSON document that others can check and compare. No torch.

The document has the raw counts of every prompt and method, and the scores that follow from them. A check validates it
by the shipped schema and computes the scores again.

The score of a method on a category is the geometric mean over its prompts of decode speed divided by plain decoding's
of the same prompt, first rounds excluded. Its companion that depends on no hardware is tokens per pass: tokens divided
by passes of the target, over all prompts of the category. The suite's value is the geometric mean of the categories'
values, so that a category with many prompts counts as much as one with few. Intervals are 95% percentile intervals of
the bootstrap; prompts are resampled within their category (Efron and Tibshirani, 1993). The turns of one conversation
are prompts that are resampled together, because they are not independent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.files import JsonError, read_json
from draftree.lab.bench.records import Record, Results

ALL = "all"
"""Name of the whole suite in place of a category."""
DRAWS = 2000
LEVEL = 0.95
SEED = 1
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one method did on one prompt.

    Attributes:
        tokens_per_second: decode speed, the first round excluded; None if the text ended in the first round.
        first_turn: id of the prompt that began the conversation; None if this is a first turn.
    """

    category: str
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    tokens_per_second: float | None
    equal: bool
    first_turn: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


@dataclass(frozen=True, slots=True)
class MethodScore:
    """A method on a category, or on the whole suite.

    Attributes:
        score: geometric mean of speed ratios; None if no text was timed.
        acceptance: share of drafted tokens that were written; None if nothing was drafted.
        exact: number of texts that equal plain decoding's.
    """

    method: str
    category: str
    prompts: int
    score: Estimate | None
    tokens_per_pass: Estimate
    acceptance: float | None
    exact: int

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "category": self.category,
            "prompts": self.prompts,
            "score": None if self.score is None else self.score.to_json(),
            "tokens_per_pass": self.tokens_per_pass.to_json(),
            "acceptance": None if self.acceptance is None else round(self.acceptance, 6),
            "exact": self.exact,
        }


def scores_of(methods: Mapping[str, Mapping[str, Entry]]) -> list[MethodScore]:
    """Return the scores of every method (plain decoding included): the suite first, then its categories."""
    plain = methods[PLAIN]
    categories: dict[str, list[str]] = {}
    for prompt, entry in plain.items():
        categories.setdefault(entry.category, []).append(prompt)
    found = []
    for name, entries in methods.items():
        found.append(_score(name, ALL, list(categories.values()), entries, plain))
        found += [_score(name, category, [prompts], entries, plain) for category, prompts in categories.items()]
    return found


def _score(
    name: str,
    category: str,
    strata: Sequence[Sequence[str]],
    entries: Mapping[str, Entry],
    plain: Mapping[str, Entry],
) -> MethodScore:
    each = [entries[prompt] for prompts in strata for prompt in prompts]
    drafted = sum(entry.drafted for entry in each)
    talks = [_conversations(prompts, plain) for prompts in strata]
    timed = [logs for stratum in talks if len(logs := _log_sums(stratum, entries, plain))]
    counts = [
        np.asarray(
            [(sum(entries[p].tokens for p in talk), sum(entries[p].rounds for p in talk)) for talk in stratum], float
        )
        for stratum in talks
    ]
    return MethodScore(
        method=name,
        category=category,
        prompts=len(each),
        score=_estimate(timed, _mean_log) if timed else None,
        tokens_per_pass=_estimate(counts, _log_ratio),
        acceptance=sum(entry.accepted for entry in each) / drafted if drafted else None,
        exact=sum(entry.equal for entry in each),
    )


def _conversations(prompts: Sequence[str], plain: Mapping[str, Entry]) -> list[list[str]]:
    """Return the prompts of each conversation; a prompt without later turns is one by itself."""
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(plain[prompt].first_turn or prompt, []).append(prompt)
    return list(found.values())


def _log_sums(talks: Sequence[Sequence[str]], entries: Mapping[str, Entry], plain: Mapping[str, Entry]) -> np.ndarray:
    """Return the sum of the logarithms of speed ratios and their number, for every conversation with a timed text."""
    found = []
    for talk in talks:
        logs = [
            np.log(fast / slow)
            for prompt in talk
            if (fast := entries[prompt].tokens_per_second) is not None
            and (slow := plain[prompt].tokens_per_second) is not None
        ]
        if logs:
            found.append((sum(logs), len(logs)))
    return np.asarray(found, float)


def _mean_log(values: np.ndarray) -> np.ndarray:
    """Return the mean over prompts of each draw, shape (draws, conversations, 2) to (draws,)."""
    sums = values.sum(axis=1)
    return np.asarray(sums[:, 0] / sums[:, 1])


def _log_ratio(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of tokens by rounds of each draw, shape (draws, conversations, 2) to (draws,)."""
    sums = values.sum(axis=1)
    return np.asarray(np.log(sums[:, 0] / sums[:, 1]))


def _estimate(strata: Sequence[np.ndarray], log_value: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """Return the geometric mean over strata of a value, and its interval by resampling conversations."""
    draws = np.random.default_rng(SEED)
    value = np.mean([log_value(values[None])[0] for values in strata])
    drawn = [log_value(values[draws.integers(0, len(values), (DRAWS, len(values)))]) for values in strata]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)))


FORMAT = "draftree-suite"
VERSION = 1
SCHEMA = Path(__file__).with_name("submission.schema.json")
EXECUTION = ("dtype", "device", "kernels", "quantization", "exact", "threads", "processes")
ARGUMENTS = ("max_tokens", "temperature", "seed", "repeats")
DIGITS = 1e-5
"""Relative difference up to which a score counts as computed from the prompts."""
MOST = 20
"""Violations of the schema that are reported."""
MESSAGE = 200
"""Characters of each, since a message may contain the whole value."""


def facts_of(header: Mapping[str, Any]) -> dict[str, Any]:
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
    jsonschema = import_extra("suite", "the check of a submission needs", error=ConfigurationError)
    violations = islice(jsonschema.Draft202012Validator(read_json(SCHEMA)).iter_errors(submission), MOST)
    problems = [f"{one.json_path}: {one.message[:MESSAGE]}" for one in violations]
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
