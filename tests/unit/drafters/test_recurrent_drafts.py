"""Draft models with recurrent states: drafts depend on the text only, whatever was copied, cut or read again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.drafters.base import LoadedDraftModel
from draftree.drafters.wrappers.ahead import Overlap
from draftree.loading.loaded import LoadedModel
from draftree.models.base import LanguageModel
from draftree.models.process import ProcessModel, serve_model
from recurrent import RecurrentLM

SYSTEM = [1 + i * i % 9 for i in range(60)]
PROMPTS = [[3], [1, 2, 1, 2, 1, 2, 1], SYSTEM, [*SYSTEM, 5, 6], [*SYSTEM, 7, 8, 9, 1], [2, *SYSTEM]]
DRAFTS = ["model:small,k=3", "model:small,tree=2-2-1", "model:small,tree=best-6", "ngram,min=1+model:small,k=3"]
models: list[LanguageModel] = []


def small(max_length: int = 4096) -> RecurrentLM:
    return RecurrentLM(distance=0.3, max_length=max_length)


def use(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    """Make every draft model this one."""
    models.clear()

    def load(name: str, **_: Any) -> LoadedModel:
        models.append(build())
        return LoadedModel(models[-1], None, (), name)

    monkeypatch.setattr("draftree.drafters.model.load_model", load)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[tuple[int, ...]]:
    done = llm.generate([list(ids) for ids in prompts], SamplingParams(seed=3, **params))
    llm.engine.check_integrity()
    return [one.token_ids for one in done]


def wanted(prompts: Sequence[Sequence[int]], **params: Any) -> list[tuple[int, ...]]:
    llm = LLM(RecurrentLM().without_slots(), "none", prefix_cache_size=0)
    return [text for ids in prompts for text in generate(llm, [ids], **params)]


def drafted(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[Any]:
    """What was drafted in every round of every text."""
    records: list[RoundRecord] = []
    stop = llm.engine.on_round(records.append)
    generate(llm, prompts, **params)
    stop()
    rows = [row for record in records for row in record.sequences]
    return sorted((row.prefix_length, row.drafted.tokens, row.drafted.parents) for row in rows)


@pytest.mark.parametrize("max_length", [4096, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_do_not_depend_on_the_draft_model(
    draft: str, temperature: float, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, lambda: small(max_length))
    llm = LLM(RecurrentLM(), draft, plan="fixed")
    for _ in range(2):
        assert generate(llm, PROMPTS, max_tokens=25, temperature=temperature) == wanted(
            PROMPTS, max_tokens=25, temperature=temperature
        )
    assert sum(model.num_open for model in models) <= len(llm.engine.running) + llm.prefix_stats.kept


@pytest.mark.parametrize("max_length", [4096, 40])
@pytest.mark.parametrize("draft", DRAFTS[:3])
def test_drafts_are_those_of_a_model_without_states(
    draft: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for build in (lambda: small(max_length), lambda: small(max_length).without_slots()):
        use(monkeypatch, build)
        llm = LLM(RecurrentLM(), draft, plan="fixed")
        found.append([drafted(llm, [ids], max_tokens=25) for ids in [*PROMPTS, *PROMPTS]])
    assert found[0] == found[1]


def test_a_draft_model_moves_its_state_on_and_goes_back_never(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, small)
    llm = LLM(RecurrentLM(), "model:small,k=4", plan="fixed")
    generate(llm, [SYSTEM], max_tokens=40)
    (model,) = models
    assert isinstance(model, RecurrentLM)
    # every token of the text is settled once, but those that were drafted and accepted
    assert 60 <= model.num_settled <= 60 + 40
    assert model.num_rows <= 60 + 40 + 4 * 40


def test_copies_begin_where_a_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, small)
    llm = LLM(RecurrentLM(), "model:small,k=2", plan="fixed")
    for number in range(1, 5):
        generate(llm, [[*SYSTEM, *[number] * 12]], max_tokens=4)
    (model,) = models
    assert isinstance(model, RecurrentLM)
    # the system prompt was read by the first two
    assert model.num_settled < 2 * 60 + 4 * (12 + 4 + 3)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draft models run in a thread behind a pipe, as in a process, and draft ahead."""
    ends = []

    def apart_reader(*_: Any, **__: Any) -> Any:
        def read(name: str) -> LoadedDraftModel:
            here, there = Pipe()
            ends.append(here)
            threading.Thread(target=serve_model, args=(there, small()), daemon=True).start()
            return LoadedDraftModel(ProcessModel(here), None, name)

        return read

    monkeypatch.setattr("draftree.build.apart_reader", apart_reader)
    monkeypatch.setattr(Overlap, "pays", lambda self, hits=1.0: True)
    yield
    for end in ends:
        end.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["model:small,k=3,ahead=2", "model:small,tree=3-2-1,ahead=4"])
def test_drafting_ahead_in_another_process_changes_no_text(draft: str, temperature: float, piped: None) -> None:
    llm = LLM(RecurrentLM(), draft, plan="fixed")
    for _ in range(2):
        assert generate(llm, PROMPTS, max_tokens=25, temperature=temperature) == wanted(
            PROMPTS, max_tokens=25, temperature=temperature
        )
