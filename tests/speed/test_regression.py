"""Speed regressions: ratios of interleaved timings in this process, on a real model.

Not a benchmark: bounds are wide, so that they hold on two busy cores of any processor, and each names the mistake
that it protects from. What is compared takes turns, and the fastest turn counts, by the time that this thread had:
other load lengthens it at most by evicting its caches. Noise passes and a regression
stays, so that a bound is missed only if it is missed three times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library
from real_weights import folder_of

pytestmark = pytest.mark.weights
MODEL = "smollm2-135m-instruct"
PREFIX = 64
TURNS = 6
ATTEMPTS = 3
TEXT = (
    "The harbour master wrote down every ship that came in: the red schooner from the north with timber, the two grey "
    "barges with coal, the ferry, late again, and a small white boat that nobody knew. "
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A processor that is shared has no second one to count on."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    folder_of(MODEL)
    return load_model(MODEL)


@pytest.fixture(scope="module")
def by_torch() -> LoadedModel:
    folder_of(MODEL)
    return load_model(MODEL, kernels="torch")


def fastest(*works: Callable[[], object]) -> list[float]:
    """Seconds of each work's fastest turn; the first turn only warms up."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(TURNS + 1):
        for found, work in zip(seconds, works, strict=True):
            start = time.thread_time()
            work()
            if turn:
                found.append(time.thread_time() - start)
    return [min(found) for found in seconds]


def require_below(bound: float, measure: Callable[[], float]) -> None:
    found = []
    while len(found) < ATTEMPTS:
        found.append(measure())
        if found[-1] <= bound:
            return
    pytest.fail(f"measured {', '.join(f'{ratio:.2f}' for ratio in found)}, and {bound} is the bound")


def passes(model: LanguageModel, rows: int) -> Callable[[], object]:
    """A pass over so many rows after a prefix."""
    slot = model.open()
    tokens = [(7 + 31 * place) % model.vocab_size for place in range(PREFIX)]
    model.run(Pass([Extend(slot, tokens, range(-1, PREFIX - 1), logits_at=())]))
    model.commit(slot, range(PREFIX))

    def work() -> None:
        model.run(Pass([Extend(slot, tokens[:rows], range(-1, rows - 1))]))
        model.commit(slot, ())

    return work


def kind_of_processor() -> str:
    """What native kernels compute with here; skips where there are none."""
    try:
        return library().instructions
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels here: {error}")


def test_passes_in_c_are_no_slower_than_through_torch(loaded: LoadedModel, by_torch: LoadedModel) -> None:
    """Protects from passes that fall back to torch unseen, and from kernels built without the processor's instructions.

    Measured: 0.3 with AMX.
    """
    bound = 0.8 if "AMX" in kind_of_processor() else 1.0 if "AVX" in kind_of_processor() else 2.0
    assert loaded.kernels.startswith("native"), loaded.fallback_reason
    works = [passes(model, 1) for model in (loaded.model, by_torch.model)]

    def ratio() -> float:
        native, torchs = fastest(*works)
        return native / torchs

    require_below(bound, ratio)


def test_eight_rows_cost_far_less_than_eight_passes(loaded: LoadedModel) -> None:
    """Protects from weights that are read again for every row, which would leave drafts nothing to win.

    Measured: 1.2 with AMX. If arithmetic is slow compared with memory it is more, and without vectors nothing is won.
    """
    instructions = kind_of_processor()
    bounds = {"AMX": 2.5, "AVX-512": 5.0, "AVX2": 7.0}
    bound = next((bound for name, bound in bounds.items() if name in instructions), 9.0)
    works = [passes(loaded.model, rows) for rows in (8, 1)]

    def ratio() -> float:
        eight, one = fastest(*works)
        return eight / one

    require_below(bound, ratio)


def copying(llm: LLM) -> list[int]:
    """A repetitive text."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    done = llm.generate([ids * 3], SamplingParams(max_tokens=len(ids), temperature=0, ignore_eos=True))
    return list(done[0].token_ids)


def test_copies_come_faster_with_ngram(loaded: LoadedModel) -> None:
    """Protects from drafts that are not found, not kept, or expensive to score.

    Measured: five times as fast with AMX. Required: a quarter less time; with plain vectors only the same text.
    """
    plain, fast = LLM(loaded, "none"), LLM(loaded, "ngram")
    if loaded.model.is_exact:
        assert copying(plain) == copying(fast)
    if "plain" in kind_of_processor():
        pytest.skip("rows cost as much as passes here")

    def ratio() -> float:
        drafted, plainly = fastest(lambda: copying(fast), lambda: copying(plain))
        return drafted / plainly

    require_below(0.75, ratio)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_round_is_little_but_its_pass(loaded: LoadedModel, draft: str | None) -> None:
    """Protects from work on the vocabulary's width in Python, copies of caches, and waiting outside of the pass.

    Measured: 4 to 8% with AMX. Required: the median round spends less than a fifth of its pass on all else.
    """
    records: list[RoundRecord] = []
    llm = LLM(loaded, draft, on_round=records.append)

    def share() -> float:
        records.clear()
        copying(llm)
        return statistics.median((one.total_seconds - one.score_seconds) / one.score_seconds for one in records)

    require_below(0.2, share)
