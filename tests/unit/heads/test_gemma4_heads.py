"""Assistants of Gemma 4 against transformers' own classes on random weights, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.base import TargetParts
from draftree.heads.folders import check_head, read_head
from draftree.heads.gemma4 import AssistantHead
from draftree.models.base import EmbeddingFacts
from families import VOCAB_SIZE
from gemma4_assistants import assistant, their_levels

WIDTH, SCALE = 32, 2.5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts() -> TargetParts:
    rows = drawn(VOCAB_SIZE, WIDTH, seed=1)
    return TargetParts(rows, rows, EmbeddingFacts(SCALE, 1.0), lambda states: states, 4)


def bound(folder: Path) -> AssistantHead:
    head = read_head(folder)
    check_head(folder)
    assert isinstance(head, AssistantHead)
    head.bind(parts())
    return head


@pytest.mark.parametrize("length", [3, 6, 7, 8, 15])  # the window is 6
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_rows_are_those_of_transformers(model_type: str, is_ordered: bool, length: int, tmp_path: Path) -> None:
    theirs = assistant(tmp_path, model_type=model_type, is_ordered=is_ordered)
    head = bound(tmp_path)
    keys = {
        kind: (drawn(1, 2, length, width, seed=width), drawn(1, 2, length, width, seed=width + 1))
        for kind, width in (("sliding_attention", 8), ("full_attention", 16))
    }

    def attend(window: int, query: Tensor) -> Tensor:
        key, value = keys["sliding_attention" if window else "full_attention"]
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[:, :, -window:], value[:, :, -window:], scale=1.0, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)

    tokens, hidden = [5, 17, 60], drawn(WIDTH, seed=9)
    wanted = their_levels(theirs, lambda ids: parts().embedding[ids] * SCALE, tokens, hidden, keys, length)
    before = head.project(hidden.view(1, 1, WIDTH))
    for level, token in enumerate(tokens):
        # beside another row, which changes nothing
        both = torch.cat((drawn(1, WIDTH), before))
        states = head.run(torch.tensor([8, token]), both, torch.tensor([length, length]), attend)
        torch.testing.assert_close(head.logits(states)[1], wanted[level], rtol=1e-4, atol=1e-4)
        before = head.recycle(states[1:])


def test_the_configuration_is_that_of_the_folder(tmp_path: Path) -> None:
    assistant(tmp_path, is_ordered=True)
    config = bound(tmp_path).config
    assert (config.kind, config.features, config.target_hidden, config.depth) == ("gemma4-assistant", (-1,), WIDTH, 4)
    assert config.windows == (7, 7, 0)
    assert config.layer == {"global_head_dim": 16, "num_centroids": VOCAB_SIZE // 8, "centroid_intermediate_top_k": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"vocab_size": VOCAB_SIZE + 1}, "not of one size"),
    ],
)
def test_a_damaged_configuration_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    assistant(tmp_path, is_ordered=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=message):
        read_head(tmp_path)
