"""The race of merged drafters: a good one, a useless one and one with another's record, on a clock that passes move."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from draftree import SamplingParams
from draftree.build import build_parts, choose_methods
from draftree.core.types import RoundRecord
from draftree.drafters.base import LoadedDraftModel
from draftree.engine.engine import Engine
from draftree.engine.race import Race
from draftree.engine.requests import SequenceFactory
from draftree.loading.loaded import LoadedModel
from draftree.models.table import Table, TableLM, hashed, near
from draftree.options import EngineLimits
from draftree.outputs import completion_of
from paced import PASS_SECONDS, FakeClock, PacedModel

TABLE = hashed(16, seed=1, scale=3.0)
TABLES: dict[str, Table] = {
    "good": near(TABLE, seed=2, distance=0.5),
    "useless": hashed(16, seed=7, scale=3.0),
    "wrong": hashed(16, seed=8, scale=3.0),
}
LEVEL_SECONDS = 0.15 * PASS_SECONDS


@dataclass
class Outcome:
    race: Race | None
    drafted: list[tuple[int, ...]]  # of each round, the merged drafters that drafted
    texts: list[tuple[int, ...]]
    seconds: list[float]  # of each text
    models: dict[str, weakref.ref[TableLM]]
    explain: str

    @property
    def released(self) -> set[str]:
        return {name for name, model in self.models.items() if model() is None}


def written(
    *names: str,
    texts: int,
    recorded: str = "",
    published: Mapping[str, float] | None = None,
    others: tuple[str, ...] = ("suffix",),
) -> Outcome:
    """Texts of 100 tokens, one after the other, with these drafters and others, or by plain decoding."""
    clock = FakeClock()
    models: dict[str, weakref.ref[TableLM]] = {}

    def load(name: str) -> LoadedDraftModel:
        inner = TableLM(TABLES[name], order=2)
        models[name] = weakref.ref(inner)
        return LoadedDraftModel(PacedModel(inner, clock, lambda rows: LEVEL_SECONDS), None, name)

    draft = "+".join((*(f"model:{name},k=3" for name in names), *others)) if names else None
    methods = choose_methods(draft, "coupled", None)
    planner = methods.planner
    if recorded:
        # as if its training had recorded the acceptance of a good one
        parts = [replace(p, sampled_rates=(0.8,)) if recorded in p.name else p for p in planner.parts]
        planner = type(planner)(
            planner.config, default_depth=planner.default_depth, default_nodes=planner.default_nodes, parts=parts
        )
        methods = replace(methods, planner=planner)
    target = PacedModel(TableLM(TABLE, order=2), clock)
    parts = build_parts(methods, LoadedModel(target, None, (), "table"), None, load_draft=load, clock=clock)
    engine = Engine(parts, EngineLimits(max_batch_size=1))
    choice = parts.drafters[0] if names else None
    race = None if choice is None else Race(choice, published or {})
    drafted: list[tuple[int, ...]] = []

    def note_parts(record: RoundRecord) -> None:
        sources = {name for each in record.sequences[0].drafted.sources for name in each}
        parts = [part.name for part in planner.parts]
        drafted.append(tuple(i for i, name in enumerate(parts) if any(s.startswith(name) for s in sources)))

    engine.on_round(note_parts)
    if race is not None:
        engine.on_round(race.observe)
    requests = SequenceFactory(parts, None, eos_ids=(), slot_room=lambda: engine.slot_room)
    tokens, seconds = [], []
    for number in range(texts):
        start = clock.seconds
        (sequence,) = requests.sequences(
            [1, number % 16, number // 16], SamplingParams(max_tokens=100, temperature=1.0, seed=number)
        )
        engine.add(sequence)
        while not engine.is_idle:
            engine.step()
        tokens.append(tuple(completion_of(sequence, prompt_index=0).token_ids))
        seconds.append(clock.seconds - start)
        engine.check_integrity()
    explain = planner.explain() if names else ""
    gc.collect()
    return Outcome(race, drafted, tokens, seconds, models, explain)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return written(texts=40)


@pytest.mark.parametrize("names", [("good", "useless"), ("useless", "good", "wrong")])
def test_the_good_drafter_wins_and_the_others_are_released(plain: Outcome, names: tuple[str, ...]) -> None:
    outcome = written(*names, texts=40)
    assert outcome.texts == plain.texts
    good = names.index("good")
    assert outcome.released == {*names} - {"good"}
    models = [[part for part in parts if part < len(names)] for parts in outcome.drafted]
    assert all(len(parts) <= 1 for parts in models), "one drafter that runs a model in a round"
    assert {part for parts in models for part in parts} == set(range(len(names))), "each was tried"
    assert {part for parts in models[-100:] for part in parts} == {good}
    assert sum(map(len, models[-100:])) > 60
    assert sum(outcome.seconds[:3]) < 0.6 * sum(plain.seconds[:3]), "it is found in the first texts"
    assert "model:useless,k=3: released, slower than 'model:good,k=3': right in " in outcome.explain


def test_none_wins_where_no_drafter_pays(plain: Outcome) -> None:
    outcome = written("useless", "wrong", texts=40)
    assert outcome.texts == plain.texts
    assert outcome.released == {"useless", "wrong"}
    assert all(set(parts) <= {2} for parts in outcome.drafted[-100:])
    assert outcome.explain.count("released, slower than ") == 2


def test_a_drafter_of_another_revision_is_reported_once(plain: Outcome) -> None:
    outcome = written("wrong", "good", texts=12, recorded="wrong")
    assert outcome.texts == plain.texts[:12]
    assert outcome.race is not None
    (note,) = [note for note in outcome.race.notes if "revision" in note]
    assert note.startswith("drafter 'model:wrong,k=3' was right in ")
    assert "first tokens, where 80% were measured in its training: it may belong to another revision" in note
    assert outcome.released == {"wrong"}


def test_a_published_acceptance_is_what_a_drafter_is_compared_with(plain: Outcome) -> None:
    published = {"model:wrong,k=3": 0.7, "model:useless,k=3": 0.08}
    outcome = written("wrong", "good", "useless", texts=12, published=published)
    assert outcome.texts == plain.texts[:12]
    assert outcome.race is not None
    (note,) = [note for note in outcome.race.notes if "revision" in note]
    assert note.startswith("drafter 'model:wrong,k=3' was right in ")
    assert "first tokens, where 70% are published for it: it may belong to another revision" in note


def test_without_a_lookup_all_that_lose_are_released(plain: Outcome) -> None:
    outcome = written("useless", "wrong", texts=40, others=())
    assert outcome.texts == plain.texts
    assert outcome.released == {"useless", "wrong"}


def test_a_drafter_alone_stays(plain: Outcome) -> None:
    """One that was measured here is merged with none."""
    outcome = written("useless", texts=60, others=())
    assert outcome.texts[:40] == plain.texts
    assert outcome.released == set()
    assert "off" in outcome.explain
