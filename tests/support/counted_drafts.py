"""Engines over tables whose draft model counts what it reads. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftree import SamplingParams
from draftree.assembly import build_parts, choose_methods
from draftree.drafters.base import LoadedDraftModel
from draftree.engine.engine import Engine, Limits
from draftree.engine.sequence import WritingSequence
from draftree.loading.load import LoadedModel
from draftree.models.base import Pass, PassResult
from draftree.models.table import TableLM, hashed, near
from draftree.requests import Requests
from draftree.text.tokenizer import Tokenizer
from engine_samples import run, text

VOCAB = 12
TABLE = hashed(VOCAB, seed=5, scale=3.0)


@dataclass(slots=True)
class ReadCounts:
    """What a model has read of texts, not counting the nodes of trees."""

    tokens: int = 0
    longest: int = 0
    """Tokens of one sequence in one pass at most."""
    passes: list[int] = field(default_factory=list)
    """Tokens of each pass."""

    def watch(self, model: TableLM) -> None:
        """Count the passes of this model from now on."""
        run_pass = model.run

        def counted(one: Pass) -> PassResult:
            read = [len(job.tokens) for job in one.jobs if job.logits_at is not None]
            self.tokens += sum(read)
            self.longest = max(self.longest, *read, 0, 0)
            if read:
                self.passes.append(sum(read))
            return run_pass(one)

        model.run = counted  # type: ignore[method-assign]


class CountedEngine:
    """An engine and its draft models.

    Args:
        draft: the drafters' spec; `model:` with any name gives a table near the target's.
        plan: the planner.
        draft_length: longest text of a draft model.
        tokenizers: the target's and the draft models'; None for one vocabulary of table rows.
        limits: of the engine.
    """

    def __init__(
        self,
        draft: str | None,
        *,
        plan: str | None = "fixed",
        draft_length: int = 4096,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
        tables: tuple[Any, Any] = (TABLE, near(TABLE, seed=2, distance=1.0)),
        limits: Limits | None = None,
        together: bool = False,
    ) -> None:
        self.read = ReadCounts()
        self.models: list[TableLM] = []
        own, drafts = tokenizers or (None, None)
        self.target = TableLM(tables[0])

        def load(name: str) -> LoadedDraftModel:
            model = TableLM(tables[1], max_length=draft_length)
            self.read.watch(model)
            self.models.append(model)
            return LoadedDraftModel(model, drafts, name)

        parts = build_parts(
            choose_methods(draft, "coupled", plan if draft else None),
            LoadedModel(self.target, None, (), "table"),
            own,
            dtype=self.target.dtype,
            device="cpu",
            load_draft=load,
        )
        self.engine = Engine(parts, limits, together=together)
        self.requests = Requests(parts, None, eos_ids=(), longest=self.engine.longest)

    def add(self, ids: Sequence[int], **params: Any) -> list[WritingSequence]:
        """Queue a request."""
        sequences = self.requests.sequences(list(ids), SamplingParams(**params))
        self.engine.add(*sequences)
        return sequences

    def write(self, *prompts: Sequence[int], **params: Any) -> list[list[int]]:
        """Token ids of requests that are queued at once; the bookkeeping is checked after every step."""
        sequences = [sequence for ids in prompts for sequence in self.add(ids, **params)]
        run(self.engine)
        return [text(sequence) for sequence in sequences]

    @property
    def num_draft_slots(self) -> int:
        """Open slots of all draft models."""
        return sum(model.num_open for model in self.models)
