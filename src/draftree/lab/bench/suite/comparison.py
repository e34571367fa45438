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


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return why the scores of two submissions are not comparable; empty if they are."""
    reasons = []
    if base["prompts_sha256"] != other["prompts_sha256"]:
        sides = [f"{set_names(side)} (sha256 {side['prompts_sha256'][:8]})" for side in (base, other)]
        reasons.append(f"other prompts: {' and '.join(sides)}")
    return reasons + _unequal(base["arguments"], other["arguments"], SHARED_ARGUMENTS)


def _unequal(base: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{name} is {base[name]} and {other[name]}" for name in names if base[name] != other[name]]


def require_comparable(submissions: Mapping[str, Mapping[str, Any]]) -> None:
    (first, base), *others = submissions.items()
    for name, submission in others:
        if reasons := differences(base, submission):
            raise ConfigurationError(f"'{first}' and '{name}' are not comparable: {'; '.join(reasons)}")


def set_names(submission: Mapping[str, Any]) -> str:
    return ", ".join(prompt_set["name"] for prompt_set in submission["sets"])


def machine_of(submission: Mapping[str, Any]) -> str:
    return str(submission["machine"].get("gpu") or submission["machine"]["cpu"])


def suite_grid(submissions: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return the value of the whole suite for every submission and method, highest score of a submission first."""
    rows: list[tuple[str, ...]] = []
    for name, submission in submissions.items():
        scores = [score for score in submission["scores"] if score["category"] == ALL]
        scores.sort(key=lambda score: -1.0 if score["score"] is None else -score["score"]["value"])
        execution = submission["execution"]
        threads = execution["threads"]
        rows += [
            (
                name,
                f"{submission['model']['name']}, {execution['dtype']}",
                f"{machine_of(submission)}, {threads} thread{'' if threads == 1 else 's'}",
                score["method"],
                shown(score["score"]),
                shown(score["tokens_per_pass"]),
                NOTHING if score["acceptance"] is None else f"{score['acceptance']:.2f}",
                f"{score['exact']}/{len(submission['prompts'])}",
            )
            for score in scores
        ]
    headings = ("submission", "model", "machine", "method", "score", "tokens/pass", "acceptance", "text as plain")
    return Grid("Suite: speed over plain decoding, geometric mean of categories, 95% interval", headings, tuple(rows))


TITLES = {"score": "Speed over plain decoding by category", "tokens_per_pass": "Tokens per pass by category"}


def score_grid(submissions: Mapping[str, Mapping[str, Any]], value: str = "score") -> Grid:
    """Return one value ("score" or "tokens_per_pass") of every category, by submission and method."""
    columns: dict[str, dict[str, str]] = {}
    for name, submission in submissions.items():
        for score in submission["scores"]:
            heading = f"{name}: {score['method']}" if len(submissions) > 1 else score["method"]
            columns.setdefault(heading, {})[score["category"]] = shown(score[value])
    first = next(iter(columns.values()))
    rows = tuple((category, *(column[category] for column in columns.values())) for category in first)
    return Grid(TITLES[value], ("category", *columns), rows)


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
    rows = []
    for name, submission in submissions.items():
        about = {
            "submission": name,
            "machine": machine_of(submission),
            "model": submission["model"]["name"],
            **{key: submission["execution"][key] for key in ("dtype", "kernels", "threads")},
            "draftree": submission["versions"]["draftree"],
        }
        for score in submission["scores"]:
            row = about | {key: score[key] for key in ("method", "category", "prompts")}
            for key in ("score", "tokens_per_pass"):
                estimate = score[key] or {}
                for column, part in ((key, "value"), (f"{key}_low", "low"), (f"{key}_high", "high")):
                    row[column] = estimate.get(part)
            rows.append(row | {"acceptance": score["acceptance"], "exact": score["exact"]})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


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
    reasons += _unequal(submission["execution"], baseline["execution"], SAME_EXECUTION)
    measured = {method["name"] for method in submission["methods"]}
    if missing := [method["name"] for method in baseline["methods"] if method["name"] not in measured]:
        reasons.append(f"methods of the baseline were not run: {', '.join(missing)}")
    if reasons:
        raise ConfigurationError(f"the baseline is of another run: {'; '.join(reasons)}")


def regressions(
    submission: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: Tolerance | None = None
) -> list[Regression]:
    """Return what is worse than the baseline of the same run; methods that the baseline lacks are ignored."""
    require_same_run(submission, baseline)
    allowed = tolerance or Tolerance()
    now = {(score["method"], score["category"]): score for score in submission["scores"]}
    losses: list[Regression] = []
    for old in baseline["scores"]:
        place = (old["method"], old["category"])
        new = now[place]
        before = old["tokens_per_pass"]["value"]
        after = new["tokens_per_pass"]["value"]
        if after < (1 - allowed.tokens) * before - 1e-9:
            losses.append(Regression(*place, "tokens per pass", before, after))
        if old["score"] is not None and new["score"] is not None:
            bound = (1 - allowed.score) * old["score"]["value"]
            if new["score"]["high"] < bound:
                losses.append(Regression(*place, "speed over plain", old["score"]["value"], new["score"]["value"]))
        if new["exact"] < old["exact"]:
            losses.append(Regression(*place, "texts as plain", old["exact"], new["exact"]))
    return losses
