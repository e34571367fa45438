"""Which models run on native kernels after loading, which do not, and why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.drafters.model import model_reader
from draftree.loading.load import load_model
from draftree.loading.lowering import lower_model
from draftree.models.native import decoder
from draftree.models.native.blueprint import RMS_NORM, read_ropes
from draftree.models.native.build import NativeUnavailableError, built_library
from draftree.models.native.describe import plan_model
from draftree.models.native.library import Library
from draftree.models.native.modules import NormFacts
from draftree.models.torch.hf import HFModel
from families import drafter_folder, fresh
from native_samples import SIZES, lower, text
from slot_samples import alone

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

OTHERS = {
    "deepseek_v3": "size of a head of 12",
    "gemma4_text": "sizes of their own",
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_are_left_whole(family: str) -> None:
    model = fresh(family)
    lm = HFModel(model)
    before = alone(lm, text(5))
    with pytest.raises(NativeUnavailableError, match=OTHERS[family]):
        lower(lm)
    assert torch.equal(alone(lm, text(5)), before)


def test_a_context_of_any_length_is_compared_at_few_positions() -> None:
    rotary = fresh("llama").model.rotary_emb
    counts = []
    rotary.register_forward_pre_hook(lambda module, inputs: counts.append(inputs[1].numel()))
    read_ropes(rotary, [""], context=10**9)
    assert counts[0] < 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": 40, "head_dim": 16}, "hidden size of 40"), ({"head_dim": 8}, "size of a head of 8")],
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NativeUnavailableError, match=message):
        lower(HFModel(fresh("llama", **(SIZES | change))))


def test_a_parameter_of_unknown_use_is_refused() -> None:
    model = fresh("llama", **SIZES)
    model.model.layers[1].strange = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(NativeUnavailableError, match="unknown use"):
        lower(HFModel(model))


def test_a_model_without_perceptrons_is_refused_by_this_reason() -> None:
    model = fresh("mamba2", num_heads=4, head_dim=16, state_size=16, n_groups=1)
    del model.config.num_attention_heads, model.config.num_key_value_heads  # which it does not have
    with pytest.raises(NativeUnavailableError, match="none of its layers has a perceptron"):
        plan_model(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return drafter_folder("llama", tmp_path, distance=0.0, **SIZES)


def test_a_loaded_model_runs_in_c_and_reports_it(folder: Path) -> None:
    llm = LLM(folder, "none", exact=True)
    assert llm.is_exact
    assert llm.kernels.startswith("native (")
    assert load_model(folder, kernels="torch").kernels == "torch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["ngram,min=1", "model:{}", "model:{},tree=best-9"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_changes_a_text(folder: Path, tmp_path: Path, dtype: str, draft: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=4)
    prompts = [text(9), text(60), text(3)]
    plain = LLM(folder, "none", dtype=dtype, exact=True).generate(prompts, params)
    drafter = drafter_folder("llama", tmp_path, **SIZES)
    done = LLM(folder, draft.format(drafter), dtype=dtype, exact=True, plan="fixed").generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted_tokens for one in done) > 0


def test_a_model_with_other_native_logits_is_reloaded_for_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = load_model(folder, dtype="float32", kernels="torch").model
    wrong = NormFacts(RMS_NORM, 0.0, 3.0, has_bias=False)
    for name in ("describe", "modules"):
        monkeypatch.setattr(f"draftree.models.native.{name}.norm_facts", lambda norm: wrong)
    loaded = load_model(folder, dtype="float32")
    assert loaded.kernels == "torch"
    assert "differ" in str(loaded.fallback_reason)
    assert torch.allclose(alone(loaded.model, text(6)), alone(wanted, text(6)), atol=1e-4)
    with pytest.raises(ConfigurationError, match="differ"):
        load_model(folder, dtype="float32", kernels="native")


def test_without_a_compiler_passes_run_through_torch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))  # else a library that is built already is used
    monkeypatch.setattr(decoder, "library", lambda: Library(built_library()))
    loaded = load_model(folder)
    assert loaded.kernels == "torch"
    assert "no-such-compiler" in str(loaded.fallback_reason)
    with pytest.raises(ConfigurationError, match=r"exact was requested.*no-such-compiler"):
        LLM(folder, "none", exact=True)
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        LLM(folder, "none", kernels="native")
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        LLM(folder, "none", quantization="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "cuda"}, "unknown kernels 'cuda'"),
        ({"quantization": "int3"}, "unknown quantization 'int3'"),
        ({"quantization": "int8", "kernels": "torch"}, "needs native kernels"),
        ({"quantization": "int8", "dtype": "float64"}, "float32, bfloat16, float16"),
    ],
)
def test_impossible_requests_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(folder, **options)  # type: ignore[arg-type]


def test_a_loaded_model_keeps_its_weights() -> None:
    with pytest.raises(ConfigurationError, match="already loaded"):
        LLM(fresh("llama", **SIZES), "none", kernels="native")


def test_int8_is_announced(folder: Path) -> None:
    llm = LLM(folder, "none", quantization="int8", exact=True)
    assert (llm.quantization, llm.is_exact) == ("int8", True)
    assert lower_model(fresh("llama", **SIZES), quantization="int8").quantization == "int8"


def draft_quantization(folder: Path, other: Path, **options: Any) -> str | None:
    """Quantization of the weights of a draft model."""
    target = load_model(folder, dtype="float32", **options)
    read = model_reader(target, "float32", "cpu", kernels="auto", trust_remote_code=False)
    return getattr(read(str(other)).model, "quantization", None)


def test_a_draft_model_has_8_bits_if_the_target_has(folder: Path, tmp_path: Path) -> None:
    assert draft_quantization(folder, folder) is None
    assert draft_quantization(folder, folder, quantization="int8") == "int8"
    fresh("gpt2").save_pretrained(tmp_path / "gpt2")
    assert draft_quantization(folder, tmp_path / "gpt2", quantization="int8") is None, "it has no native kernels"
