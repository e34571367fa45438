"""Divisions that are not possible are refused, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftree import LLM
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.torch.hf import HFModel
from draftree.parallel.groups import group_rank
from draftree.parallel.options import SINGLE, ParallelOptions
from draftree.parallel.settings import LoadSettings
from draftree.parallel.sharded import require_divisible
from draftree.parallel.shares import require_possible
from draftree.parallel.stages import Stage
from draftree.parallel.world import VARIABLES, World, own_rank
from families import COMMON, EXPERTS, fresh


@pytest.mark.parametrize("options", [{"tp": 0}, {"pp": -1}, {"tp": 1.5}, {"tp": True}])
def test_sizes_are_positive_integers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="integer of at least 1"):
        ParallelOptions(**options)


def test_strict_sums_need_several_processes() -> None:
    with pytest.raises(ConfigurationError, match="tp is 1"):
        ParallelOptions(pp=2, strict_sums=True)
    assert ParallelOptions(tp=2, pp=3, strict_sums=True).num_processes == 6
    assert not SINGLE.is_parallel


def config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(COMMON | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "options", "reason"),
    [
        (
            "llama",
            {},
            {"tp": 3},
            "2 key-value heads, which cannot be divided evenly among tp=3 processes: use tp of 1, 2",
        ),
        ("llama", {"num_key_value_heads": 1}, {"tp": 2}, "1 key-value heads.*use tp of 1"),
        ("llama", {}, {"pp": 3}, "2 layers, fewer than pp=3"),
        ("gpt2", {}, {"tp": 2}, "no tensor-parallel plan for 'name' of type 'gpt2'"),
        ("gpt2", {}, {"pp": 2}, "cannot divide the layers of 'name' of type 'gpt2'"),
    ],
)
def test_heads_and_layers_must_divide(kind: str, changes: dict[str, Any], options: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        require_divisible("name", config(kind, **changes), ParallelOptions(**options))


def test_sums_of_experts_cannot_be_ordered() -> None:
    require_divisible("name", config("qwen3"), ParallelOptions(tp=2, strict_sums=True))
    with pytest.raises(UnsupportedModelError, match="cannot order the sums"):
        require_divisible("name", config("mixtral", **EXPERTS), ParallelOptions(tp=2, strict_sums=True))


def test_without_torchrun_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fresh("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="torchrun --standalone --nproc-per-node 2 -m draftree"):
        LLM(tmp_path, tp=2)
    with pytest.raises(ConfigurationError, match="name or the folder"):
        LLM(HFModel(fresh("llama")), tp=2)
    for name in VARIABLES:
        monkeypatch.setenv(name, "3")
    assert own_rank(ParallelOptions(tp=2)) == 3


def test_the_number_of_processes_must_fit() -> None:
    world = World(0, 3, 0, 3, None)
    with pytest.raises(ConfigurationError, match="needs 2 processes, and 3 were started"):
        require_possible(world, ParallelOptions(tp=2), LoadSettings())
    with pytest.raises(ConfigurationError, match="have no stages"):
        require_possible(world, ParallelOptions(pp=3), LoadSettings(kernels="graphs"))
    require_possible(world, ParallelOptions(pp=3), LoadSettings())
    with pytest.raises(ConfigurationError, match="use tp or pp alone"):
        require_possible(World(0, 4, 0, 4, None), ParallelOptions(tp=2, pp=2), LoadSettings())


def test_rank_0_is_in_the_last_stage() -> None:
    options = ParallelOptions(tp=2, pp=3)
    assert [group_rank(rank, options) for rank in range(6)] == [4, 5, 0, 1, 2, 3]
    assert group_rank(0, ParallelOptions(tp=4)) == 0


def test_an_unknown_version_runs_the_forward_of_transformers() -> None:
    model = fresh("llama")
    for version in ("5.22.0", "6.0.0", "5.23.0"):  # and this model has no stages, whatever the version
        stage = Stage(model, version)
        assert not stage.is_own
        ids = torch.tensor([[3, 4]])
        logits = stage.logits(input_ids=ids, use_cache=False)
        assert logits is not None
        assert torch.equal(logits, model(input_ids=ids, use_cache=False).logits)
