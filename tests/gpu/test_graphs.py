"""On a GPU: captured passes match dynamic passes, wait for nothing, and are captured anew when memory moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.build import measure_costs
from draftree.heads.passes import TorchPasses
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Commit, Extend, Pass
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import Shapes
from families import drafter_folder, fresh, prompts
from slot_samples import filled
from target_heads import TARGET, head_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "mistral", "phi3"]
PROMPTS = prompts(1, 8, 37, 90)


def on_card(family: str, shapes: Shapes | None, dtype: torch.dtype = torch.float32) -> HFModel:
    return HFModel(fresh(family, dtype=dtype).cuda(), shapes=shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_logits_are_those_of_dynamic_passes(family: str) -> None:
    found = []
    for shapes in (Shapes(), None):
        model = on_card(family, shapes)
        model.reserve(4, 192)
        slots = [filled(model, prompt) for prompt in PROMPTS]
        for turn in range(6):
            found.append(
                model.run(Pass([Extend(slot, [3 + turn, 4, 5], [-1, -1, 0]) for slot in slots])).logits.tensor()
            )
            model.apply([Commit(*pair) for pair in zip(slots, [[0, 2], [1], [0], [0, 2]], strict=True)])
        if model.static is not None:
            assert model.static.why_eager is None
            assert model.static.num_captured > 0
    half = len(found) // 2
    assert torch.allclose(torch.cat(found[:half]), torch.cat(found[half:]), atol=1e-3)


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_dynamic_passes(draft: str | None, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    texts = [
        [
            done.token_ids
            for done in LLM(wrap_model(fresh("llama").cuda(), shapes=shapes), draft).generate(PROMPTS, params)
        ]
        for shapes in (Shapes(), None)
    ]
    assert texts[0] == texts[1]


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 1},
    "nucleus": {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 20},
}


@contextmanager
def counted_waits() -> Iterator[Callable[[], int]]:
    """Return a function that returns how often the host has waited since its last call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

        def taken() -> int:
            count = sum("synchroniz" in str(warning.message) for warning in caught)
            caught.clear()
            return count

        try:
            yield taken
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("shape", ["k=3", "tree=best-8,k=4", "tree=2-1-2"])
@pytest.mark.parametrize("kind", ["model", "eagle3", "eagle"])
def test_drafts_in_one_graph_are_those_of_a_graph_for_each_level(
    kind: str, shape: str, params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = wrap_model(fresh("llama", **TARGET).cuda(), shapes=Shapes())
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **params)
    plain = [done.token_ids for done in LLM(target, "none").generate(PROMPTS, sampling)]
    if kind == "model":
        draft = f"model:{drafter_folder('llama', tmp_path, **TARGET | {'num_hidden_layers': 1})},{shape}"
    else:
        draft = f"head:{head_folder(tmp_path, kind)},{shape}"

    def drafted() -> tuple[list[tuple[int, int]], list[int]]:
        with counted_waits() as taken:
            waits: list[int] = []
            llm = LLM(target, draft, plan="fixed", on_round=lambda record: waits.append(taken()))
            done = llm.generate(PROMPTS, sampling)
            waits.clear()
            llm.generate(PROMPTS[:1], sampling)
        llm.engine.check_integrity()
        assert [text.token_ids for text in done] == plain
        return [(text.stats.rounds, text.stats.accepted_tokens) for text in done], waits

    together, waits = drafted()
    assert sorted(waits)[len(waits) // 2] <= 2, "one for the draft, one for the target; more only at ties"
    assert isinstance(target.model, HFModel)
    assert target.model.static is not None
    assert target.model.static.why_eager is None
    monkeypatch.setattr(HFModel, "grow", lambda *_: None)
    monkeypatch.setattr(TorchPasses, "grows", lambda *_: False)
    assert drafted()[0] == together


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Let every call that waits for the device raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_pass_waits_for_nothing() -> None:
    model = on_card("llama", Shapes())
    slot = filled(model, PROMPTS[1])
    for token in range(4):
        model.run(Pass([Extend(slot, [token, 7], [-1, -1])]))
        model.commit(slot, [1])
    torch.cuda.synchronize()
    with waiting_raises():
        model.run(Pass([Extend(slot, [9, 7], [-1, -1])]))
        model.commit(slot, [1])
    assert model.static is not None
    assert model.static.num_captured > 0


def test_memory_that_moves_is_captured_anew() -> None:
    model = on_card("llama", Shapes())
    assert model.static is not None
    slot = filled(model, PROMPTS[1])
    for count in (1, 2, 4, 1, 2, 4):
        model.run(Pass([Extend(slot, [5] * count, [-1] * count)]))
        model.commit(slot, ())
    assert model.static.num_captured == 4, "one of the prompt, and of 1, 2 and 4 rows"
    assert model.footprint.graphs == model.static.most_bytes > 0
    before = model.run(Pass([Extend(slot, [5], [-1])])).logits.tensor()
    model.commit(slot, ())
    model.reserve(8, 512)
    after = model.run(Pass([Extend(slot, [5], [-1])])).logits.tensor()
    assert torch.allclose(before, after, atol=1e-3)
    assert model.static.num_captured == 1


@pytest.mark.parametrize("order", [("target", "drafter"), ("drafter", "target")])
def test_two_models_do_not_write_into_each_others_logits(order: tuple[str, str]) -> None:
    models = {"target": on_card("llama", Shapes()), "drafter": on_card("gpt2", Shapes())}
    plain = {"target": on_card("llama", None), "drafter": on_card("gpt2", None)}
    slots = {name: filled(model, PROMPTS[1]) for name, model in models.items()}
    plain_slots = {name: filled(model, PROMPTS[1]) for name, model in plain.items()}
    for turn in range(6):
        found = {
            name: models[name].run(Pass([Extend(slots[name], [3 + turn, 7], [-1, -1])])).logits.tensor()
            for name in order
        }
        for name in order:
            wanted = plain[name].run(Pass([Extend(plain_slots[name], [3 + turn, 7], [-1, -1])])).logits.tensor()
            assert torch.allclose(found[name], wanted, atol=1e-3)
            models[name].commit(slots[name], [0])
            plain[name].commit(plain_slots[name], [0])


def test_measured_passes_are_replays() -> None:
    model = on_card("llama", Shapes())
    measured = measure_costs(model, max_rows=4, rows=(1, 4))
    assert model.static is not None
    assert model.static.num_captured >= 2
    assert all(seconds > 0 for seconds in measured.values())
