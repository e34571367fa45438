"""Loading: devices and dtypes are resolved or refused by name, and a damaged folder never becomes a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftree.core.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from draftree.loading import transformers_model
from draftree.loading.load import load_model
from draftree.loading.loaded import eos_ids_of, kernels_of_drafter
from draftree.loading.options import has_native_bfloat16, resolve_device, resolve_dtype
from draftree.loading.transformers_model import READING, read_model, wrap_model
from draftree.models.table import TableLM, hashed
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from families import ENCODERS, drafter_folder, fresh, peer, target
from slot_samples import at_once

CPU = torch.device("cpu")
WEIGHT = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    peer("llama").save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = {name: weight.clone() for name, weight in load_file(folder / "model.safetensors").items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_auto_device_exists() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "not known to torch"),
        ("", "not known to torch"),
        ("cuda:99", "this machine has . devices of type cuda"),
        ("mps:1", "this machine has . devices of type mps"),
        ("meta", "not supported"),
    ],
)
def test_a_missing_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_device(device)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_by_name_and_as_objects(kind: torch.dtype) -> None:
    assert resolve_dtype(str(kind).removeprefix("torch."), CPU) is kind
    assert resolve_dtype(kind, CPU) is kind


def test_auto_dtype_is_what_the_device_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", CPU) is (torch.bfloat16 if has_native_bfloat16(CPU) else torch.float32)
    for computes_in_it, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda computes=computes_in_it, **_: computes)
        assert resolve_dtype("auto", torch.device("cuda")) is expected


@pytest.mark.parametrize("dtype", ["float", "bf16", "int8", torch.int8, 32])
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown dtype .* bfloat16"):
        resolve_dtype(dtype, CPU)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_folder_is_loaded_in_the_dtype_that_was_asked_for(folder: Path, dtype: str) -> None:
    loaded = load_model(folder, dtype=dtype, device="cpu")
    assert (loaded.model.dtype, loaded.model.device, loaded.folder) == (resolve_dtype(dtype, CPU), CPU, folder)
    scores = at_once(loaded.model, [5, 6, 7])
    assert scores.dtype is (torch.float64 if dtype == "float64" else torch.float32)
    wanted = at_once(target("llama"), [5, 6, 7])
    assert torch.allclose(scores.float(), wanted, atol=0.25 if dtype.endswith("16") else 1e-4)


@pytest.mark.parametrize(
    "change", [lambda weights: weights.pop(WEIGHT), lambda weights: weights.update({WEIGHT: torch.zeros(3, 4)})]
)
def test_a_missing_or_misshapen_weight_is_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], folder: Path
) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelLoadError, match=rf"1 of its weights .*{WEIGHT}.*copy the model again"):
        load_model(folder)


def test_a_surplus_weight_does_no_harm(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.not_of_this_kind": torch.zeros(3)}))
    loaded = load_model(folder, dtype="float64", kernels="torch").model
    assert isinstance(loaded, HFModel)
    given, wanted = loaded.model.state_dict(), target("llama").model.state_dict()
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], wanted[name].double()) for name in wanted)
    assert torch.allclose(at_once(loaded, [4]).float(), at_once(target("llama"), [4]), atol=1e-4)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def set_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        lambda folder: set_config(folder, model_type="no_such_kind"),
        lambda folder: set_config(folder, hidden_size="wide"),
        lambda folder: set_config(folder, model_type={}, is_encoder_decoder=True),
        lambda folder: set_config(folder, num_hidden_layers=3),
        lambda folder: set_config(folder, hidden_act="no_such_function"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "setting"),
    [("gpt2", {"n_positions": 10**7}), ("opt", {"max_position_embeddings": 10**9}), ("gptj", {"n_positions": 10**8})],
)
def test_a_configuration_larger_than_its_files_is_refused_before_anything_is_allocated(
    family: str, setting: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(family).save_pretrained(tmp_path)
    set_config(tmp_path, **setting)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("the model is built"))
    with pytest.raises(ModelLoadError, match=r"describes a model of .* and its weight files have .* copy the model"):
        load_model(tmp_path)


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "free_memory", lambda device: 30_000)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("the model is built"))
    with pytest.raises(ModelLoadError, match=r"takes 0\.0 GB, and 0\.0 GB are free on cpu: .*offload"):
        load_model(folder)


def test_end_of_text_ids_come_from_the_generation_settings_first() -> None:
    model = fresh("llama", eos_token_id=7)
    model.generation_config.eos_token_id = [3, 4]
    assert wrap_model(model).eos_ids == (3, 4)
    model.generation_config.eos_token_id = None
    assert wrap_model(model).eos_ids == (7,)
    model.config.eos_token_id = None
    assert wrap_model(model).eos_ids == ()


def test_end_of_text_ids_of_the_tokenizer_come_last() -> None:
    for of_model, of_tokenizer, expected in (((3, 4), 5, (3, 4)), ((), 5, (5,)), ((), None, ()), ((3,), None, (3,))):
        loaded: Any = SimpleNamespace(eos_ids=of_model)
        tokenizer: Any = SimpleNamespace(eos_token_id=of_tokenizer)
        assert eos_ids_of(loaded, tokenizer) == expected
        assert eos_ids_of(loaded, None) == of_model


def test_a_family_that_falls_back_keeps_its_own_attention() -> None:
    model = fresh("qwen2_moe")
    before = model.config._attn_implementation
    assert isinstance(wrap_model(model).model, CachedModel)
    assert model.config._attn_implementation == before


def test_a_model_that_raises_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such expert\nand more")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM fails in its own forward pass .*no such expert"):
        wrap_model(model)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="other logits token by token than in one pass"):
        wrap_model(fresh(family))


def test_a_model_may_be_wrapped_twice_and_stays_usable() -> None:
    model = fresh("gemma2")
    tokens = list(range(3, 20))
    before = model(torch.tensor([tokens])).logits[0]
    first, second = wrap_model(model).model, wrap_model(model).model
    assert isinstance(first, HFModel)
    assert isinstance(second, HFModel)
    for found in (at_once(first, tokens), at_once(second, tokens), model(torch.tensor([tokens])).logits[0]):
        assert torch.allclose(found, before, atol=1e-4)


def can_read() -> bool:
    """Whether another thread could read a model now."""

    def acquire() -> bool:
        if not READING.acquire(blocking=False):
            return False
        READING.release()
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(acquire).result()


def test_other_threads_wait_while_a_model_is_read(tmp_path: Path) -> None:
    peer("llama").save_pretrained(tmp_path)
    seen = []

    class Reader:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> Any:
            seen.append(can_read())
            return AutoModelForCausalLM.from_pretrained(folder, **options)

    read_model(tmp_path, torch.float32, CPU, reader=Reader)
    assert seen == [False]
    assert can_read()


def test_classes_of_transformers_are_unchanged_after_several_threads(tmp_path: Path) -> None:
    peer("llama").save_pretrained(tmp_path)
    before, barrier, found = PreTrainedModel.tie_weights, threading.Barrier(4), []

    def read() -> None:
        barrier.wait(60)
        found.append(read_model(tmp_path, torch.float32, CPU))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert PreTrainedModel.tie_weights is before


@pytest.mark.parametrize(
    ("model", "kernels", "of_drafter"),
    [
        ("a LanguageModel", "auto", "auto"),
        ("of transformers", "auto", "auto"),
        ("of transformers", "torch", "torch"),
        ("of transformers", "graphs", "graphs"),
        ("folder", "auto", "auto"),
        ("folder", "torch", "torch"),
        ("loaded", "auto", "auto"),
        ("loaded with torch", "auto", "torch"),
    ],
)
def test_a_drafter_follows_a_choice_and_nothing_else(model: str, kernels: str, of_drafter: str, tmp_path: Path) -> None:
    folder = drafter_folder("llama", tmp_path)
    given: dict[str, Any] = {
        "a LanguageModel": lambda: TableLM(hashed(8, seed=1)),
        "of transformers": lambda: fresh("llama"),
        "folder": lambda: folder,
        "loaded": lambda: load_model(folder),
        "loaded with torch": lambda: load_model(folder, kernels="torch"),
    }
    target = load_model(given[model](), kernels=kernels)
    assert kernels_of_drafter(target) == of_drafter


@pytest.mark.parametrize(("kernels", "family"), [("torch", "qwen3_next"), ("native", "qwen3_5")])
def test_transformers_advises_nothing_that_a_cpu_cannot_follow(kernels: str, family: str, tmp_path: Path) -> None:
    """Its warnings appear once in a process, so that this needs one of its own."""
    lines = [
        "import sys; from pathlib import Path; from draftree import LLM, SamplingParams",
        "from families import fresh; from vision_folders import picture, vision_folder",
        "where, kernels, family = Path(sys.argv[1]), *sys.argv[2:]",
        "prompt = [1, 2, 3, 4, 5, 2, 3]",
        "if kernels == 'native':",
        "    where = vision_folder(family, where, is_wide=True)",
        "    words = {'type': 'text', 'text': 'w5 w6'}",
        "    prompt = [{'role': 'user', 'content': [{'type': 'image', 'image': picture(1)}, words]}]",
        "else:",
        "    fresh(family).save_pretrained(where)",
        "llm = LLM(where, 'ngram,min=1', dtype='float32', kernels=kernels, plan='fixed')",
        "write = llm.chat if kernels == 'native' else llm.generate",
        "write(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))",
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path), kernels, family]
    support = str(Path(__file__).parents[2] / "support")
    path = os.pathsep.join([support, *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "[transformers]" not in done.stderr
