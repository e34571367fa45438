"""On a GPU: a draft model in a CPU process works during the target's passes, and no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.drafters.wrappers.ahead import Overlap
from draftree.loading.transformers_model import wrap_model
from families import drafter_folder, fresh, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = prompts(5, 9, 17, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", ["ahead=1", "tree=best-8,ahead=3"])
def test_texts_are_those_of_the_target_alone(
    option: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overlap, "pays", lambda self, hits=0.0: True)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    target = wrap_model(fresh("llama").cuda())
    plain = [one.token_ids for one in LLM(target, "none").generate(PROMPTS, params)]
    llm = LLM(target, f"model:{drafter_folder('llama', tmp_path)},k=3,{option}", plan="fixed")
    assert [one.token_ids for one in llm.generate(PROMPTS, params)] == plain
    assert "drafting ahead is on" in llm.draft_note
