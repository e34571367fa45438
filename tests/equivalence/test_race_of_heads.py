"""`draft="auto"` with a shipped head, a copy of it with other weights, and one without a record, on a real model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftree import LLM, SamplingParams
from draftree.heads.shipped import head_folder
from draftree.lab.bench.workload import encode, read_workload
from draftree.loading.load import load_model
from real_weights import folder_of

TARGET = "smollm2-135m-instruct"
MOST_TEXTS = 30


def spoil(folder: Path) -> None:
    """Shuffle the weights of a head, as if it were for another revision of its target."""
    order = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() > 1:
            shuffled = tensor.flatten()[torch.randperm(tensor.numel(), generator=order)]
            tensors[name] = shuffled.reshape(tensor.shape).contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.weights
def test_the_good_head_wins_and_the_others_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(TARGET)
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path))
    for name in ("other", "unknown"):
        folder = tmp_path / "drafters" / name
        shutil.copytree(head_folder(TARGET), folder)
        spoil(folder)
    for file in ("confidence.json", "recipe.json", "manifest.json"):
        (folder / file).unlink()
    model = load_model(TARGET)
    auto, plain = LLM(model), LLM(model, "none")
    names = [f"head:{name}" for name in (TARGET, tmp_path / "drafters" / "other", tmp_path / "drafters" / "unknown")]
    assert auto.drafts == ("+".join((*names, "suffix")),)
    tasks = read_workload().tasks
    for number in range(MOST_TEXTS):
        ids, _ = encode(tasks[number % len(tasks)], auto.tokenizer)
        params = SamplingParams(max_tokens=64, temperature=0.5, seed=number)
        (text,), (expected,) = auto.generate([ids], params), plain.generate([ids], params)
        assert text.token_ids == expected.token_ids
        if len(auto.planner.standings()) == 1:
            break
    (left,) = auto.planner.standings()
    assert (left.part, left.num_hits > 10) == (0, True)
    assert f"drafter '{names[1]}' was right in " in auto.draft_note
    assert auto.draft_note.count("it may belong to another revision of the model") == 2
    assert auto.planner.explain().count("released, slower than") == 2
    assert text.stats.explain.count("released, slower than") == 2, "the text's statistics say it too"
