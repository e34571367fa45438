"""Passes in fixed shapes match passes of any shape: logits, texts, trees, batches, windows."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Commit, Extend, LayerSubset, Pass
from draftree.models.kv.slots import MIN_LENGTH
from draftree.models.torch import static as static_passes
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import CaptureError, Graphs, Shapes
from draftree.sampling.tree_search import TreeSearch, TreeWidths
from families import CACHED, SLOTTED, VOCAB_SIZE, drafter_folder, fresh, prompts, target
from slot_samples import filled

SMALL = Shapes()
PROMPTS = prompts(1, 8, 37)
TREES = [([7, 8, 9, 7, 30, 31], [-1, 0, 0, -1, 2, 4]), ([4, 5, 6], [-1, -1, -1]), ([11], [-1])]
EXPERTS = ("deepseek_v3", "gpt_oss")
"""Their products are not to be had in float64."""
WINDOWED = ["gemma2", "gpt_oss", "mistral", "qwen2-window"]


@functools.cache
def static(family: str) -> LoadedModel:
    return wrap_model(fresh(family), name=family, shapes=SMALL)


@pytest.mark.parametrize("family", SLOTTED)
def test_texts_are_those_of_dynamic_passes(family: str, models: Path) -> None:
    draft = f"ngram,min=1,k=3+model:{drafter_folder(family, models)},tree=2-2"
    llm = LLM(static(family), draft, plan="fixed")
    wanted = LLM(target(family), "none")
    assert llm.kernels == "graphs (there are no graphs on cpu)"
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=5)
        done = llm.generate(PROMPTS, params)
        assert [d.token_ids for d in done] == [d.token_ids for d in wanted.generate(PROMPTS, params)]
        assert sum(d.stats.accepted_tokens for d in done) > 0
    model = llm.model
    assert isinstance(model, HFModel)
    assert model.static is not None
    assert len(model.static.buckets) > 1, "the passes ran in fixed shapes"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["k=3", "tree=best-6,k=4", "tree=2-1-2"])
def test_a_draft_model_grows_the_trees_of_a_pass_for_each_level(
    shape: str, temperature: float, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = drafter_folder("llama", models)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    grown = []
    grow = HFModel.grow

    def counted(model: HFModel, *args: Any) -> Any:
        grown.append(trees := grow(model, *args))
        return trees

    def counts() -> list[Any]:
        llm = LLM(folder, f"model:{folder},{shape}", plan="fixed", kernels="graphs", dtype="float32", threads=1)
        done = llm.generate(PROMPTS, params)
        llm.engine.check_integrity()
        return [(d.token_ids, d.stats.rounds, d.stats.draft_tokens, d.stats.accepted_tokens) for d in done]

    monkeypatch.setattr(HFModel, "grow", counted)
    together = counts()
    assert None not in grown
    assert len(grown) > 5
    monkeypatch.setattr(HFModel, "grow", lambda *_: None)
    assert counts() == together


def test_a_short_tree_beside_a_deep_one_reads_no_position_after_the_last() -> None:
    model = HFModel(fresh("gpt2"), shapes=SMALL)
    slots = [filled(model, [3, 4, 5]), filled(model, [3 + i % 40 for i in range(model.max_length - 2)])]
    jobs = [Extend(slot, [7], [-1], logits_at=[0]) for slot in slots]
    searches = [TreeSearch(depth, [None] * depth, (), 0.0, -math.inf) for depth in (4, 1)]
    trees = model.grow(jobs, TreeWidths((1,) * 4, is_best=False), searches)
    assert trees is not None
    assert [len(tree.tokens) for tree in trees] == [4, 1]


def logits_of_rounds(model: HFModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """A batch of different trees, some grown in two passes, some committed, then one token more of each."""
    slots = [filled(model, text) for text in texts]
    jobs = [Extend(slot, *TREES[i % 3]) for i, slot in enumerate(slots)]
    found = [model.run(Pass(jobs)).logits.tensor()]
    growing = [slot for i, slot in enumerate(slots) if i % 3 == 0]
    found.append(model.run(Pass([Extend(slot, [50, 51], [5, 1]) for slot in growing])).logits.tensor())
    model.apply([Commit(slot, [[0, 2, 4, 5, 6], [2], [0]][i % 3]) for i, slot in enumerate(slots)])
    found.append(model.run(Pass([Extend(slot, [60 + i], [-1]) for i, slot in enumerate(slots[::-1])])).logits.tensor())
    model.truncate(slots[1], 2)
    model.commit(slots[0], [])
    found.append(
        model.run(Pass([Extend(slots[1], [9, 3], [-1, 0], logits_at=[1]), Extend(slots[0], [8], [-1])])).logits.tensor()
    )
    for slot in slots:
        model.close(slot)
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *WINDOWED])
def test_logits_of_trees_batches_and_windows_are_those_of_dynamic_passes(family: str) -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (40, 3, 11, 21, 8)]
    dtype, error = (torch.float32, 2e-4) if family in EXPERTS else (torch.float64, 1e-9)
    static_model, dynamic = (HFModel(fresh(family, dtype=dtype), shapes=shapes) for shapes in (SMALL, None))
    wanted = logits_of_rounds(dynamic, texts)
    assert torch.allclose(logits_of_rounds(static_model, texts), wanted, atol=error)
    assert torch.allclose(logits_of_rounds(static_model, texts), wanted, atol=error), "slots that were used before"


@torch.inference_mode()
def test_leftovers_of_a_rejected_node_have_no_effect() -> None:
    found = []
    for shapes in (SMALL, None):
        model = HFModel(fresh("llama"), shapes=shapes)
        model.model.get_input_embeddings().weight[13] = float("nan")
        slot = filled(model, [3, 4, 5])
        model.run(Pass([Extend(slot, [13, 13, 13], [-1, 0, 0])]))
        model.commit(slot, ())
        rows = [model.run(Pass([Extend(slot, [7], [-1])])).logits.tensor()[0]]
        model.commit(slot, [])
        sick = filled(model, [13, 13])
        model.close(sick)
        other = filled(model, [5])
        rows.append(model.run(Pass([Extend(other, [7], [-1]), Extend(slot, [8], [-1])])).logits.tensor().sum(dim=0))
        found.append(torch.stack(rows))
    assert bool(found[0].isfinite().all())
    assert torch.allclose(found[0], found[1], atol=1e-4)


def test_passes_over_more_rows_or_nodes_run_as_they_come() -> None:
    for limits in (Shapes(max_nodes=4), Shapes(max_rows=4)):
        model = HFModel(fresh("llama"), shapes=limits)
        assert model.static is not None
        slot = filled(model, list(range(3, 20)))
        assert model.static.buckets == ()
        model.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 0])]))
        assert len(model.static.buckets) == 1
        rest = range(5, 10) if limits.max_rows == 4 else [5]
        model.run(Pass([Extend(slot, list(rest), [0] * len(rest))]))
        assert len(model.static.buckets) == 1


def test_trees_deeper_than_a_window_run_as_they_come() -> None:
    model, dynamic = (HFModel(fresh("mistral"), shapes=shapes) for shapes in (SMALL, None))
    assert model.static is not None
    found = []
    for one in (model, dynamic):
        slot = filled(one, [5, 6])
        found.append(one.run(Pass([Extend(slot, list(range(3, 15)), range(-1, 11))])).logits.tensor())
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert not any(bucket.rows == 12 for bucket in model.static.buckets)


def test_graphs_are_dropped_when_the_memory_moves() -> None:
    model = HFModel(fresh("llama"), shapes=SMALL)
    assert model.static is not None
    model.reserve(4, 64)
    slot = model.open()
    for count in (1, 2, 4, 2):
        model.run(Pass([Extend(slot, [5] * count, range(-1, count - 1))]))
        model.commit(slot, ())
    assert [bucket.rows for bucket in model.static.buckets] == [1, 2, 4]
    model.reserve(4, MIN_LENGTH + 1)
    model.run(Pass([Extend(slot, [5], [-1])]))
    assert [bucket.rows for bucket in model.static.buckets] == [1], "captured memory moved"


class Recorded(Graphs):
    """Like graphs: what is captured is done again in every replay."""

    def __init__(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


class Refusing(Recorded):
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise CaptureError("operation not permitted when stream is capturing")


def test_shapes_are_captured_when_they_are_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_passes, "graphs_of", lambda device: Recorded())
    model, dynamic = (HFModel(fresh("gemma2"), shapes=shapes) for shapes in (SMALL, None))
    assert model.static is not None
    captured, wanted = [], []
    for one, rows in ((model, captured), (dynamic, wanted)):
        slot = filled(one, PROMPTS[2])
        for token in range(5, 22):
            rows.append(one.run(Pass([Extend(slot, [token, 3], [-1, -1])])).logits.tensor())
            one.commit(slot, [0])
    assert torch.allclose(torch.cat(captured), torch.cat(wanted), atol=2e-4)
    assert model.static.num_captured == 1, "the prompt is longer than a window"
    model.reserve(1, MIN_LENGTH + 1)
    assert model.run(Pass([Extend(slot_of(model), [5], [-1])])).logits.tensor().isfinite().all()
    assert model.static.num_captured == 2


def slot_of(model: HFModel) -> Any:
    return filled(model, [3, 4])


def test_shapes_that_fail_to_capture_run_uncaptured_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(static_passes, "graphs_of", lambda device: Refusing())
    model = HFModel(fresh("llama"), shapes=SMALL)
    slot = filled(model, [3, 4, 5])
    with caplog.at_level(logging.WARNING, logger=static_passes.__name__):
        rows = [model.run(Pass([Extend(slot, [6], [-1])])).logits.tensor()]
        model.commit(slot, ())
        rows += [model.run(Pass([Extend(slot, [6], [-1])])).logits.tensor()]
        model.commit(slot, ())
        rows += [model.run(Pass([Extend(slot, [6], [-1])])).logits.tensor()]
    assert torch.allclose(rows[0], rows[1], atol=1e-4)
    assert torch.allclose(rows[1], rows[2], atol=1e-4)
    assert [record.message for record in caplog.records] == [
        "passes run operator by operator from now on, since a pass could not be captured: "
        "operation not permitted when stream is capturing"
    ]


def test_whole_passes_continue_from_partial_ones() -> None:
    model = HFModel(fresh("llama"), shapes=SMALL)
    slot = filled(model, [3, 4, 5])
    whole = model.run(Pass([Extend(slot, [6, 7], [-1, 0])])).logits.tensor()
    model.commit(slot, ())
    model.run(Pass([Extend(slot, [6], [-1])], LayerSubset(end=1)))
    assert torch.allclose(model.run(Pass([Extend(slot, [6, 7], [-1, 0])])).logits.tensor(), whole, atol=1e-4)


def test_names_and_refusals(tmp_path: Path) -> None:
    folder = drafter_folder("llama", tmp_path)
    loaded = load_model(folder, dtype="float32", kernels="graphs")
    assert loaded.kernels == "graphs (there are no graphs on cpu)"
    assert not loaded.model.is_exact, "float32 products add up another way with more rows"
    assert LLM(fresh("llama"), "none", kernels="graphs").kernels.startswith("graphs")
    with pytest.raises(ConfigurationError, match="needs native kernels"):
        LLM(folder, "none", kernels="graphs", quantization="int8")
    with pytest.raises(ConfigurationError, match="already loaded"):
        LLM(target("llama"), "none", kernels="graphs")
    with pytest.raises(ConfigurationError, match="exact was requested"):
        LLM(folder, "none", kernels="graphs", dtype="float32", exact=True)
    with pytest.raises(UnsupportedModelError, match="use kernels 'torch'"):
        LLM(fresh(sorted(CACHED)[0]), "none", kernels="graphs")
    with pytest.raises(ConfigurationError, match="max_rows"):
        Shapes(max_rows=0)
