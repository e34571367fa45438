"""A drafter that lost the race leaves nothing behind: no weights, no slots, and no hidden states of the target."""

from __future__ import annotations

import ctypes
import enum
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from families import drafter_folder
from target_heads import TARGET, head_folder

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [5, 6, 8, 9, 10, 11, 12, 13, 14]]
NATIVE = {"head_dim": 16, "intermediate": 64}


def reached(*roots: Any) -> dict[int, Any]:
    """Objects of this package, tensors and buffers that some objects refer to, by their ids."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        kind = type(thing)
        is_ours = kind.__module__.startswith("draftree.") and not isinstance(thing, type | enum.Enum)
        is_plain = kind in (dict, list, tuple, set) or isinstance(thing, torch.nn.Module | ctypes.Array)
        if id(thing) not in found and (is_ours or is_plain or issubclass(kind, torch.Tensor)):
            found[id(thing)] = thing
            waiting += gc.get_referents(thing)
    return found


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa", "model"])
def test_a_released_drafter_leaves_nothing_behind(kernels: str, kind: str, tmp_path: Path) -> None:
    target = drafter_folder("llama", tmp_path / "target", distance=0.0, **TARGET)
    model = load_model(target, dtype="float32", kernels=kernels)
    kept = f"head:{head_folder(tmp_path, 'eagle3.1', **NATIVE)}"
    sizes = NATIVE if kind != "medusa" else {}
    lost = f"model:{target}" if kind == "model" else f"head:{head_folder(tmp_path, kind, **sizes)}"
    plain = [text.token_ids for text in LLM(model, "none").generate(PROMPTS, PARAMS)]
    alone = LLM(model, kept)._parts
    llm = LLM(model, f"{kept}+{lost}", sequence_memory=10_000_000)
    assert [text.token_ids for text in llm.generate(PROMPTS, PARAMS)] == plain
    choice = llm._parts.drafters[0]
    winner, loser = choice.drafter._drafters
    owned = reached(loser)
    for shared in reached(model.model, winner):
        owned.pop(shared, None)
    has_keys = loser.footprint.token > 0
    weights = choice.drafter.footprint.weights - alone.drafters[0].drafter.footprint.weights
    assert sum(thing.nbytes for thing in owned.values() if isinstance(thing, torch.Tensor)) >= weights > 10_000
    references = [weakref.ref(thing) for thing in owned.values() if type(thing).__weakrefoffset__]
    assert len(references) > 20
    del winner, loser, owned
    choice.release(1, "slower")
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
    assert choice.drafter.footprint == alone.drafters[0].drafter.footprint
    assert llm._parts.capture == alone.capture, "nor are hidden states recorded for it"
    slots, longest = llm.engine.num_slots(100), llm.engine.slot_room
    assert [text.token_ids for text in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.slot_room > longest, "texts get its memory"
    assert not has_keys or llm.engine.num_slots(100) > slots
