"""Raw counts and seconds of one sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceCounts:
    """Raw counts and seconds of one sequence. Mutated once per round.

    Seconds are those of the sequence's rounds, which are shared with other sequences in a batch.
    """

    rounds: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_tokens: int = 0
    plan_seconds: float = 0.0
    draft_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    explain: str = ""
