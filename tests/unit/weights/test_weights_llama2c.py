"""A llama2.c checkpoint becomes a transformers model that computes the same logits."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree.core.errors import ModelLoadError
from draftree.weights.cache import silent
from draftree.weights.convert_llama2c import convert_llama2c
from draftree.weights.folders import check_model_folder
from weights_samples import PIECES, llama2c_file, llama2c_tensors, tokenizer_bin

Array = np.ndarray[Any, np.dtype[np.float64]]

DIM, HIDDEN, LAYERS = 24, 40, 2


def converted(tmp_path: Path, content: bytes) -> Path:
    source, folder = tmp_path / "model.llama2c", tmp_path / "folder"
    source.write_bytes(content)
    folder.mkdir()
    convert_llama2c(source, folder, progress=silent)
    return folder


def normalised(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x: Array, position: int) -> Array:
    """Turns neighbours (2i, 2i + 1) of every head together, as llama2.c does."""
    size = x.shape[-1]
    angles = position * 10_000.0 ** (-np.arange(0, size, 2) / size)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def llama2c_logits(tensors: dict[str, Array], ids: list[int], *, heads: int, kv_heads: int) -> Array:
    """The forward pass of llama2.c in double precision, token by token."""
    size = tensors["wq"].shape[1] // heads
    keys: list[list[Array]] = [[] for _ in range(LAYERS)]
    values: list[list[Array]] = [[] for _ in range(LAYERS)]
    rows = []
    for position, token in enumerate(ids):
        x = tensors["embedding"][token]
        for layer in range(LAYERS):
            h = normalised(x, tensors["attention_norm"][layer])
            query = rotated((tensors["wq"][layer] @ h).reshape(heads, size), position)
            keys[layer].append(rotated((tensors["wk"][layer] @ h).reshape(kv_heads, size), position))
            values[layer].append((tensors["wv"][layer] @ h).reshape(kv_heads, size))
            mixed = []
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = np.array([query[head] @ key[shared] for key in keys[layer]]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(sum(w * value[shared] for w, value in zip(weights, values[layer], strict=True)))
            x = x + tensors["wo"][layer] @ np.concatenate(mixed)
            h = normalised(x, tensors["ffn_norm"][layer])
            gate = tensors["w1"][layer] @ h
            x = x + tensors["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (tensors["w3"][layer] @ h))
        rows.append(tensors["embedding"] @ normalised(x, tensors["final_norm"]))
    return np.stack(rows)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (2, 1), (6, 3)])
def test_logits_are_those_of_llama2c(tmp_path: Path, heads: int, kv_heads: int) -> None:
    folder = converted(tmp_path, llama2c_file(seed=3, heads=heads, kv_heads=kv_heads))
    tensors = llama2c_tensors(3, dim=DIM, hidden=HIDDEN, layers=LAYERS, kv_dim=DIM // heads * kv_heads)
    doubles = {name: values.astype(np.float64) for name, values in tensors.items()}
    ids = [1, 260, 270, 5, 265, 280, 261, 299, 2, 262]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].numpy()
    reference = llama2c_logits(doubles, ids, heads=heads, kv_heads=kv_heads)
    np.testing.assert_allclose(ours, reference, atol=2e-4 * np.abs(reference).max())


def test_an_output_matrix_of_its_own_is_kept(tmp_path: Path) -> None:
    shared = llama2c_file()
    (vocab_size,) = struct.unpack_from("<i", shared, 20)
    end = len(shared) - len(tokenizer_bin())
    output = np.arange(vocab_size * DIM, dtype=np.float32)
    content = shared[:20] + struct.pack("<i", -vocab_size) + shared[24:end] + output.tobytes() + tokenizer_bin()
    model = AutoModelForCausalLM.from_pretrained(converted(tmp_path, content))
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, torch.from_numpy(output).reshape(vocab_size, DIM))


def test_the_folder_is_plain_and_lists_the_end_tokens(tmp_path: Path) -> None:
    folder = converted(tmp_path, llama2c_file())
    check_model_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 32
    # Texts of these models end with the token that begins them.
    assert model.generation_config.eos_token_id == [1, 2]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2


def test_byte_pieces_and_word_starts_are_spelled_out_again(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, llama2c_file()))
    assert [tokenizer.convert_ids_to_tokens(index) for index in range(len(PIECES))] == PIECES
    assert tokenizer("the é").input_ids == [1, PIECES.index("▁the"), PIECES.index("▁"), 3 + 0xC3, 3 + 0xA9]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it has 0 bytes"),
        (struct.pack("<7i", 24, 40, 2, 5, 1, 300, 32), "do not describe a model"),
        (struct.pack("<7i", 0, 0, 0, 0, 0, 0, 0), "do not describe a model"),
        (llama2c_file()[:5000], "ends within the tensor"),
        (llama2c_file()[:-3], r"tokenizer ends (at|within) piece"),
        (llama2c_file()[:-200], "tokenizer ends at piece"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        converted(tmp_path, content)
