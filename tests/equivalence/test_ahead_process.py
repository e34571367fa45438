"""A draft model in a process of its own: texts are those of plain decoding, and the process ends with its user."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ModelLoadError
from draftree.drafters.wrappers.ahead import Overlap
from draftree.loading import apart
from draftree.options import ModelOptions
from families import drafter_folder, fresh, prompts


@pytest.mark.parametrize("pays", [True, False])
def test_texts_are_those_of_plain_decoding(pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlap, "pays", lambda self, hits=0.0: pays)
    started = []
    popen = apart.subprocess.Popen
    monkeypatch.setattr(apart.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    folder = drafter_folder("llama", tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=2, ignore_eos=True)
    model = fresh("llama")
    plain = [one.token_ids for one in LLM(model, "none").generate(prompts(5, 9), params)]
    llm = LLM(model, f"model:{folder},k=3,ahead=1", plan="fixed")
    assert [one.token_ids for one in llm.generate(prompts(5, 9), params)] == plain
    assert f"drafting ahead is {'on' if pays else 'off'}" in llm.draft_note
    (process,) = started
    assert process.poll() is None
    del llm
    gc.collect()
    assert process.wait(300) == 0


def test_texts_go_on_when_the_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlap, "pays", lambda self, hits=0.0: True)
    started = []
    popen = apart.subprocess.Popen
    monkeypatch.setattr(apart.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    model, texts = fresh("llama"), prompts(5, 9, 4, 7)
    plain = [one.token_ids for one in LLM(model, "none").generate(texts, params)]
    llm = LLM(model, f"model:{drafter_folder('llama', tmp_path)},k=3,ahead=1", plan="fixed")
    (process,) = started

    def kill(update: Any) -> None:
        if process.poll() is None and len(update.token_ids):
            process.kill()
            process.wait()

    assert [one.token_ids for one in llm.generate(texts, params, on_update=kill)] == plain
    assert process.returncode == -signal.SIGKILL
    assert "drafting has ended" in llm.draft_note
    llm.engine.check_integrity()
    assert [one.token_ids for one in llm.generate(texts, params)] == plain, "without drafts"


def test_a_model_that_is_missing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="process of its own"):
        apart.load_apart(ModelOptions(str(tmp_path), device="cpu", threads=1))
