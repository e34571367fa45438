"""Damaged checkpoints of 4 bits give one clear error: no other exception, and no crash of native kernels."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftree.core.errors import DraftreeError, ModelLoadError, UnsupportedModelError
from draftree.loading.load import load_model
from draftree.weights.packed_checkpoint import PackedCheckpoint
from packed_samples import AWQ, COMPRESSED, GPTQ, awq, compressed, gptq, packed_folder
from private_cache import private_cache

Tensors = dict[str, Tensor]
METHODS: dict[str, tuple[dict[str, Any], Callable[..., Tensors]]] = {
    "gptq": (GPTQ, gptq),
    "awq": (AWQ, awq),
    "compressed-tensors": (COMPRESSED, compressed),
}
STEM = "model.layers.0.mlp.down_proj."
ODD: tuple[Any, ...] = (None, True, 0, -1, 1, 3, 8, 16, 64, 1 << 40, 0.5, "", "b", [], ["a"], {}, {"a": "b"}, {"a": {}})
DTYPES = (torch.int8, torch.int16, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32, torch.bfloat16)


def cut(value: Tensor, side: int, size: int) -> Tensor:
    return value.narrow(side, 0, size).contiguous()


DAMAGE: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "no groups": ("gptq", "scales", lambda value: cut(value, 0, 0), "two dimensions that are not empty"),
    "codes of float32": ("gptq", "qweight", Tensor.float, "needs the type I32"),
    "codes of 8 bits": ("gptq", "qweight", lambda value: value.to(torch.int8), "needs the type I32"),
    "scales of integers": ("gptq", "scales", Tensor.int, "needs the type F16 or"),
    "half of the groups": ("gptq", "scales", lambda value: cut(value, 0, 2), "groups of 64 of the 256 inputs"),
    "small groups": ("awq", "scales", lambda value: value.repeat_interleave(4, 0), "groups of 64 of the 256 inputs"),
    "half of the zeros": ("awq", "qzeros", lambda value: cut(value, 0, 2), r"needs the shape \[4, 16\]"),
    "a row of codes": ("awq", "qweight", lambda value: value[0], "two dimensions"),
    "a short order": ("gptq", "g_idx", lambda value: value[:9], r"the shape \[256\]"),
    "another shape": (
        "compressed-tensors",
        "weight_shape",
        lambda value: value + 8,
        r"the shape \[136, 264\] of 'weight_shape'",
    ),
    "a shape of text": ("compressed-tensors", "weight_shape", Tensor.float, "needs two numbers"),
    "zeros of float32": ("compressed-tensors", "weight_zero_point", Tensor.float, "needs the type I32"),
}
SETTINGS: dict[str, tuple[str, Any]] = {
    "a group of text": ("config_groups", {"a": "b"}),
    "weights of text": ("config_groups", {"a": {"weights": "b"}}),
    "groups in a list": ("config_groups", ["a"]),
}


@pytest.fixture(params=METHODS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    settings, pack = METHODS[request.param]
    return packed_folder(tmp_path, settings, pack, symmetric=False)[0]


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    return found


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_tensors_are_refused_with_the_name_of_the_module(name: str, tmp_path: Path) -> None:
    method, part, change, words = DAMAGE[name]
    settings, pack = METHODS[method]
    folder, _ = packed_folder(tmp_path, settings, pack, symmetric=False)
    found = load_file(folder / "model.safetensors")
    found[f"{STEM}{part}"] = change(found[f"{STEM}{part}"]).contiguous()
    save_file(found, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=words) as refused:
        PackedCheckpoint(folder, settings)
    assert STEM.removesuffix(".") in str(refused.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_another_type_are_refused(name: str, tmp_path: Path) -> None:
    setting, value = SETTINGS[name]
    with pytest.raises(ModelLoadError, match=r"setting 'config_groups.* and not an object"):
        PackedCheckpoint(tmp_path, COMPRESSED | {setting: value})


def changed_setting(settings: dict[str, Any], tensors: Tensors, choose: random.Random) -> None:
    """Replace, remove or add a setting at any depth."""
    where = settings
    while (inner := [value for value in where.values() if isinstance(value, dict) and value]) and choose.random() < 0.7:
        where = choose.choice(inner)
    key = choose.choice([*where, "transform_config", "dynamic", "extra_config", "checkpoint_format", "actorder"])
    if choose.random() < 0.2:
        where.pop(key, None)
    else:
        where[key] = choose.choice(ODD)


def changed_dtype(settings: dict[str, Any], tensors: Tensors, choose: random.Random) -> None:
    key = choose.choice(sorted(tensors))
    tensors[key] = tensors[key].to(choose.choice(DTYPES))


def changed_shape(settings: dict[str, Any], tensors: Tensors, choose: random.Random) -> None:
    """Shorten, repeat, reshape or transpose a tensor."""
    key = choose.choice(sorted(tensors))
    value, side = tensors[key], choose.randrange(tensors[key].dim())
    actions: list[Callable[[], Tensor]] = [
        lambda: cut(value, side, choose.randrange(value.shape[side])),
        lambda: value.repeat_interleave(2, side),
        value.flatten,
        lambda: value[None],
        lambda: value.T if value.dim() == 2 else value[:1].squeeze(),
    ]
    tensors[key] = choose.choice(actions)()


def changed_numbers(settings: dict[str, Any], tensors: Tensors, choose: random.Random) -> None:
    key = choose.choice(sorted(key for key in tensors if key.endswith(("shape", "g_idx", "scales", "scale"))))
    value = tensors[key].clone().flatten()
    value[choose.randrange(len(value))] = choose.choice([0, -1, 1, 65_504, 3])
    tensors[key] = value.view_as(tensors[key])


def changed_name(settings: dict[str, Any], tensors: Tensors, choose: random.Random) -> None:
    """Remove a tensor, or give it the name of another part."""
    key = choose.choice(sorted(tensors))
    value = tensors.pop(key)
    if choose.random() < 0.5:
        tensors[f"{key.rpartition('.')[0]}.{choose.choice(sorted(tensors)).rpartition('.')[2]}"] = value


CHANGES = (changed_setting, changed_dtype, changed_shape, changed_numbers, changed_name)


def write_mutant(source: Path, target: Path, seed: int) -> dict[str, Any]:
    """Write a checkpoint with one or two changes and return its settings."""
    choose = random.Random(seed)
    settings, tensors = settings_of(source), load_file(source / "model.safetensors")
    for _ in range(choose.randint(1, 2)):
        choose.choice(CHANGES)(settings, tensors, choose)
    shutil.copytree(source, target, dirs_exist_ok=True)
    whole = {key: value.clone().contiguous() for key, value in tensors.items()}
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": copy.deepcopy(settings)}), "utf-8")
    return settings


def test_changed_checkpoints_are_read_or_refused(folder: Path, tmp_path: Path) -> None:
    outcomes = Counter[str]()
    for seed in range(150):
        settings = write_mutant(folder, tmp_path / "mutant", seed)
        try:
            found = PackedCheckpoint(tmp_path / "mutant", settings)
            for name in found.sources:
                assert found.values(name).shape == found.shape(name), f"seed {seed}: {name}"
            outcomes["read"] += 1
        except (ModelLoadError, UnsupportedModelError) as error:
            outcomes[type(error).__name__] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert outcomes["read"] > 15
    assert outcomes["ModelLoadError"] > 30
    assert outcomes["UnsupportedModelError"] > 5


@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
def test_changed_checkpoints_are_loaded_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    outcomes = Counter[str]()
    for seed in range(1000, 1015):
        write_mutant(folder, tmp_path / "mutant", seed)
        try:
            load_model(tmp_path / "mutant", dtype="float32")
            outcomes["read"] += 1
        except DraftreeError:
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert outcomes["refused"] > 5
