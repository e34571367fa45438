"""An exit head that goes on learning on the device: texts stay those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from split_devices import SPLIT, split_device, split_folder, split_server, whole_texts
from verify_clients import PARAMS, PROMPTS, texts_of

ALWAYS = "rate=0.5,share=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_folder(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("draft", [f"early-exit:{SPLIT}", f"early-exit:{SPLIT},tree=best-8"])
@pytest.mark.parametrize("where", ["native", "torch", "split"])
def test_texts_stay_the_same_while_an_exit_learns(folder: Path, draft: str, where: str) -> None:
    wanted = whole_texts(folder, PROMPTS, PARAMS, kernels="torch" if where == "torch" else "auto")
    options: dict[str, Any] = {"plan": "fixed", "learn": f"server,{ALWAYS}"}
    if where == "split":
        with split_server(folder) as server, split_device(server, folder, draft, **options) as llm:
            check_learning(llm, wanted)
    else:
        check_learning(LLM(str(folder), draft, dtype="float32", kernels=where, **options), wanted)


def check_learning(llm: LLM, wanted: list[list[int]]) -> None:
    for _ in range(3):
        assert texts_of(llm) == wanted
    assert llm.learned is not None
    (stats,) = llm.learned.stats
    assert stats.tokens > 0
    assert stats.base_acceptance is not None
    llm.engine.check_integrity()
    llm.forget()
    assert llm.learned.stats[0].size == 0


def test_a_repeated_text_is_drafted_better(folder: Path) -> None:
    """The exit of a random model knows little of its last layers; after the same texts again and again it does."""
    params = [SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)] * len(PROMPTS)
    llm = LLM(str(folder), f"early-exit:{SPLIT}", dtype="float32", plan="fixed", learn=f"server,{ALWAYS}")
    texts = [texts_of(llm, PROMPTS, params) for _ in range(12)]
    assert texts == [texts[0]] * 12
    assert llm.learned is not None
    (stats,) = llm.learned.stats
    assert stats.active == 1
    assert stats.base_acceptance is not None
    assert stats.learned_acceptance is not None
    assert stats.learned_acceptance > stats.base_acceptance
