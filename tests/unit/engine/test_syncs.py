"""Number of device synchronizations per round, counted on the CPU: a second one fails the test.

The CPU's memory is declared a device's, so the code takes its path for a GPU; then every call
that would wait there is counted, but for those within the forward pass, which a graph replays without the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.core import noise, tensors
from draftree.loading.transformers_model import wrap_model
from draftree.models.kv import slots
from draftree.models.torch import static
from draftree.models.torch.static import Shapes, StaticPasses
from draftree.sampling import logits
from families import drafter_folder, fresh, prompts

WAITING = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "to")
PROMPTS = prompts(9, 12, 10)


class Waits:
    """Counts calls that would wait for a device."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_paused = False

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            was_paused = self.is_paused
            if not was_paused:
                self.calls[name] += self._waits(name, args, kwargs)
            self.is_paused = True  # what it calls itself is the same wait
            try:
                return original(*args, **kwargs)
            finally:
                self.is_paused = was_paused

        monkeypatch.setattr(owner, name, watched)

    @staticmethod
    def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ("tensor", "as_tensor", "to"):
            # numbers that go to a device by any way but `to_device` are copied while the host waits
            return "device" in kwargs or any(isinstance(arg, torch.device | str) for arg in args[1:])
        return True

    def pause(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Calls within this one do not count."""
        original = getattr(owner, name)

        def unseen(*args: Any, **kwargs: Any) -> Any:
            was_paused, self.is_paused = self.is_paused, True
            try:
                return original(*args, **kwargs)
            finally:
                self.is_paused = was_paused

        monkeypatch.setattr(owner, name, unseen)


@pytest.fixture
def waits() -> Iterator[Waits]:
    # torch notes its functions at the first use of a device context, once for the process. With the functions below,
    # transformers would later take models on 'meta' for real ones and leave rotary frequencies without values
    with torch.device("cpu"):
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        yield watched_calls(patch)
    with torch.device("meta"):
        assert torch.tensor(0).is_meta, "a device context applies to torch's own functions again"


def watched_calls(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    prepare = StaticPasses._prepare

    def as_if_captured(self: StaticPasses, *args: Any) -> Any:
        prepared = prepare(self, *args)
        waits.pause(monkeypatch, prepared, "run")
        return prepared

    monkeypatch.setattr(StaticPasses, "_prepare", as_if_captured)
    for module in (tensors, logits):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    for name in WAITING:
        waits.watch(monkeypatch, Tensor, name)
    for name in ("tensor", "as_tensor"):
        waits.watch(monkeypatch, torch, name)
    for module in (noise, logits, slots, tensors):
        waits.pause(monkeypatch, module, "to_device")
    waits.pause(monkeypatch, static, "fill")
    return waits


def waits_of_rounds(waits: Waits, draft: str | None, params: SamplingParams, **options: Any) -> list[Counter[str]]:
    """Calls that wait, round by round, without the first ones, which read the prompts."""
    rounds: list[Counter[str]] = []

    def note(record: Any) -> None:
        rounds.append(Counter(waits.calls))
        waits.calls.clear()

    llm = LLM(wrap_model(fresh("llama"), shapes=Shapes()), draft, on_round=note, **options)
    llm.generate(PROMPTS, params)
    return rounds[1:]


@pytest.mark.parametrize("draft", [None, "ngram,min=1", "suffix", "ngram,min=1+suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round_waits_once(waits: Waits, draft: str | None, temperature: float) -> None:
    rounds = waits_of_rounds(waits, draft, SamplingParams(max_tokens=12, temperature=temperature, seed=1))
    assert len(rounds) >= 3
    assert all(calls.total() == 1 for calls in rounds), rounds


def test_a_model_that_drafts_waits_once_more_for_each_level(waits: Waits, tmp_path: Path) -> None:
    draft = f"model:{drafter_folder('llama', tmp_path)},k=3"
    rounds = waits_of_rounds(waits, draft, SamplingParams(max_tokens=16, temperature=0.8, seed=1))
    assert all(calls.total() <= 1 + 3 for calls in rounds), rounds


def test_a_second_wait_is_detected(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StaticPasses.run

    def curious(self: StaticPasses, *args: Any, **kwargs: Any) -> Any:
        outputs, requested = run(self, *args, **kwargs)
        assert float(outputs[0].amax()) < 1e9
        return outputs, requested

    monkeypatch.setattr(StaticPasses, "run", curious)
    rounds = waits_of_rounds(waits, None, SamplingParams(max_tokens=6, temperature=0.0))
    assert all(calls.total() > 1 for calls in rounds)
