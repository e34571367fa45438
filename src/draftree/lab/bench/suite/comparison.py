"""Comparison of submissions: tables, the reasons against comparing them, and the regression check. No torch.

Tokens per pass depend on no clock with a planner that reads none (`@fixed`), so their tolerance covers only other
rounding on another machine. Scores are ratios of times: their tolerance is wide, and a score counts as worse only if
its whole interval is below the bound.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.lab.bench.suite.submission import ALL
from draftree.lab.bench.tables import NOTHING, Grid

SHARED_ARGUMENTS = ("max_tokens", "temperature", "seed")
"""Arguments on which scores depend; repeats only make them more precise."""
COLUMNS = (
    "submission",
    "machine",
    "model",
    "dtype",
    "kernels",
    "threads",
    "draftree",
    "method",
    "category",
    "prompts",
    "score",
    "score_low",
    "score_high",
    "tokens_per_pass",
    "tokens_per_pass_low",
    "tokens_per_pass_high",
    "acceptance",
    "exact",
)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return why the scores of two submissions are not comparable; empty if they are."""
    found = []
    if one["prompts_sha256"] != other["prompts_sha256"]:
        each = [f"{set_names(side)} (sha256 {side['prompts_sha256'][:8]})" for side in (one, other)]
        found.append(f"other prompts: {' and '.join(each)}")
    for name in SHARED_ARGUMENTS:
        first = one["arguments"][name]
        second = other["arguments"][name]
        if first != second:
            found.append(f"{name} is {first} and {second}")
    return found


def require_comparable(submissions: Mapping[str, Mapping[str, Any]]) -> None:
    (first, base), *others = submissions.items()
    for name, submission in others:
        reasons = differences(base, submission)
        if reasons:
            raise ConfigurationError(f"'{first}' and '{name}' are not comparable: {'; '.join(reasons)}")


def set_names(submission: Mapping[str, Any]) -> str:
    return ", ".join(one["name"] for one in submission["sets"])


def machine_of(submission: Mapping[str, Any]) -> str:
    return str(submission["machine"].get("gpu") or submission["machine"]["cpu"])


def suite_grid(submissions: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return the value of the whole suite for every submission and method, highest score of a submission first."""
    rows: list[tuple[str, ...]] = []
    for name, submission in submissions.items():
        whole = [one for one in submission["scores"] if one["category"] == ALL]
        whole.sort(key=lambda one: -1.0 if one["score"] is None else -one["score"]["value"])
        execution = submission["execution"]
        count = len(submission["prompts"])
        threads = execution["threads"]
        where = f"{machine_of(submission)}, {threads} thread{'' if threads == 1 else 's'}"
        what = f"{submission['model']['name']}, {execution['dtype']}"
        rows += [
            (
                name,
                what,
                where,
                one["method"],
                shown(one["score"]),
                shown(one["tokens_per_pass"]),
                NOTHING if one["acceptance"] is None else f"{one['acceptance']:.2f}",
                f"{one['exact']}/{count}",
            )
            for one in whole
        ]
    headings = ("submission", "model", "machine", "method", "score", "tokens/pass", "acceptance", "text as plain")
    return Grid("Suite: speed over plain decoding, geometric mean of categories, 95% interval", headings, tuple(rows))


def score_grid(submissions: Mapping[str, Mapping[str, Any]], value: str = "score") -> Grid:
    """Return one value ("score" or "tokens_per_pass") of every category, by submission and method."""
    first = next(iter(submissions.values()))
    categories = dict.fromkeys(one["category"] for one in first["scores"])
    columns = [
        (name if len(submissions) > 1 else "", method["name"], submission)
        for name, submission in submissions.items()
        for method in submission["methods"]
    ]
    cells = {
        (name, one["method"], one["category"]): one[value]
        for name, _, submission in columns
        for one in submission["scores"]
    }
    rows = [
        (category, *(shown(cells[name, method, category]) for name, method, _ in columns)) for category in categories
    ]
    headings = ("category", *(f"{name}: {method}" if name else method for name, method, _ in columns))
    title = {"score": "Speed over plain decoding by category", "tokens_per_pass": "Tokens per pass by category"}[value]
    return Grid(title, headings, tuple(rows))


def shown(estimate: Mapping[str, float] | None) -> str:
    """Return a value with its interval; without it if it is of one prompt per category, or of plain decoding."""
    if estimate is None:
        return NOTHING
    if estimate["low"] == estimate["high"]:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"


def provenance(name: str, submission: Mapping[str, Any]) -> str:
    versions, arguments = submission["versions"], submission["arguments"]
    parts = [
        f"{submission['model']['name']} (sha256 {submission['model']['sha256'][:8]})",
        machine_of(submission),
        f"draftree {versions['draftree']}, torch {versions['torch']}",
        f"{len(submission['prompts'])} prompts of {set_names(submission)}, at most {arguments['max_tokens']} tokens, "
        f"temperature {arguments['temperature']:g}, seed {arguments['seed']}, {arguments['repeats']} repeats",
        submission["date"],
    ]
    return f"{name}: {'; '.join([*parts, *submission['notes']])}."


def comparison(submissions: Mapping[str, Mapping[str, Any]]) -> str:
    require_comparable(submissions)
    grids = [suite_grid(submissions), score_grid(submissions), score_grid(submissions, "tokens_per_pass")]
    lines = [provenance(name, submission) for name, submission in submissions.items()]
    return "\n\n".join([*(grid.markdown() for grid in grids), *lines]) + "\n"


def to_csv(submissions: Mapping[str, Mapping[str, Any]]) -> str:
    require_comparable(submissions)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, submission in submissions.items():
        about = {
            "submission": name,
            "machine": machine_of(submission),
            "model": submission["model"]["name"],
            "draftree": submission["versions"]["draftree"],
        } | {key: submission["execution"][key] for key in ("dtype", "kernels", "threads")}
        for one in submission["scores"]:
            values = {key: one[key] for key in ("method", "category", "prompts", "acceptance", "exact")}
            for key in ("score", "tokens_per_pass"):
                values |= columns_of(key, one[key])
            writer.writerow(about | values)
    return stream.getvalue()


def columns_of(name: str, estimate: Mapping[str, float] | None) -> dict[str, float | None]:
    value = estimate or {}
    return {name: value.get("value"), f"{name}_low": value.get("low"), f"{name}_high": value.get("high")}


def names_of(paths: Sequence[Any]) -> list[str]:
    """Return a short name for each file, unique."""
    names = [path.stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two submissions are named '{name}': rename a file, its name is its row's name")
    return names


SAME_EXECUTION = ("dtype", "quantization")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative losses up to which tokens per pass, and the speed over plain decoding, are no regression."""

    tokens: float = 0.02
    score: float = 0.25

    def __post_init__(self) -> None:
        for name in ("tokens", "score"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(
                    f"the tolerance of {name} is {getattr(self, name)}: it must be at least 0 and below 1"
                )


@dataclass(frozen=True, slots=True)
class Regression:
    """A value that is worse than the stored one."""

    method: str
    category: str
    value: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.method} on {self.category}: {self.value} {self.now:.4g}, baseline {self.before:.4g}"


def require_same_run(submission: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Refuse a baseline of another model, of other prompts or arguments, or without the methods."""
    reasons = differences(submission, baseline)
    if submission["model"]["sha256"] != baseline["model"]["sha256"]:
        reasons.append(f"the models are {submission['model']['name']} and {baseline['model']['name']}, other weights")
    for name in SAME_EXECUTION:
        one = submission["execution"][name]
        other = baseline["execution"][name]
        if one != other:
            reasons.append(f"{name} is {one} and {other}")
    own = {method["name"] for method in submission["methods"]}
    missing = [method["name"] for method in baseline["methods"] if method["name"] not in own]
    if missing:
        reasons.append(f"methods of the baseline were not run: {', '.join(missing)}")
    if reasons:
        raise ConfigurationError(f"the baseline is of another run: {'; '.join(reasons)}")


def regressions(
    submission: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: Tolerance | None = None
) -> list[Regression]:
    """Return what is worse than the baseline of the same run; methods that the baseline lacks are ignored."""
    require_same_run(submission, baseline)
    allowed = tolerance or Tolerance()
    now = {(one["method"], one["category"]): one for one in submission["scores"]}
    found: list[Regression] = []
    for old in baseline["scores"]:
        place = (old["method"], old["category"])
        new = now[place]
        before = old["tokens_per_pass"]["value"]
        after = new["tokens_per_pass"]["value"]
        if after < (1 - allowed.tokens) * before - 1e-9:
            found.append(Regression(*place, "tokens per pass", before, after))
        if old["score"] is not None and new["score"] is not None:
            bound = (1 - allowed.score) * old["score"]["value"]
            if new["score"]["high"] < bound:
                found.append(Regression(*place, "speed over plain", old["score"]["value"], new["score"]["value"]))
        if new["exact"] < old["exact"]:
            found.append(Regression(*place, "texts as plain", old["exact"], new["exact"]))
    return found
