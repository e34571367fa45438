"""Engines over small models, for tests of concurrent requests. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree import LLM, SamplingParams
from draftree.drafters.base import DraftTraits
from draftree.engine.engine import Engine
from draftree.engine.parts import EngineParts
from draftree.engine.sequence import DraftChoice, WritingSequence
from draftree.models.base import LanguageModel
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from draftree.verifiers import VERIFIERS

VOCAB = 12


def table_llm(draft: str | None = None, **options: Any) -> LLM:
    return LLM(TableLM(hashed(VOCAB, seed=5), order=3), draft, **options)


def parts_of(target: LanguageModel, drafter: Any, traits: DraftTraits, planner: Any, *, verify: str) -> EngineParts:
    """The parts of an engine with one drafter, which is built already."""
    verifier = VERIFIERS.find(verify)
    return EngineParts(target, verifier(verifier.Config()), {"own": DraftChoice("own", drafter, traits, planner)})


def request(llm: LLM, ids: Sequence[int], *, priority: int = 0, **params: Any) -> list[WritingSequence]:
    return llm.requests.sequences(list(ids), SamplingParams(**params), priority=priority)


def engine_of(llm: LLM, limits: EngineLimits) -> Engine:
    """Another engine over the parts of an LLM, with limits that an LLM does not set."""
    return Engine(llm.engine.parts, limits)


def run(engine: Engine, *, steps: int = 10_000) -> int:
    """Step until the engine is idle, with an integrity check after every step; returns the number of steps."""
    for count in range(steps):
        if engine.is_idle:
            return count
        engine.step()
        engine.check_integrity()
    raise AssertionError("it never ends")


def text(sequence: WritingSequence) -> list[int]:
    return sequence.history.output.tolist()
