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

import math
import statistics
from collections.abc import Mapping, Sequence
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


Scores = list[dict[str, Any]]
Prompts = Sequence[Mapping[str, Any]]
"""Prompts of a submission: id, category, first turn if it is a later one, and counts by method."""
Conversation = list[Mapping[str, Any]]
"""Prompts that are resampled together; one without later turns is one by itself."""


def scores_of(prompts: Prompts) -> Scores:
    """Return the scores of every method (plain decoding included): the suite first, then its categories."""
    categories: dict[str, dict[str, Conversation]] = {}
    for prompt in prompts:
        conversations = categories.setdefault(prompt["category"], {})
        conversations.setdefault(prompt.get("first_turn", prompt["id"]), []).append(prompt)
    strata = {category: list(conversations.values()) for category, conversations in categories.items()}
    scores = []
    for method in prompts[0]["methods"]:
        scores.append(_score(method, ALL, list(strata.values())))
        scores += [_score(method, category, [conversations]) for category, conversations in strata.items()]
    return scores


def _score(method: str, category: str, strata: Sequence[Sequence[Conversation]]) -> dict[str, Any]:
    """Return the value of a method on a category.

    The score is the geometric mean of speed ratios, None if no text was timed; `acceptance` the share of drafted tokens
    that were written, None if nothing was drafted; `exact` the number of texts that equal plain decoding's.
    """
    every = [prompt["methods"][method] for talks in strata for talk in talks for prompt in talk]
    drafted = sum(counts["drafted"] for counts in every)
    counted = [
        [[sum(prompt["methods"][method][name] for prompt in talk) for name in ("tokens", "rounds")] for talk in talks]
        for talks in strata
    ]
    timed = [[sums for talk in talks if (sums := _log_speeds(talk, method))[1]] for talks in strata]
    timed = [stratum for stratum in timed if stratum]
    return {
        "method": method,
        "category": category,
        "prompts": len(every),
        "score": _estimate(timed, are_logarithms=True) if timed else None,
        "tokens_per_pass": _estimate(counted, are_logarithms=False),
        "acceptance": round(sum(counts["accepted"] for counts in every) / drafted, 6) if drafted else None,
        "exact": sum(counts["equal"] for counts in every),
    }


def _log_speeds(talk: Conversation, method: str) -> list[float]:
    """Return the sum of the logarithms of the speed ratios of timed texts, and their number."""
    pairs = [[prompt["methods"][name]["tokens_per_second"] for name in (method, PLAIN)] for prompt in talk]
    logarithms = [math.log(fast / slow) for fast, slow in pairs if fast is not None and slow is not None]
    return [sum(logarithms), len(logarithms)]


def _estimate(strata: Sequence[Sequence[Sequence[float]]], *, are_logarithms: bool) -> dict[str, float]:
    """Return the geometric mean over strata of a ratio of sums, and its interval by resampling conversations.

    Each conversation has a numerator and a denominator. With `are_logarithms` their ratio is a logarithm already.
    """
    draws = np.random.default_rng(SEED)

    def value(conversations: np.ndarray) -> np.ndarray:
        """Return the logarithm of the ratio of each draw, shape (draws, conversations, 2) to (draws,)."""
        sums = conversations.sum(axis=1)
        ratios = sums[:, 0] / sums[:, 1]
        return np.asarray(ratios if are_logarithms else np.log(ratios))

    arrays = [np.asarray(stratum, float) for stratum in strata]
    mean = np.mean([value(array[None])[0] for array in arrays])
    drawn = [value(array[draws.integers(0, len(array), (DRAWS, len(array)))]) for array in arrays]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {name: round(float(np.exp(log)), 6) for name, log in (("value", mean), ("low", low), ("high", high))}


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
    repeats: dict[str, dict[str, list[Record]]] = {}
    for record in results.records:
        repeats.setdefault(record.task, {}).setdefault(record.method, []).append(record)
    prompts = []
    for task, methods in repeats.items():
        record = methods[PLAIN][0]
        turn = {} if record.first_turn is None else {"first_turn": record.first_turn}
        counts = {method["name"]: counts_of(methods[method["name"]]) for method in results.header["methods"]}
        prompts.append({"id": task, "category": record.category, **turn, "methods": counts})
    return facts_of(results.header) | {"scores": scores_of(prompts), "prompts": prompts}


def counts_of(repeats: Sequence[Record]) -> dict[str, Any]:
    """Return what a method did on a prompt: counts of the first repeat, the median decode speed of all.

    The first round of a text is not timed; the speed is None if the text ended in it.
    """
    stats = repeats[0].stats
    timed = [r.stats["tokens_per_second"] for r in repeats if r.stats["decode_seconds"] > 0]
    return {
        "tokens": stats["completion_tokens"],
        "rounds": stats["rounds"],
        "drafted": stats["draft_tokens"],
        "accepted": stats["accepted_tokens"],
        "tokens_per_second": round(statistics.median(timed), 4) if timed else None,
        "equal": all(record.equal_to_plain for record in repeats),
    }


def read_submission(path: Path) -> dict[str, Any]:
    try:
        submission = read_json(path)
    except (OSError, JsonError) as error:
        raise ConfigurationError(f"submission '{path}' cannot be read: {error}") from error
    if problems := check(submission):
        raise ConfigurationError(f"submission '{path}' is not valid: {'; '.join(problems)}")
    return submission


def check(submission: Any) -> list[str]:
    """Return what is wrong with a submission: by the schema, and by computing its scores again."""
    if isinstance(submission, dict) and submission.get("format") == FORMAT and submission.get("version") != VERSION:
        return [f"it has version {submission.get('version')}, and this Draftree reads version {VERSION}"]
    jsonschema = import_extra("suite", "the check of a submission needs", error=ConfigurationError)
    violations = islice(jsonschema.Draft202012Validator(read_json(SCHEMA)).iter_errors(submission), MOST)
    if problems := [f"{violation.json_path}: {violation.message[:MESSAGE]}" for violation in violations]:
        return problems
    names = [method["name"] for method in submission["methods"]]
    if names[0] != PLAIN or len(set(names)) < len(names):
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
    stated = {(score["method"], score["category"]): score for score in submission["scores"]}
    problems = []
    for score in scores_of(submission["prompts"]):
        place = f"{score['method']} on {score['category']}"
        claimed = stated.pop((score["method"], score["category"]), None)
        if claimed is None:
            problems.append(f"scores: {place} is missing")
        else:
            problems += [
                f"scores: {name} of {place} does not follow from the prompts"
                for name, value in score.items()
                if not same(claimed[name], value)
            ]
    return problems + [f"scores: {method} on {category} has no prompts" for method, category in stated]


def same(value: Any, other: Any) -> bool:
    """Return whether two values are equal within rounding."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, int | float) and isinstance(other, int | float):
        return abs(value - other) <= DIGITS * max(1.0, abs(other))
    return bool(value == other)
