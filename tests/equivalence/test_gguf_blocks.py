"""GGUF files run on their own blocks: logits of their values, exact texts, no dequantized copy."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from block_files import written
from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import is_block_file, prepared_folder, resolve_model
from draftree.weights.gguf_file import KINDS
from native_samples import in_c
from second_starts import logits as logits_of
from slot_samples import at_once
from weights_samples import PIECES

pytestmark = [in_c, pytest.mark.usefixtures("store")]


PROMPTS = ["the and on", "an in"]


def require_like_its_values(path: Path, share: float = 0.02) -> LoadedModel:
    """Require the logits of the file's values in the memory of its blocks."""
    loaded = load_model(path, dtype="float32")
    assert loaded.quantization == "gguf"
    assert loaded.kernels.startswith("native")
    assert loaded.model.is_exact
    assert loaded.folder is not None
    assert not list(loaded.folder.glob("*.safetensors")), "no dequantized copy"
    peer = AutoModelForCausalLM.from_pretrained(resolve_model(path), dtype=torch.float32)
    tokens = torch.randint(3, len(PIECES), (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = peer(torch.tensor([tokens])).logits[0]
    error = (at_once(loaded.model, tokens) - wanted).pow(2).mean().sqrt()
    assert error < share * (wanted.max() - wanted.min())
    of_matrices = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors if tensor.data.ndim > 1)
    assert loaded.model.footprint.weights < 1.1 * of_matrices + (64 << 10)
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_memory_are_those_of_the_blocks(kind: str, tmp_path: Path) -> None:
    require_like_its_values(written(tmp_path, kind=kind))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "qwen2moe", "qwen3moe"])
def test_families(family: str, tmp_path: Path) -> None:
    require_like_its_values(written(tmp_path, family, "Q5_1"))


def test_projections_of_one_product_may_have_several_kinds(tmp_path: Path) -> None:
    others = {"attn_v": "Q6_K", "ffn_up": "Q5_0", "ffn_down": "Q8_0", "token_embd": "IQ4_NL"}
    require_like_its_values(written(tmp_path, "qwen3", "Q4_K", others=others))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_experts_in_blocks(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, "qwen3moe", kind, others={"ffn_down_exps": "Q6_K", "ffn_up_exps": "Q5_1"})
    loaded, again = require_like_its_values(path, share=0.03), load_model(path, dtype="float32")
    assert torch.equal(logits_of(loaded), logits_of(again))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    texts = [[out.token_ids for out in LLM(again, draft).generate(PROMPTS, params)] for draft in (None, "ngram")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_changes_a_text(temperature: float, tmp_path: Path) -> None:
    path = written(tmp_path, kind="Q4_0")
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    texts = [[out.token_ids for out in LLM(path, draft).generate(PROMPTS, params)] for draft in (None, "ngram")]
    assert texts[0] == texts[1]


def converted(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of conversions."""
    found = [record for record in caplog.records if "is converted once" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found]


def test_other_kinds_are_converted_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture, store: Path) -> None:
    path = written(tmp_path, kind="Q8_0", others={"ffn_down": "BF16"})
    assert not is_block_file(path)
    for _ in range(2):
        prepared_folder(str(path))  # as command lines do before they load
        assert load_model(path).quantization is None
    assert len(converted(caplog)) == 1
    assert "native kernels do not read matrices of kind BF16" in converted(caplog)[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "torch"}, "kernels 'torch' need plain weights"),
        ({"quantization": "int8"}, "quantization 'int8' needs plain weights"),
        ({"dtype": "float16"}, "float32 or bfloat16, not float16"),
    ],
)
def test_options_that_need_other_weights_convert_once(
    options: dict[str, str], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path)
    for _ in range(2):
        prepared_folder(str(path))
        assert load_model(path, **options).quantization == options.get("quantization")
    assert len(converted(caplog)) == 1
    assert reason in converted(caplog)[0]


def test_blocks_are_no_option(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigurationError, match="unknown quantization 'gguf'"):
        load_model(path, quantization="gguf")


def test_a_file_is_prepared_without_conversion(tmp_path: Path) -> None:
    path = written(tmp_path)
    folder = prepared_folder(str(path))
    assert not list(folder.glob("*.safetensors"))
    assert load_model(path).folder == folder
