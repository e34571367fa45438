"""A draft model reads prompts beside the target: once, in chunks, and not again from cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from draftree import SamplingParams
from draftree.build import build_parts, choose_methods
from draftree.drafters.base import LoadedDraftModel
from draftree.engine.engine import Engine
from draftree.engine.requests import SequenceFactory
from draftree.engine.scheduler import PREFILL_TOKENS_IDLE
from draftree.engine.sequence import WritingSequence
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Pass, PassResult
from draftree.models.table import TableLM, hashed, near
from draftree.options import EngineLimits
from draftree.text.tokenizer import Tokenizer
from engine_samples import run, text
from families import VOCAB_SIZE
from spelling import tokenizer as spelled
from text_backends import byte_fallback

VOCAB = 12
TABLE = hashed(VOCAB, seed=5, scale=3.0)


@dataclass(slots=True)
class ReadCounts:
    """What a model has read of texts, not counting the nodes of trees."""

    tokens: int = 0
    longest: int = 0
    """Tokens of one sequence in one pass at most."""

    def watch(self, model: TableLM) -> None:
        """Count the passes of this model from now on."""
        run_pass = model.run

        def counted(one: Pass) -> PassResult:
            read = [len(job.tokens) for job in one.jobs if job.logits_at is not None]
            self.tokens += sum(read)
            self.longest = max(self.longest, *read, 0, 0)
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
        limits: EngineLimits | None = None,
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
            load_draft=load,
        )
        self.engine = Engine(parts, limits)
        self.requests = SequenceFactory(parts, None, eos_ids=(), slot_room=lambda: self.engine.slot_room)

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


SYSTEM = [1 + i * i % 9 for i in range(400)]
DRAFTS = ["model:any,k=3", "model:any,tree=2-2-1", "ngram,min=1+model:any,k=3", "model:any,k=2+model:other,tree=best-5"]
TEMPERATURES = [0.0, 1.0]


def prompt(length: int, start: int = 0) -> list[int]:
    return [1 + (start + i * i + i // 7) % 11 for i in range(length)]


def num_models(draft: str) -> int:
    return draft.count("model:")


@pytest.mark.parametrize("draft", DRAFTS)
def test_n_texts_read_their_prompt_once(draft: str) -> None:
    params = {"n": 4, "max_tokens": 12, "seed": 3}
    drafted = CountedEngine(draft)
    assert drafted.write(SYSTEM, **params) == CountedEngine(None).write(SYSTEM, **params)
    # at most k + 1 tokens are written in a round, and the model reads each of them once at most, the root twice
    assert drafted.read.tokens <= num_models(draft) * (len(SYSTEM) + 4 * 2 * 12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_cached_prefix_is_not_read_again(draft: str, temperature: float) -> None:
    params = {"max_tokens": 8, "temperature": temperature, "seed": 3}
    drafted, plain = CountedEngine(draft), CountedEngine(None)
    for place, tail in enumerate(([2, 3, 4], [5, 6], [7, 8, 9, 1])):
        before = drafted.read.tokens
        assert drafted.write([*SYSTEM, *tail], **params) == plain.write([*SYSTEM, *tail], **params)
        assert drafted.engine.prefix_stats.hits == place
        if place:
            assert drafted.read.tokens - before <= num_models(draft) * (len(tail) + 2 * 8)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_conversation_goes_on_where_the_draft_model_was(draft: str) -> None:
    drafted, plain, ids = CountedEngine(draft), CountedEngine(None), list(SYSTEM)
    for turn in range(4):
        before, slots = drafted.read.tokens, drafted.num_draft_slots
        (written,) = drafted.write(ids, max_tokens=6, seed=1)
        assert [written] == plain.write(ids, max_tokens=6, seed=1)
        ids += [*written, 3, 4, 5]
        if turn:
            assert drafted.read.tokens - before <= num_models(draft) * 40
            assert drafted.num_draft_slots == slots, "the slot is handed over"


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_long_prompt_is_read_in_the_targets_chunks(draft: str) -> None:
    drafted, ids = CountedEngine(draft), prompt(2000)
    assert drafted.write(ids, max_tokens=8, seed=1) == CountedEngine(None).write(ids, max_tokens=8, seed=1)
    assert drafted.read.longest <= PREFILL_TOKENS_IDLE
    assert drafted.read.tokens <= num_models(draft) * (2000 + 2 * 8)


def texts_beside(engine: CountedEngine, num_tokens: int, ids: list[int]) -> list[list[int]]:
    """A text that is being written, and one whose prompt is read meanwhile."""
    sequences = engine.add([1, 2, 3], max_tokens=num_tokens, seed=1)
    for _ in range(3):
        engine.engine.step()
    sequences += engine.add(ids, max_tokens=5, seed=2)
    run(engine.engine)
    return [text(sequence) for sequence in sequences]


def test_beside_running_texts_the_draft_model_reads_no_more_than_the_target() -> None:
    limits = EngineLimits(max_batch_size=4, prefill_chunk_size=64)
    drafted, plain = CountedEngine("model:any,k=3", limits=limits), CountedEngine(None, limits=limits)
    assert texts_beside(drafted, 120, prompt(1000)) == texts_beside(plain, 120, prompt(1000))
    assert drafted.read.longest <= 64, "no running text waits for more"


def test_prompts_that_are_cut_midway_are_read_to_there() -> None:
    drafted, plain = CountedEngine("model:any,k=3"), CountedEngine(None)
    texts = [SYSTEM[:200] + prompt(50), SYSTEM[:300] + prompt(30, start=3), SYSTEM[:100] + prompt(70, start=5)]
    assert drafted.write(*texts, max_tokens=6, seed=1) == plain.write(*texts, max_tokens=6, seed=1)
    read = drafted.read.tokens
    assert read <= 250 + 130 + 170 + 3 * 12, "what prompts share is read once"
    assert drafted.write(*texts, max_tokens=6, seed=2) == plain.write(*texts, max_tokens=6, seed=2)
    assert drafted.read.tokens - read <= 3 * 14


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_states_are_closed_with_their_prefixes(draft: str, keep: int) -> None:
    drafted = CountedEngine(draft, limits=EngineLimits(max_batch_size=2, prefix_cache_size=keep))
    for start in range(6):
        drafted.write(prompt(60, start), max_tokens=4, seed=1, n=2)
    assert drafted.num_draft_slots == keep * num_models(draft)
    drafted.engine.forget()
    assert (drafted.num_draft_slots, drafted.target.num_open) == (0, 0)


def test_an_engine_that_is_gone_keeps_no_draft_slots() -> None:
    drafted = CountedEngine("model:any,k=3")
    drafted.write(SYSTEM, max_tokens=20, seed=1)
    assert drafted.num_draft_slots == 1
    models = drafted.models
    del drafted.engine
    assert models[0].num_open == 0


def test_states_that_contradict_their_slots_are_found() -> None:
    drafted = CountedEngine("model:any,k=3")
    drafted.write(SYSTEM, max_tokens=20, seed=1)
    (slot,) = drafted.models[0]._slots
    drafted.models[0].truncate(slot, slot.length - 1)
    with pytest.raises(AssertionError, match="a slot holds"):
        drafted.engine.check_integrity()


def test_a_draft_model_that_is_not_asked_reads_no_prompts() -> None:
    drafted = CountedEngine("model:any,k=3", plan="heuristic", limits=EngineLimits(max_batch_size=2))
    drafted.write([1, 2, 3], max_tokens=5, seed=1)
    planner = drafted.engine.parts.drafters[0].planner
    planner.budgets = lambda states: [planner.ahead(0) for _ in states]  # type: ignore[method-assign]
    drafted.write([1, 2, 3], max_tokens=60, seed=1)
    before = drafted.read.tokens
    drafted.write(prompt(1500), max_tokens=5, seed=1)
    assert drafted.read.tokens == before


def test_a_draft_model_with_a_short_context_forks_its_window() -> None:
    params = {"n": 3, "max_tokens": 40, "seed": 3}
    drafted = CountedEngine("model:any,k=3", draft_length=64)
    assert drafted.write(SYSTEM, **params) == CountedEngine(None).write(SYSTEM, **params)
    assert drafted.write(SYSTEM, **params) == CountedEngine(None).write(SYSTEM, **params)
    assert drafted.read.longest <= 33 + 1


def test_of_a_prompt_beyond_its_context_a_draft_model_reads_the_window_in_chunks() -> None:
    limits = EngineLimits(max_batch_size=4, prefill_chunk_size=64)
    drafted, plain = CountedEngine("model:any,k=3", draft_length=512, limits=limits), CountedEngine(None)
    assert texts_beside(drafted, 200, prompt(1500)) == texts_beside(plain, 200, prompt(1500))
    assert drafted.read.longest <= 65, "a chunk, and the first token of the text"
    assert drafted.read.tokens <= 1 + 256 + 2 * 210


@pytest.mark.parametrize("draft", ["model:any,map=tokens", "model:any,map=strings,tree=best-6", "ngram+model:any"])
def test_in_another_tokenizer_prompts_are_read_once_too(draft: str) -> None:
    own, drafts = spelled(), Tokenizer(byte_fallback(), name="other")
    tables = (hashed(VOCAB_SIZE, seed=1, scale=3.0), hashed(len(byte_fallback()), seed=2, scale=3.0))
    drafted = CountedEngine(draft, tokenizers=(own, drafts), tables=tables)
    plain = CountedEngine(None, tokenizers=(own, drafts), tables=tables)
    system = "the cab in a bank, and there. " * 40
    ids = own.encode(system)
    whole = len(drafts.encode(system))
    assert drafted.write(ids, n=3, max_tokens=10, seed=1) == plain.write(ids, n=3, max_tokens=10, seed=1)
    assert whole <= drafted.read.tokens <= whole + 3 * 100
    for tail in ("a cab", "ing and then"):
        before, prompt_ids = drafted.read.tokens, own.encode(system + tail)
        assert drafted.write(prompt_ids, max_tokens=10, seed=2) == plain.write(prompt_ids, max_tokens=10, seed=2)
        assert drafted.read.tokens - before <= 150
    drafted.engine.forget()
    assert drafted.num_draft_slots == 0
