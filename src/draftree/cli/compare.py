"""Comparison of plain decoding with speculation: same prompt, same seed, texts compared."""

from __future__ import annotations

import dataclasses
import secrets
from itertools import takewhile

from draftree.cli.writing import Run
from draftree.core.errors import ConfigurationError
from draftree.sampling.params import SamplingParams
from draftree.verifiers.base import VERIFIERS, Promise, Verifier

__all__ = ["are_equal", "comparable", "difference", "speedup"]

SHOWN = 30
"""Characters of each text in the report of a difference."""


def keeps_text(verifier: type[Verifier], temperature: float) -> bool:
    """Return whether speculation produces plain decoding's text, token for token."""
    return verifier.promise(temperature) is Promise.SAME_TEXT


def comparable(params: SamplingParams, verify: str) -> SamplingParams:
    """Return the parameters with a seed, which both runs need.

    Raises:
        ConfigurationError: the verifier does not preserve the text.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    if not keeps_text(verifier, params.temperature):
        known = [name for name in VERIFIERS.names() if keeps_text(VERIFIERS.find(name), params.temperature)]
        case = "preserves the model's distribution, but not the text of a seed" if verifier.lossless else "is lossy"
        raise ConfigurationError(
            f"--compare needs equal texts, but verifier '{verify}' {case}: "
            f"at temperature {params.temperature:g} use {', '.join(known)}"
        )
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(32))


def are_equal(plain: Run, fast: Run) -> bool:
    """Return whether all texts are equal, token for token."""
    return [c.token_ids for c in plain.completions] == [c.token_ids for c in fast.completions]


def speedup(plain: Run, fast: Run) -> float:
    """Return the ratio of plain time to speculative time."""
    return plain.seconds / fast.seconds


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
