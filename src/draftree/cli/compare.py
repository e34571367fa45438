"""Plain decoding beside speculation: the same prompt, the same seed, and the two held together."""

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
"""Characters of each text that a difference shows."""


def keeps_text(verifier: type[Verifier], temperature: float) -> bool:
    """Whether speculation writes plain decoding's text, token for token."""
    return verifier.promise(temperature) is Promise.SAME_TEXT


def comparable(params: SamplingParams, verify: str) -> SamplingParams:
    """The parameters with a seed, since both runs need the same.

    Raises:
        ConfigurationError: the verifier is not made to keep the text.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    if not keeps_text(verifier, params.temperature):
        known = [name for name in VERIFIERS.names() if keeps_text(VERIFIERS.find(name), params.temperature)]
        case = "keeps the model's distribution, but not the text of a seed" if verifier.lossless else "is lossy"
        raise ConfigurationError(
            f"--compare holds texts together, but verifier '{verify}' {case}: "
            f"at temperature {params.temperature:g} use {', '.join(known)}"
        )
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(32))


def are_equal(plain: Run, fast: Run) -> bool:
    """Whether all texts are the same, token for token."""
    return [c.token_ids for c in plain.completions] == [c.token_ids for c in fast.completions]


def speedup(plain: Run, fast: Run) -> float:
    """How many times faster."""
    return plain.seconds / fast.seconds


def difference(plain: Run, fast: Run) -> str:
    """Where the first two texts that differ begin to."""
    for one, other in zip(plain.completions, fast.completions, strict=True):
        if one.token_ids == other.token_ids:
            continue
        if one.text == other.text:
            return "the texts read the same, but are made of other tokens"
        start = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.text, other.text, strict=False))))
        seen = [repr(text[start : start + SHOWN]) for text in (one.text, other.text)]
        return f"from character {start} on: plain {seen[0]}, with speculation {seen[1]}"
    return "no difference"
