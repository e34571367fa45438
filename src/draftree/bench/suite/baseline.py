"""Regression check: a submission compared with a stored one, method by method. No torch.

Tokens per pass depend on no clock with a planner that reads none (`@fixed`), so their tolerance covers only other
rounding on another machine. Scores are ratios of times: their tolerance is wide, and a score counts as worse only if
its whole interval is below the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftree.bench.suite.comparing import differences
from draftree.core.errors import ConfigurationError

__all__ = ["Regression", "Tolerance", "regressions", "require_same_run"]

SAME_EXECUTION = ("dtype", "quantization")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative losses up to which a value is no regression.

    Attributes:
        tokens: of tokens per pass.
        score: of the speed over plain decoding.
    """

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
    """A value that is worse than the stored one.

    Attributes:
        method: name of the method.
        category: category; "all" for the suite.
        value: "tokens per pass", "speed over plain" or "texts as plain".
        before: the stored value.
        now: the value.
    """

    method: str
    category: str
    value: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.method} on {self.category}: {self.value} {self.now:.4g}, baseline {self.before:.4g}"


def require_same_run(submission: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Refuse a baseline of another model, of other prompts or arguments, or without the methods.

    Raises:
        ConfigurationError: the message has every reason.
    """
    reasons = differences(submission, baseline)
    if submission["model"]["sha256"] != baseline["model"]["sha256"]:
        reasons.append(f"the models are {submission['model']['name']} and {baseline['model']['name']}, other weights")
    for name in SAME_EXECUTION:
        one, other = submission["execution"][name], baseline["execution"][name]
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
    """Return what is worse than the baseline; methods that the baseline lacks are ignored.

    Args:
        submission: the new run.
        baseline: the stored run, of the same model, prompts and arguments.
        tolerance: relative losses that are allowed; None for 2% of tokens per pass and 25% of speed.

    Raises:
        ConfigurationError: the baseline is of another run.
    """
    require_same_run(submission, baseline)
    allowed = tolerance or Tolerance()
    now = {(one["method"], one["category"]): one for one in submission["scores"]}
    found: list[Regression] = []
    for old in baseline["scores"]:
        place = (old["method"], old["category"])
        new = now[place]
        before, after = old["tokens_per_pass"]["value"], new["tokens_per_pass"]["value"]
        if after < (1 - allowed.tokens) * before - 1e-9:
            found.append(Regression(*place, "tokens per pass", before, after))
        if old["score"] is not None and new["score"] is not None:
            bound = (1 - allowed.score) * old["score"]["value"]
            if new["score"]["high"] < bound:
                found.append(Regression(*place, "speed over plain", old["score"]["value"], new["score"]["value"]))
        if new["exact"] < old["exact"]:
            found.append(Regression(*place, "texts as plain", old["exact"], new["exact"]))
    return found
