"""Comparison of plain decoding with speculation: same prompt, same seed, texts compared.

Plain decoding runs before and after speculation, so that a machine that warms up or slows down favours neither. Only
decode time is compared: both read the prompt in the same way.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean

from draftree.cli.writing import Run
from draftree.core.errors import ConfigurationError
from draftree.sampling.params import SamplingParams
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Guarantee, Verifier

__all__ = ["are_equal", "comparable", "difference", "speedup", "verdict"]

SHOWN = 30
"""Characters of each text in the report of a difference."""


def keeps_text(verifier: type[Verifier], temperature: float) -> bool:
    """Return whether speculation produces plain decoding's text, token for token."""
    return verifier.promise(temperature) is Guarantee.SAME_TEXT


def comparable(params: SamplingParams, verify: str) -> SamplingParams:
    """Return the parameters with a seed, which both runs need.

    Raises:
        ConfigurationError: the verifier does not preserve the text.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    temperature = params.sampling.temperature
    if not keeps_text(verifier, temperature):
        known = [name for name in VERIFIERS.names() if keeps_text(VERIFIERS.find(name), temperature)]
        case = "preserves the model's distribution, but not the text of a seed" if verifier.lossless else "is lossy"
        raise ConfigurationError(
            f"--compare needs equal texts, but verifier '{verify}' {case}: "
            f"at temperature {temperature:g} use {', '.join(known)}"
        )
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(32))


def are_equal(plain: Run, fast: Run) -> bool:
    """Return whether all texts are equal, token for token."""
    return [c.token_ids for c in plain.completions] == [c.token_ids for c in fast.completions]


def speedup(plain: Sequence[Run], fast: Run) -> float:
    """Return the decode rate with speculation divided by the mean rate of the plain runs."""
    return fast.decode_rate / fmean(run.decode_rate for run in plain)


def verdict(plain: Sequence[Run], fast: Run) -> str:
    """Return the result in one line."""
    if not all(are_equal(run, fast) for run in plain):
        other = next(run for run in plain if not are_equal(run, fast))
        return f"THE TEXTS DIFFER {difference(other, fast)}"
    ratio = speedup(plain, fast)
    line = f"speed-up {ratio:.2f}, the texts are the same"
    if any(completion.stats.accepted_tokens for completion in fast.completions):
        return line
    meaning = "the difference is noise" if ratio >= 1 else "drafting only cost time"
    return f"{line}; no drafted token was accepted: {meaning}"


def difference(plain: Run, fast: Run) -> str:
    """Describe where the first two differing texts diverge."""
    for one, other in zip(plain.completions, fast.completions, strict=True):
        if one.token_ids == other.token_ids:
            continue
        if one.text == other.text:
            return "the texts are equal, but their tokens differ"
        start = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.text, other.text, strict=False))))
        seen = [repr(text[start : start + SHOWN]) for text in (one.text, other.text)]
        return f"from character {start}: plain {seen[0]}, with speculation {seen[1]}"
    return "no difference"
