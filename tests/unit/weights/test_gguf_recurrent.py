"""GGUF files of models with recurrent layers become folders that compute the same logits.

`hybrid_gguf` writes them. Its tensors were equal to those of llama.cpp's converter (of 2026-10), and llama.cpp's logits
and greedy texts to those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.loading.resolve import is_block_file
from draftree.weights.cache import silent
from draftree.weights.convert_gguf import convert_gguf
from draftree.weights.gguf_file import GgufFile, block_shares
from hybrid_gguf import HYBRIDS, hybrid_model, write_hybrid
from weights_samples import PIECES


def converted(source: Path, folder: Path, dtype: Any = "float32") -> Any:
    folder.mkdir()
    convert_gguf(source, folder, dtype=dtype, progress=silent)
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, len(PIECES), (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_comes_back_from_gguf(family: str, tmp_path: Path) -> None:
    model = hybrid_model(family)
    write_hybrid(family, tmp_path / "model.gguf", model=model)
    back = converted(tmp_path / "model.gguf", tmp_path / "folder")
    assert type(back) is type(model)
    assert back.config.layer_types == model.config.layer_types
    if family != "falcon-h1":  # whose multipliers are in its weights
        for name, values in back.state_dict().items():
            torch.testing.assert_close(values, model.state_dict()[name], atol=1e-6, rtol=1e-6, msg=name)
    torch.testing.assert_close(logits(back), logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "qwen35", "falcon-h1"])
def test_small_tensors_keep_no_file_from_its_blocks(family: str, tmp_path: Path) -> None:
    """Filters and settings of states are float32 in every file, and matrices in rows of float32."""
    write_hybrid(family, tmp_path / "model.gguf", kind="Q8_0")
    file = GgufFile(tmp_path / "model.gguf")
    assert [share.kind for share in block_shares(file)] == ["Q8_0"]
    assert file.natural_dtype == "bfloat16"
    assert is_block_file(tmp_path / "model.gguf")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = hybrid_model("qwen35")
    write_hybrid("qwen35", tmp_path / "model.gguf", model=model, nextn_predict_layers=1)
    back = converted(tmp_path / "model.gguf", tmp_path / "folder")
    assert back.config.num_hidden_layers == 2
    assert back.config.layer_types == model.config.layer_types[:2]


def test_layers_are_recurrent_at_an_interval_where_the_file_does_not_say(tmp_path: Path) -> None:
    write_hybrid("qwen35", tmp_path / "model.gguf", full_attention_interval=2, **{"attention.recurrent_layers": None})
    back = converted(tmp_path / "model.gguf", tmp_path / "folder")
    assert back.config.layer_types == hybrid_model("qwen35").config.layer_types


def test_windows_between_convolutions_are_refused(tmp_path: Path) -> None:
    write_hybrid("lfm2", tmp_path / "model.gguf", **{"attention.sliding_window": 8})
    with pytest.raises(UnsupportedModelError, match="attends in windows between convolutions"):
        converted(tmp_path / "model.gguf", tmp_path / "folder")


def test_a_file_without_a_tensor_of_its_states_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_hybrid("falcon-h1", path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ssm_dt.bias", b"blk.1.ssm_xx.bias"))
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'blk\.1\.ssm_dt\.bias'"):
        converted(path, tmp_path / "folder")
